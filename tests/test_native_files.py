"""Folders of compiled files: those unused for long are removed, also beside other processes."""

from __future__ import annotations

import os

import native_files


def test_unused_folders_are_removed_and_vanished_ones_are_passed_over(tmp_path, monkeypatch):
    monkeypatch.setattr(native_files, "FOLDER", tmp_path)
    used, unused = tmp_path / "used", tmp_path / "unused"
    used.mkdir()
    unused.mkdir()
    os.utime(unused, (0, 0))
    # Listed without a status, as a folder is that another thread removes after it was listed
    (vanished := tmp_path / "0").symlink_to("nowhere")
    native_files.remove_unused()
    assert used.exists() and not unused.exists() and vanished.is_symlink()

"""Checks that take hours, or a GPU, end with an error if anything that they verify is wrong."""

from __future__ import annotations

import argparse
import sys
from types import SimpleNamespace as Space
from typing import Any

import pytest
from launching import ROOT

sys.path.insert(0, str(ROOT / "scripts" / "verify"))
import gpu_training
import versions

ROW = {"name": "py3.11", "demo_accuracy": 0.9, "passed": 9, "failed": 0, "error": 0}


@pytest.mark.parametrize(
    ("change", "wrong"),
    [
        ({}, False),
        ({"failed": 1, "failed_tests": ["one"]}, True),
        # Errors alone, and an end of pytest without a count, were taken for success
        ({"error": 1, "failed_tests": ["one"]}, True),
        ({"passed": 0, "failed_tests": []}, True),
        ({"demo_accuracy": None}, True),
    ],
)
def test_versions(change: dict[str, Any], wrong: bool) -> None:
    assert versions.is_wrong(ROW | change) == wrong


@pytest.mark.parametrize(
    ("scheme", "equal", "finite", "right"),
    [
        ("torus", True, True, True),
        ("torus", False, True, False),
        ("torus", True, False, False),
        ("no exchange", False, True, True),
        ("no exchange", True, True, False),
    ],
)
def test_gpu_training(
    scheme: str, equal: bool, finite: bool, right: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It printed `equal: false` and ended with status 0."""
    comm = Space(rank=0, topology=Space(size=2), by_nccl=False)
    for name in ("make_model", "fit"):
        monkeypatch.setattr(gpu_training, name, lambda *given: None)
    row = {"equal": equal, "finite": finite}
    monkeypatch.setattr(gpu_training, "results", lambda *given: row)
    options = argparse.Namespace(batch=1, pixels=4, rates=[], steps=3, schemes=[scheme])
    assert gpu_training.train(comm, options) == right

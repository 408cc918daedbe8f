"""Files and folders of the user that ended a command with a traceback."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from launching import ROOT

from tfcommx.cli import main
from tfcommx.cli.report import report
from tfcommx.core import ConfigurationError, files
from tfcommx.report.summary import FILE, REQUIRED, ReportError
from tfcommx.report.terminal import read_to_show


def status_of(monkeypatch: pytest.MonkeyPatch, *words: str) -> object:
    """Run the command line in this process; return its exit status."""
    monkeypatch.setattr(sys, "argv", ["tfcommx", *words])
    with pytest.raises(SystemExit) as ended:
        main.main()
    return ended.value.code


def test_a_folder_for_the_schema_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert status_of(monkeypatch, "schema", str(tmp_path)) == 2
    assert capsys.readouterr().err.startswith("tfcommx: ")


@pytest.mark.parametrize("reason", [errno.ENOSPC, errno.EROFS, errno.EACCES])
def test_a_disk_that_takes_no_file_is_no_traceback(
    reason: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def refuse(path: Path) -> None:
        raise OSError(reason, os.strerror(reason), str(path))

    monkeypatch.setattr(files, "_sync", refuse)
    assert status_of(monkeypatch, "schema", str(tmp_path / "schema.json")) == 2
    text = capsys.readouterr().err
    assert text.startswith("tfcommx: ") and os.strerror(reason) in text and str(tmp_path) in text
    monkeypatch.setattr(files, "_sync", lambda path: 1 / 0)
    monkeypatch.setattr(sys, "argv", ["tfcommx", "schema", str(tmp_path / "schema.json")])
    with pytest.raises(ZeroDivisionError):
        main.main()


def test_a_closed_output_is_no_error(tmp_path: Path) -> None:
    """`tfcommx simulate >&-` ended with AttributeError: NoneType has no isatty."""
    command = f"{sys.executable} -m tfcommx.cli.main simulate --json {tmp_path}/rows >&- 2>&- <&-"
    ended = subprocess.run(command, shell=True, env={**os.environ, "PYTHONPATH": str(ROOT)})
    assert ended.returncode == 0 and json.loads((tmp_path / "rows").read_text())["nodes"] == 4


@pytest.mark.parametrize("damage", [{"throughput": "x"}, {"rows": [{}]}, {"seconds": None}])
def test_a_summary_that_no_table_can_show_is_named(damage: dict[str, Any], tmp_path: Path) -> None:
    """It was read, and its table ended with a traceback."""
    summary = {name: 1 for name in REQUIRED} | {"counted": "images", "rows": []}
    (tmp_path / FILE).write_text(json.dumps(summary))
    read_to_show(tmp_path)
    (tmp_path / FILE).write_text(json.dumps(summary | damage))
    for folders in ([tmp_path], [tmp_path, tmp_path]):
        with pytest.raises(ReportError, match=FILE):
            report(folders)


def test_a_rate_of_almost_nothing_is_refused() -> None:
    """The step took forever, and its drawing could not turn that into a column."""
    from tfcommx.cli.simulate import Settings, simulated_step

    with pytest.raises(ConfigurationError, match="inf s"):
        simulated_step(Settings(between_gbit=1e-310))

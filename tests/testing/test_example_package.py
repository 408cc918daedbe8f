"""The example package is installed as a stranger's, holds the laws, and trains on real ranks."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from launching import QUICK, ROOT, WORKERS, horovodrun

EXAMPLE = ROOT / "scripts" / "examples" / "own_compression"


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Install a copy of the example, so that nothing is built beside the original."""
    target = tmp_path_factory.mktemp("site")
    source = tmp_path_factory.mktemp("source")
    for file in EXAMPLE.iterdir():
        if file.is_file():
            (source / file.name).write_bytes(file.read_bytes())
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation"]
    subprocess.run([*pip, "--target", target, source], check=True)
    return target


@pytest.mark.extended
def test_it_is_installed_outside_and_holds_the_laws(
    installed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(installed))
    import rotating_rows

    from tfcommx.testing import check_compression

    assert Path(rotating_rows.__file__).parent == installed
    check_compression("rotating_rows:ROTATING")
    assert len((EXAMPLE / "rotating_rows.py").read_text().splitlines()) <= 70


@pytest.mark.exhaustive
@pytest.mark.parametrize("route", ["allreduce", "auto"])
def test_it_trains_on_real_ranks(installed: Path, route: str) -> None:
    path = f"{installed}:{QUICK}:{':'.join(sys.path)}"
    output = _train(route, "compression", "rotating_rows:ROTATING", path)
    if route == "allreduce":
        assert output.count("rotating_rows:ROTATING") == 2


@pytest.mark.exhaustive
def test_a_wire_format_trains_on_real_ranks() -> None:
    path = ":".join([str(Path(__file__).parent), QUICK, *sys.path])
    assert _train("allgather", "wire", "pairs_format:PAIRS", path).count("pairs_format:PAIRS") == 2


def _train(route: str, field: str, member: str, path: str) -> str:
    """Return the output of two ranks, after a check that both learn the same."""
    worker = [str(WORKERS / "own_member_rank.py"), route, field, member]
    ended = horovodrun(2, worker, PYTHONPATH=path)
    assert ended.status == 0, ended.output[-4000:]
    assert ended.output.count("falls True") == 2
    assert len(set(re.findall(r"digest (\S+)", ended.output))) == 1
    return ended.output

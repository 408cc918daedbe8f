"""Runs that were stopped or killed end with the bits of the run that was not, on real ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
from launching import WORKERS, horovodrun

DONE = "all as it should be"


def launch(ranks: int, folder: Path, task: str) -> str:
    ended = horovodrun(ranks, [str(WORKERS / "resume.py"), str(folder), task], seconds=1500)
    assert ended.status == 0 and ended.output.count(DONE) == ranks, ended.output[-6000:]
    return ended.output


@pytest.mark.exhaustive
@pytest.mark.long_wait
def test_stopped_runs_are_resumed_bit_for_bit(tmp_path: Path) -> None:
    """Stopped by time after one step, and by a signal to one of two ranks where a phase begins."""
    launch(2, tmp_path, "few")


@pytest.mark.exhaustive
@pytest.mark.parametrize("ranks", [2, 4])
def test_killed_runs_are_resumed_bit_for_bit(ranks: int, tmp_path: Path) -> None:
    """Stopped at and next to each boundary of phases; killed at random steps."""
    launch(ranks, tmp_path, "many")


@pytest.mark.exhaustive
def test_a_run_goes_on_in_mid_epoch_with_another_number_of_ranks(tmp_path: Path) -> None:
    launch(4, tmp_path, "stop")
    output = launch(2, tmp_path, "continue")
    assert "was saved after step 2 of 4" not in output  # as many steps: the joint batch is equal

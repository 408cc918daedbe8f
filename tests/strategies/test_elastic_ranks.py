"""Elastic averaging on real ranks: fit, loops, checkpoints, and ranks that are killed."""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest
from launching import LAUNCHERS, WORKERS, horovodrun


@pytest.fixture
def recovering(monkeypatch: pytest.MonkeyPatch) -> str:
    """A launcher whose ranks may die."""
    recovers = [f"{word} --enable-recovery" for word in LAUNCHERS["mpi"] if "--mpi-args" in word]
    words = [word for word in LAUNCHERS["mpi"] if "--mpi-args" not in word]
    monkeypatch.setitem(LAUNCHERS, "recovering", [*words, *recovers])
    return "recovering"


@pytest.mark.long_wait
@pytest.mark.exhaustive
def test_a_rank_that_dies_while_it_sends_blocks_nobody(recovering: str) -> None:
    """The message has begun and never ends. Within a machine, too, it goes piece by piece here."""
    ended = horovodrun(
        3,
        [str(WORKERS / "dies_sending.py")],
        recovering,
        seconds=240,
        OMPI_MCA_smsc="^cma,knem,xpmem",
    )
    said = {rank: re.findall(rf"rank {rank}: (.*)", ended.output) for rank in range(3)}
    assert said[2] == ["is killed"], ended.output[-6000:]
    assert said[0] == said[1] and said[0][0].startswith("ended -"), ended.output[-6000:]


@pytest.mark.long_wait
@pytest.mark.exhaustive
def test_ranks_train_at_their_own_pace_and_go_on_without_one_that_dies(
    tmp_path: Path, recovering: str
) -> None:
    """One launch of three ranks: all that needs the real Horovod, MPI and watch."""
    command = [str(WORKERS / "elastic.py"), str(tmp_path / "saved")]
    ended = horovodrun(3, command, recovering, seconds=420)
    said = {rank: re.findall(rf"rank {rank}: (.*)", ended.output) for rank in range(3)}
    report = ended.output[-6000:]

    # `fit` of 30, 24 and 12 steps an epoch: all have the same centre, and it has learnt
    for rank in range(3):
        assert said[rank][0] == "equal True", report
        assert float(said[rank][1].removeprefix("error ")) < 1.0, report
        assert said[rank][2:4] == ["epoch 2 restored True", "equal again True"], report
    assert "saved True keras.src.optimizers.sgd" in said[0], report
    # A loop with a gradient that is not finite on rank 1: it alone skips the step
    assert said[2][-1].startswith("is killed"), report
    for rank, steps in enumerate((20, 24, 30)):
        assert f"loop True {steps}" in said[rank], report
        assert any("CompareReplicas needs ranks" in line for line in said[rank]), report

    # Rank 2 dies: 0 and 1 end their training with equal weights, and refuse collectives
    states = [line for rank in (0, 1) for line in said[rank] if line.startswith("survives")]
    assert len(states) == 2 and states[0] == states[1], report
    for rank in (0, 1):
        assert any("after rank 2 has left" in line for line in said[rank]), report

    # Then rank 0, which holds the centre: rank 1 ends, and names it
    assert said[0][-1].startswith("is killed at "), report
    assert time.time() - float(said[0][-1].rpartition(" ")[2]) < 60, report
    assert re.search(r"rank 1 ends, because ranks are missing: rank 0 on \S+ \(", ended.output)
    assert ended.status != 0 and "never ends" not in ended.output, report

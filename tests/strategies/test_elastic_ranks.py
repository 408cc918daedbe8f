"""Elastic averaging on real ranks: fit, loops, checkpoints, and ranks that are killed."""

from __future__ import annotations

import re
import sys
import time
from pathlib import Path

import pytest
from launching import LAUNCHERS, WORKERS, horovodrun

from tfcommx.checkpoint.files import read_own_head


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
    """The message has begun and never ends. Within a machine, too, it is sent in pieces here."""
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
@pytest.mark.parametrize("server", ["thread", "sharded", "extra_rank"])
def test_ranks_train_at_their_own_pace_and_go_on_without_one_that_dies(
    tmp_path: Path, recovering: str, server: str
) -> None:
    """One launch of three ranks: all that needs the real Horovod, MPI and watch."""
    command = [str(WORKERS / "elastic.py"), str(tmp_path / "saved"), server]
    if server == "extra_rank":
        command = ["-m", "tfcommx.cli.main", "centre", "--", sys.executable, *command]
    ended = horovodrun(3 + (server == "extra_rank"), command, recovering, seconds=420)
    said = {rank: re.findall(rf"rank {rank}: (.*)", ended.output) for rank in range(3)}
    report = ended.output[-6000:]

    # `fit` of 30, 24 and 12 steps an epoch: all have the same centre, and it has learnt
    for rank in range(3):
        assert said[rank][0] == "equal True", report
        assert float(said[rank][1].removeprefix("error ")) < 1.0, report
        assert said[rank][2] == "epoch 2 restored True", report
        assert float(said[rank][3].removeprefix("saved error ")) < 1.0, report
        assert said[rank][4] == "equal again True", report
    assert "saved True keras.src.optimizers.sgd" in said[0], report
    # A loop with a gradient that is not finite on rank 1: it alone skips the step
    for rank, steps in enumerate((20, 24, 30)):
        assert f"loop True {steps}" in said[rank], report
        assert any("CompareReplicas needs ranks" in line for line in said[rank]), report

    # One dies: the others end their training with equal weights, save, and refuse collectives
    if server != "sharded":
        dead = 0 if server == "extra_rank" else 2
        others = {0, 1, 2} - {dead}
        assert said[dead][-1].startswith("kills itself"), report
        states = [line for rank in others for line in said[rank] if line.startswith("survives")]
        assert len(states) == 2 and states[0] == states[1], report
        for rank in others:
            assert any(f"after rank {dead} has left" in line for line in said[rank]), report
        assert read_own_head(tmp_path / "saved" / "after").epoch == 2, report

    # Then a server: the other ranks end, and name it
    killer, lost, others = {
        "thread": (0, r"rank 0 on \S+ \(", [1]),
        "sharded": (1, r"rank 1 on \S+ \(", [0, 2]),
        "extra_rank": (1, r"rank 3 on \S+, which holds the centre \(", [2]),
    }[server]
    (last,) = [line for line in said[killer] if line.startswith("kills ")]
    assert time.time() - float(last.rpartition(" ")[2]) < 60, report
    for rank in others:
        assert re.search(rf"rank {rank} ends, because ranks are missing: {lost}", ended.output), (
            report
        )
    assert ended.status != 0 and "never ends" not in ended.output, report

    if server == "extra_rank":
        (resident,) = re.findall(r"rank 0: server (\d+) kB, False", ended.output)
        assert int(resident) < 80_000, report


@pytest.mark.long_wait
@pytest.mark.exhaustive
def test_a_launch_with_a_process_for_a_centre_ends_also_if_nobody_uses_it(recovering: str) -> None:
    """And it is no rank: the ranks that train, and their groups, meet in collectives and messages.

    With `node_size` Horovod starts MPI, without it mpi4py: the process waits in both cases.
    """
    code = (
        "import tensorflow as tf, tfcommx as cx; comm = cx.init(node_size=2); "
        "mine = tf.constant([1.0, comm.rank]); "
        "sums = [comm.allreduce(mine, name, name) for name in ('world', 'node', 'peers')]; "
        "comm.messages.open(); said = [one.numpy().tolist() for one in sums]; "
        "print(f'rank {comm.rank} of {cx.size()}: {said}')"
    )
    command = ["-m", "tfcommx.cli.main", "centre", "--", sys.executable, "-c", code]
    ended = horovodrun(5, command, recovering, seconds=200)
    assert ended.status == 0, ended.output[-6000:]
    for rank in range(4):
        node, peers = 4 * (rank // 2) + 1, 2 * (rank % 2) + 2
        line = f"rank {rank} of 4: [[4.0, 6.0], [2.0, {node}.0], [2.0, {peers}.0]]"
        assert line in ended.output, ended.output[-6000:]
    assert "No training has used the process that holds the centre" in ended.output

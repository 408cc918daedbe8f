"""Folders of checkpoints that differ between the ranks, or that another run uses."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import logging
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import keras
import numpy as np
import pytest

import tfcommx as cx
from tfcommx import checkpoint
from tfcommx.checkpoint import lock, newest, restoring, saving, snapshots
from tfcommx.checkpoint.files import residuals_name
from tfcommx.collectives.comm import Comm


def small() -> keras.Model:
    net = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    net.compile(cx.DistributedOptimizer(keras.optimizers.SGD(0.1)), "mse", jit_compile=False)
    return net


def train(*callbacks: keras.callbacks.Callback) -> None:
    every = [cx.callbacks.BroadcastState(), *callbacks]
    small().fit(np.ones((8, 2)), np.ones(8), verbose=0, callbacks=every)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lock, "WAIT_SECONDS", 0.2)


def test_ranks_that_name_other_folders_are_refused(comm: Comm, folder: Path) -> None:
    """A folder named after the time at which each rank had started was another on each rank.

    The ranks saved into two folders, and none could be restored.
    """
    if comm.topology.size == 1:
        pytest.skip("takes several ranks")
    own = folder / f"started-{comm.rank}"
    with pytest.raises(cx.ConfigurationError, match=r"`folder`.*started-0'.*rank 0\b.*started-1'"):
        train(checkpoint.Checkpoint(own))
    for call in (
        lambda: checkpoint.save(small(), own, 0),
        lambda: checkpoint.restore(small(), own),
        lambda: checkpoint.next_epoch(own),
    ):
        with pytest.raises(cx.ConfigurationError, match=r"started-0'.*rank 0\b.*started-1'"):
            call()
    with pytest.raises(cx.ConfigurationError, match="`keep`"):
        train(checkpoint.Checkpoint(folder, keep=1 + comm.rank))
    with pytest.raises(cx.ConfigurationError, match="`memory_every`"):
        train(checkpoint.Checkpoint(folder, memory_every=10 + comm.rank))


def test_relative_folders_in_other_working_directories_are_refused(
    comm: Comm, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if comm.topology.size == 1:
        pytest.skip("takes several ranks")
    if len(set(comm.gather_objects(socket.gethostname()))) > 1:
        pytest.skip("takes ranks of one host: each host may have its own folder")
    (folder / f"of-{comm.rank}").mkdir()
    monkeypatch.chdir(folder / f"of-{comm.rank}")
    with pytest.raises(cx.CheckpointError, match=r"of-0/run .*rank 0\b.*of-1/run .*rank 1\b"):
        train(checkpoint.Checkpoint("run"))


def test_a_folder_that_is_a_file_on_one_rank_is_refused_on_all(comm: Comm, folder: Path) -> None:
    if comm.rank == 0:
        (folder / "run").write_text("")
    comm.gather_objects("written")
    with pytest.raises(cx.CheckpointError, match=r"/run\b.*rank 0\b.*/run\b"):
        train(checkpoint.Checkpoint(folder / "run"))


@contextlib.contextmanager
def another_run(comm: Comm, folder: Path) -> Iterator[None]:
    """Hold the lock of a folder on rank 0 as another run does."""
    opened = os.open(folder / lock.LOCK, os.O_RDWR | os.O_CREAT) if comm.rank == 0 else None
    if opened is not None:
        fcntl.flock(opened, fcntl.LOCK_EX)
        owner = lock.Owner("another", 0, "elsewhere", 4711)
        os.pwrite(opened, json.dumps(owner._asdict()).encode(), 0)
    comm.gather_objects("held")
    try:
        yield
    finally:
        comm.gather_objects("tried")
        if opened is not None:
            os.close(opened)
        comm.gather_objects("free")


def test_a_second_run_is_refused_by_name_until_the_first_has_ended(
    comm: Comm, folder: Path
) -> None:
    """Two runs that saved into one folder deleted each other's files."""
    named = r"\banother\b.*\b4711\b.*\belsewhere\b"
    with another_run(comm, folder):
        with pytest.raises(cx.CheckpointError, match=named):
            train(checkpoint.Checkpoint(folder))
        with pytest.raises(checkpoint.SaveError, match=named):
            checkpoint.save(small(), folder, 0)
        assert checkpoint.last(folder) is None  # Reading is allowed
    train(checkpoint.Checkpoint(folder))
    assert checkpoint.next_epoch(folder) == 1
    with another_run(comm, folder):  # `fit` has released it
        pass


def test_a_folder_that_one_node_cannot_lock_is_free_for_another_run(
    comm: Comm, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0 held its lock until the program ended."""
    if comm.topology.size == 1 or comm.topology.slots > 1:
        pytest.skip("takes a node for each of several ranks")
    if comm.rank == 1:
        monkeypatch.setattr(lock, "take", refused)
    with pytest.raises(checkpoint.SaveError, match=r"rank 1\b.*Errno 116"):
        checkpoint.save(small(), folder, 0)
    comm.gather_objects("refused")
    assert not (folder / lock.LOCK).exists()


def test_a_folder_that_another_run_has_taken_over_is_left_alone(comm: Comm, folder: Path) -> None:
    """A host that cannot be reached continues with the generation before."""
    model = small()
    checkpoint.save(model, folder, 0)
    before = sorted(path.name for path in folder.iterdir())
    comm.gather_objects("seen")
    if comm.rank == 0:
        (folder / lock.LOCK).unlink()
    comm.gather_objects("removed")
    with another_run(comm, folder):
        for _ in range(2):
            with pytest.raises(checkpoint.SaveError, match=r"\banother\b.*\b4711\b.*\belsewhere\b"):
                checkpoint.save(model, folder, 1)
        assert sorted(path.name for path in folder.iterdir()) == before


@pytest.mark.extended
def test_a_folder_of_each_node_is_told(
    comm: Comm, folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """On a disk of each node, a restart on other nodes misses files; nothing said so before."""
    if comm.topology.size == 1:
        pytest.skip("takes several ranks")
    train(checkpoint.Checkpoint(folder))
    assert not caplog.records
    if comm.rank == 1:
        monkeypatch.setattr(saving.lock, "seen_owner", lambda folder: None)
    with caplog.at_level(logging.WARNING):
        train(checkpoint.Checkpoint(folder))
    told = [
        one.message for one in caplog.records if "is another than that of rank 0" in one.message
    ]
    assert len(told) == (comm.rank == 0)


def test_a_loop_continues_on_nodes_without_the_file_of_the_model(
    comm: Comm, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their ranks kept their first weights, and the replica guard ended each generation."""
    saved, restored = small(), small()
    checkpoint.save(saved, folder, 0)
    monkeypatch.setattr(snapshots, "newest_of_run", newest.newest)
    monkeypatch.setattr(restoring, "is_file", lambda path: not comm.rank and path.is_file())
    assert checkpoint.Snapshots(restored, folder, None).restore() == (1, 0)
    wanted = comm.gather_objects([weight.tolist() for weight in saved.get_weights()])[0]
    assert [weight.tolist() for weight in restored.get_weights()] == wanted


def test_a_name_that_one_rank_cannot_write_leaves_the_save_before(
    comm: Comm, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0 had named the new save, whose files all ranks then removed: none could be restored."""
    if comm.topology.size == 1:
        pytest.skip("takes several ranks")
    model, write_head = small(), saving.write_head
    checkpoint.save(model, folder, 0)

    def refuse_on_last(head: checkpoint.Head, into: Path) -> None:
        if comm.rank == comm.topology.size - 1:
            time.sleep(0.5)  # Rank 0 has written it
            raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))
        write_head(head, into)

    with monkeypatch.context() as patch:
        patch.setattr(saving, "write_head", refuse_on_last)
        if comm.topology.slots > 1:
            pytest.skip("takes a node for each rank, which writes the head, too")
        with pytest.raises(checkpoint.SaveError, match=rf"rank {comm.topology.size - 1}\b"):
            checkpoint.save(model, folder, 1)
    assert checkpoint.restore(small(), folder) == 1
    checkpoint.save(model, folder, 1)
    assert checkpoint.restore(small(), folder) == 2


def test_the_notes_of_rank_0_count(
    comm: Comm, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last node that wrote checkpoint.json put its own notes there: half of rank 0's went."""
    if comm.topology.size == 1:
        pytest.skip("takes several ranks")
    write_head = saving.write_head

    def in_turn(head: checkpoint.Head, into: Path) -> None:
        time.sleep(0.3 * comm.rank)
        write_head(head, into)

    monkeypatch.setattr(saving, "write_head", in_turn)
    checkpoint.save(small(), folder, 0, notes={"seconds": 0.5 + comm.rank})
    last = checkpoint.last(folder)
    assert last is not None and last.notes == {"seconds": 0.5}


def test_faults_of_one_rank_are_errors_of_all(
    comm: Comm, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They were raised on that rank alone, while the others waited for it."""
    if comm.topology.size == 1:
        pytest.skip("takes several ranks")
    model = small()
    checkpoint.save(model, folder, 0)
    with monkeypatch.context() as patch:
        if comm.rank == 1:
            patch.setattr(Path, "read_text", refused)
        with pytest.raises(checkpoint.SaveError, match=r"rank 1\b.*Errno 116"):
            checkpoint.save(model, folder, 1)
        with pytest.raises(cx.CheckpointError, match=r"rank 1\b.*Errno 116"):
            checkpoint.restore(model, folder)
    with monkeypatch.context() as patch:
        if comm.rank == 1:
            patch.setattr(saving, "write_residuals", refused)
            patch.setattr(saving.shutil, "disk_usage", refused)
        with pytest.raises(checkpoint.SaveError, match=r"rank 1\b.*Errno 116"):
            checkpoint.save(model, folder, 1)
    with monkeypatch.context() as patch:
        if comm.rank == 0:  # As a layer whose `get_config` fails
            patch.setattr(model, "get_config", lambda: {}["units"])
        with pytest.raises(checkpoint.SaveError, match=r"rank 0: KeyError: 'units'\."):
            checkpoint.save(model, folder, 1)
    assert checkpoint.restore(model, folder) == 1
    with monkeypatch.context() as patch:
        if comm.rank == 1:  # The file of another save on this node's own disk
            wrong = dict(np.load(folder / residuals_name(0, 1)))
            head = json.loads(str(wrong["head"])) | {"tag": "another"}
            np.savez(folder / residuals_name(0, 1), **wrong | {"head": np.array(json.dumps(head))})
        comm.gather_objects("changed")
        with pytest.raises(cx.CheckpointError, match=r"Rank 1 .*another"):
            checkpoint.restore(model, folder)


def refused(*_: object, **__: object) -> None:
    raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))

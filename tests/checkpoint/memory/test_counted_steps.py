"""Steps of a supervised run, and the notes that its snapshots have."""

from __future__ import annotations

import math
from collections import OrderedDict
from pathlib import Path
from types import SimpleNamespace

import pytest

import tfcommx as cx
from tfcommx.checkpoint import callback as module
from tfcommx.checkpoint import snapshots as snapshots_module
from tfcommx.checkpoint.callback import Checkpoint
from tfcommx.checkpoint.files import Head
from tfcommx.checkpoint.newest import Newest
from tfcommx.collectives.threads import ThreadComm
from tfcommx.core import Topology


@pytest.mark.parametrize(("steps", "together"), [(5, 2), (6, 2), (1, 4), (3, 1), (None, 2)])
def test_all_steps_of_an_epoch_count_once(
    steps: int | None, together: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With steps_per_execution=2, five steps counted as six: `total` grew by one an epoch."""
    monkeypatch.setattr(module, "save", lambda *_, **__: None)
    counted: list[int] = []
    callback = Checkpoint(tmp_path)
    callback._snapshots = SimpleNamespace(  # type: ignore[assignment]
        after_step=lambda epoch, step, steps, taken: counted.append(taken),
        end_epoch=lambda epoch, taken: counted.append(taken),
        notes=dict,
    )
    callback._model = SimpleNamespace(steps_per_execution=together)
    callback.set_params({"steps": steps, "epochs": 1})
    callback.on_epoch_begin(0)
    for batch in range(0, steps or 4, together):
        callback.on_train_batch_begin(batch)
    callback.on_epoch_end(0)
    assert sum(counted) == (steps or 4)


def test_snapshots_need_whole_steps(tmp_path: Path) -> None:
    with pytest.raises(cx.ConfigurationError, match="`every`"):
        cx.checkpoint.Snapshots(None, tmp_path, 0)


class Recorded(cx.checkpoint.Snapshots):
    """Snapshots of one rank as a thread, of which only the heads are recorded."""

    def __init__(self, comm: ThreadComm, every: int = 1) -> None:
        self._comm, self.every, self.total, self._next = comm, every, 0, 7
        self.supervised = SimpleNamespace(run="a run", generation=2)  # type: ignore[assignment]
        self._due, self._until, self._link, self._writing, self._said = False, 0, None, None, 0.0
        self.heads: list[Head] = []

    def _vote(self) -> tuple[bool, bool]:
        return True, False

    def _capture(self, head: Head) -> None:
        self.heads.append(head)


def test_a_generation_mirrors_its_first_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A lost host had the mirrors of another, whose loss some steps later lost the snapshot."""
    found = Newest(Head(3, -1, 1, 15, 20), tmp_path, "memory")
    monkeypatch.setattr(snapshots_module, "newest_of_run", lambda folder: found)
    monkeypatch.setattr(snapshots_module, "restored", lambda model: found)

    def work(comm: ThreadComm) -> list[Head]:
        snapshots = Recorded(comm, every=100)
        snapshots.folder, snapshots.model = tmp_path, SimpleNamespace(weights=[])
        snapshots.load()
        snapshots.after_step(0, 16, 20)
        return snapshots.heads

    ((head,),) = ThreadComm.run(Topology(1, 1), work)
    assert (head.save, head.step) == (4, 16)


def test_all_ranks_write_the_notes_of_rank_0(monkeypatch: pytest.MonkeyPatch) -> None:
    """A recipe's notes have each rank's own seconds.

    No snapshot of such a run was found on four hosts, because their heads differed.
    """
    monkeypatch.setattr(snapshots_module, "supervision", lambda: SimpleNamespace(run="a run"))

    def work(comm: ThreadComm) -> list[Head]:
        snapshots, notes = Recorded(comm), OrderedDict(seconds=0.5 + comm.rank, loss=math.nan)
        snapshots.after_step(1, 1, 5, notes=lambda: notes)
        return snapshots.heads

    (head,), *others = ThreadComm.run(Topology(3, 1), work)
    assert others == [[head]] * 2
    assert head.notes == {"seconds": 0.5, "loss": None, "total_steps": 1, "run": "a run"}

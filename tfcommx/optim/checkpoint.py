"""Checkpoints that lose nothing: the model and its optimizer from rank 0, what is still owed from every rank.

    folder/
      checkpoint.json                 written last: names the epoch that is whole, and the number of ranks
      model-0003.keras                weights and optimizer state, a plain Keras file
      owed-0003-rank-0000.npz         one per rank: residuals and velocities, as they lie in its plan

A checkpoint is whole when checkpoint.json names it: a run that is killed while it saves leaves the one before intact.
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any, NamedTuple

import keras
import numpy as np

from tfcommx import comm
from tfcommx.optim.callbacks import accumulated, exchanger_of
from tfcommx.optim.exchanger import Left, sum_owed
from tfcommx.schedule.run import Owed, owed_of
from tfcommx.terms import Plan, PlanError

HEAD = "checkpoint.json"
OURS = re.compile(r"\.?(?:model-(\d{4,})\.keras|owed-(\d{4,})-rank-(\d{4,})\.npz)")  # epoch; epoch, rank


class Checkpoint(keras.callbacks.Callback):
    """Save model, optimizer and residuals at the end of every epoch; the last one is kept.

    Args:
        folder: where to; on every node, or on a file system that all nodes see.

    **Ranks:** all. **Cost:** rank 0 writes the model, each rank its residuals (4 bytes per entry that it selects from).
    """

    def __init__(self, folder: str | Path) -> None:
        super().__init__()
        self.folder = Path(folder)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        save(self.model, self.folder, epoch)


def save(model: keras.Model, folder: str | Path, epoch: int) -> None:
    """Write a whole checkpoint of `epoch`, then forget the one before. **Ranks:** all, between the same two steps."""
    here, folder = comm.current(), Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    if here.rank == 0:
        part = folder / f".model-{epoch:04d}.keras"
        model.save(part)
        part.rename(folder / f"model-{epoch:04d}.keras")
    _write_owed(model, folder / _owed_name(epoch, here.rank))
    here.gather_objects("written")
    if here.rank % here.topology.slots == 0:  # one rank of each node: the folder may be the node's own
        part = folder / f".{HEAD}.{here.rank}"
        part.write_text(json.dumps({"epoch": epoch, "ranks": here.topology.size}) + "\n")
        part.rename(folder / HEAD)
    here.gather_objects("named")
    for old in folder.iterdir():
        if (found := OURS.fullmatch(old.name)) and int(found[1] or found[2]) != epoch:
            writer = int(found[3] or 0)  # of a run with more ranks, too
            if writer % here.topology.size == here.rank:
                old.unlink(missing_ok=True)


def next_epoch(folder: str | Path) -> int:
    """Return the epoch after the last whole checkpoint; 0 without one. **Ranks:** all; what rank 0 sees counts."""
    head = _head(Path(folder))
    return 0 if head is None else head["epoch"] + 1


def _head(folder: Path) -> dict[str, int] | None:
    mine = json.loads((folder / HEAD).read_text()) if (folder / HEAD).is_file() else None
    return comm.current().gather_objects(mine)[0]


def restore(model: keras.Model, folder: str | Path) -> int:
    """Load the last whole checkpoint into a compiled model with a wrapped optimizer; return the next epoch's number.

    With the plan and the number of ranks that it was saved under, every rank continues with exactly its own residuals.
    Otherwise they are dealt out anew so that what they owe to the weights is conserved: their sum over the ranks for op
    "sum", their sum divided by the number of ranks for op "average". Velocities are treated as residuals are; where the plan
    has no momentum they rest until one has. Sums of gradients that are being accumulated are dealt out likewise.

    Keras's own training step is traced again if there was one; a `tf.function` of your own must be made again.

    **Ranks:** all; each must see the files of the ranks that it inherits from (its own number, and that plus multiples of
    the number of ranks). Without a checkpoint in `folder`, nothing is loaded and 0 is returned.
    **Raises:** FileNotFoundError that names the missing file; PlanError for variables that the model does not have.
    """
    here, folder = comm.current(), Path(folder)
    if (head := _head(folder)) is None:
        return 0
    epoch, ranks = head["epoch"], head["ranks"]
    weights = folder / f"model-{epoch:04d}.keras"
    mine = [folder / _owed_name(epoch, rank) for rank in range(here.rank, ranks, here.topology.size)]
    missing = [str(path) for path in ([weights] if here.rank == 0 else []) + mine if not path.is_file()]
    for rank, names in enumerate(here.gather_objects(missing)):
        if names:
            raise FileNotFoundError(f"Rank {rank} needs {names[0]} to continue from the checkpoint of epoch {epoch} in {folder}. "
                                    "Copy it there, or use a folder that all nodes see.")
    if not model.optimizer.built:
        model.optimizer.build(model.trainable_variables)
    if weights.is_file():  # the others get it by BroadcastState
        model.load_weights(weights)
    exchanger = exchanger_of(model)
    records = [_read_owed(path, rank) for path, rank in zip(mine, range(here.rank, ranks, here.topology.size), strict=True)]
    known = {variable.path for variable in model.trainable_variables}
    kept = {path for record in records for path in (*record.owed, *record.velocity, *record.sums)}
    kept |= {path for record in records for left in record.lefts for path in left.variables}
    unknown = sorted(kept - known)
    if unknown:
        raise PlanError(f"The checkpoint in {folder} owes gradient to {unknown[0]!r}, which this model does not have (it has "
                        f"{sorted(known)[0]!r}, ...). Give the model and its layers the names that they had.")
    same = ranks == here.topology.size
    factor = 1.0 if exchanger.operation == "sum" else here.topology.size / ranks
    exchanger.exchanges = {}
    exchanger.left = records[0].lefts if same else []
    exchanger.owed = sum_owed([record.owed for record in records], factor)
    exchanger.velocity = sum_owed([record.velocity for record in records], factor)
    for left in [] if same else [left for record in records for left in record.lefts]:
        exchanger.owed = sum_owed([exchanger.owed, sum_owed([owed_of(left.plan, left.residuals, left.rank)], factor)])
        exchanger.velocity = sum_owed([exchanger.velocity, sum_owed([owed_of(left.plan, left.velocities, left.rank)], factor)])
    sums = sum_owed([record.sums for record in records], factor)
    for path, variable in accumulated(model.optimizer).items():
        variable.assign(np.reshape(sums[path], variable.shape) if path in sums else np.zeros(variable.shape))
    if model.train_function is not None:
        model.make_train_function(force=True)  # the one there is uses the residuals of before
    return epoch + 1


class Record(NamedTuple):
    """What one rank keeps beside the model."""

    owed: Owed
    velocity: Owed
    sums: Owed  # gradients that are being accumulated
    lefts: list[Left]


def _owed_name(epoch: int, rank: int) -> str:
    return f"owed-{epoch:04d}-rank-{rank:04d}.npz"


def _write_owed(model: keras.Model, path: Path) -> None:
    exchanger = exchanger_of(model)
    sums = {name: np.ravel(variable.numpy()) for name, variable in accumulated(model.optimizer).items()}
    arrays: dict[str, np.ndarray] = {}
    index: dict[str, Any] = {"plans": []}
    for kind, kept in (("owed", exchanger.owed), ("velocity", exchanger.velocity), ("sums", sums)):
        index[kind] = sorted(kept)
        arrays |= {f"{kind}{number}": kept[name] for number, name in enumerate(index[kind])}
    for left in exchanger.all_left():
        index["plans"].append({"plan": left.plan.to_json(), "steps": left.steps, "rank": left.rank, "buckets": list(left.residuals),
                               "moving": list(left.velocities)})
        arrays |= {f"plan{len(index['plans']) - 1}/{i}": array
                   for i, array in enumerate([*left.residuals.values(), *left.velocities.values()])}
    part = path.with_name(f".{path.name}")
    with part.open("wb") as file:
        np.savez(file, index=np.array(json.dumps(index)), **arrays)
        file.flush()
        os.fsync(file.fileno())
    part.rename(path)


def _read_owed(path: Path, rank: int) -> Record:
    with np.load(path) as stored:
        index = json.loads(str(stored["index"]))
        kept = [{name: stored[f"{kind}{number}"] for number, name in enumerate(index[kind])} for kind in ("owed", "velocity", "sums")]
        lefts = [
            Left(Plan.from_json(row["plan"]), row["steps"], rank,
                 {name: stored[f"plan{number}/{i}"] for i, name in enumerate(row["buckets"])},
                 {name: stored[f"plan{number}/{i}"] for i, name in enumerate(row["moving"], len(row["buckets"]))})
            for number, row in enumerate(index["plans"])
        ]
    return Record(*kept, lefts)

"""Checkpoints that lose nothing: the model and its optimizers from rank 0, what is still owed from
every rank.

    folder/
      checkpoint.json                 written last: names the save that is whole, its epoch, and the
      number of ranks model-0003.keras                of save 3: weights and optimizers' state, a
      plain Keras file owed-0003-rank-0000.npz         one per rank: residuals and velocities, as
      they lie in its plans; sums of gradients; seeds

Saves are numbered, each one more than the last, also where an epoch is saved twice: no file of the
checkpoint that checkpoint.json names is ever replaced. So a run that is killed while it saves
leaves the one before intact, or the new one.
"""

from __future__ import annotations

import errno
import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import keras
import numpy as np

from tfcommx import comm
from tfcommx.optim.callbacks import (
    accumulated,
    agree_on_names,
    exchanger_in,
    seed_generators,
    wrapped_optimizers,
)
from tfcommx.optim.exchanger import Left, sum_owed
from tfcommx.optim.wrap import unlisted
from tfcommx.schedule.run import Owed, owed_of
from tfcommx.terms import Plan, PlanError

HEAD = "checkpoint.json"
# save; save, rank
OURS = re.compile(r"\.?(?:model-(\d{4,})\.keras|owed-(\d{4,})-rank-(\d{4,})\.npz)")


class Checkpoint(keras.callbacks.Callback):
    """Save model, optimizers and residuals at the end of every epoch; the last one is kept.

    Args:
        folder: where to; on every node, or on a file system that all nodes see.

    **Ranks:** all. **Cost:** rank 0 writes the model, each rank its residuals (4 bytes per entry
    that it selects from).
    **Raises:** PlanError, before the first step, for a model that Keras cannot write down, for a
    damaged checkpoint.json, and for a folder that a rank cannot write to.
    """

    def __init__(self, folder: str | Path) -> None:
        super().__init__()
        self.folder = Path(folder)

    def on_train_begin(self, logs: Any = None) -> None:
        for rank, said in enumerate(comm.current().gather_objects(_why_not(self.folder))):
            if said:
                raise PlanError(
                    "A checkpoint needs a folder that every rank can write to. Received "
                    f"{self.folder}, of which rank {rank} "
                    f"says: {said}. Make room for it, or give another."
                )
        _heads(self.folder)
        wrapped_optimizers(self.model)
        try:
            json.dumps(keras.saving.serialize_keras_object(self.model))
        except Exception as error:  # of any kind: it comes from a get_config() of the user's
            raise PlanError(
                "A checkpoint needs a model that model.save can write down, with its optimizer "
                "and its loss. Received "
                f"{self.model.name!r}, for which Keras says: {error} Give that object a "
                "get_config(), or train without "
                "Checkpoint."
            ) from error

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        save(self.model, self.folder, epoch)


def save(model: keras.Model, folder: str | Path, epoch: int) -> None:
    """Write a whole checkpoint of `epoch`, then forget the one before. **Ranks:** all, between the
    same two steps.
    """
    here, folder = comm.current(), Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    number = max((head["save"] + 1 for head in _heads(folder) if head is not None), default=0)
    if here.rank == 0:
        part = folder / f".{_model_name(number)}"
        model.save(part)
        _put(part, folder / _model_name(number))
    _write_owed(model, folder / _owed_name(number, here.rank))
    here.gather_objects("written")
    # one rank of each node: the folder may be the node's own
    if here.rank % here.topology.slots == 0:
        part = folder / f".{HEAD}.{here.rank}"
        part.write_text(
            json.dumps({"save": number, "epoch": epoch, "ranks": here.topology.size}) + "\n"
        )
        _put(part, folder / HEAD)
    here.gather_objects("named")
    for old in folder.iterdir():
        if (found := OURS.fullmatch(old.name)) and int(found[1] or found[2]) != number:
            writer = int(found[3] or 0)  # of a run with more ranks, too
            if writer % here.topology.size == here.rank:
                old.unlink(missing_ok=True)


def next_epoch(folder: str | Path) -> int:
    """Return the epoch after the last whole checkpoint; 0 without one. **Ranks:** all; what rank 0
    sees counts.
    """
    head = _heads(Path(folder))[0]
    return 0 if head is None else head["epoch"] + 1


def _heads(folder: Path) -> list[dict[str, int] | None]:
    """Return what checkpoint.json says, as each rank sees it. **Ranks:** all. **Raises:**
    PlanError, on all, if one is damaged.
    """
    path, mine = folder / HEAD, None
    if path.is_file():
        text = path.read_text(errors="replace")
        try:
            mine = {name: int(json.loads(text)[name]) for name in ("save", "epoch", "ranks")}
        except (ValueError, TypeError, KeyError):
            mine = text
    heads = comm.current().gather_objects(mine)
    for rank, head in enumerate(heads):
        if isinstance(head, str):
            raise PlanError(
                f'{path} must name a save, such as {{"save": 3, "epoch": 3, "ranks": 4}}. '
                f"Received {head[:80]!r} on rank "
                f"{rank}. Write into it what lies beside it (model-0003.keras, "
                "owed-0003-rank-0000.npz to rank-0003.npz "
                "are save 3 of 4 ranks), or delete it to begin anew."
            )
    return heads


def restore(model: keras.Model, folder: str | Path) -> int:
    """Load the last whole checkpoint into a built, compiled model with wrapped optimizers; return
    the next epoch's number.

    With the plan and the number of ranks that it was saved under, every rank continues with exactly
    its own residuals. Otherwise they are dealt out anew so that what they owe to the weights is
    conserved: their sum over the ranks for op "sum", their sum divided by the number of ranks for
    op "average". Velocities are treated as residuals are; where the plan has no momentum they rest
    until one has. Sums of gradients that are being accumulated are dealt out likewise. What is owed
    to variables that do not train now rests until they do.

    Several wrapped optimizers, as attributes of the model, are told apart by the order in which
    they were set. Keras's own training step is traced again if there was one; a `tf.function` of
    your own must be made again.

    **Ranks:** all; each must see the files of the ranks that it inherits from (its own number, and
    that plus multiples of the number of ranks). Without a checkpoint in `folder`, nothing is loaded
    and 0 is returned.
    **Raises:** FileNotFoundError that names the missing file; PlanError for a model that is not
    built, or lacks variables or optimizers of the checkpoint.
    """
    here, folder = comm.current(), Path(folder)
    if (head := _heads(folder)[0]) is None:
        return 0
    number, ranks = head["save"], head["ranks"]
    optimizers = wrapped_optimizers(model)
    if not model.built or not model.weights:
        raise PlanError(
            f"A checkpoint is restored into a model that is built. Received {model.name!r}, "
            "which has no weights yet, or was "
            "never called. Call it on a batch, or model.build(input_shape), first."
        )
    agree_on_names(model, 0)
    weights, inherited = folder / _model_name(number), range(here.rank, ranks, here.topology.size)
    mine = [folder / _owed_name(number, rank) for rank in inherited]
    missing = [
        str(path) for path in ([weights] if here.rank == 0 else []) + mine if not path.is_file()
    ]
    for rank, names in enumerate(here.gather_objects(missing)):
        if names:
            raise FileNotFoundError(
                f"Rank {rank} needs {names[0]} to continue from the checkpoint of epoch "
                f"{head['epoch']} in {folder}. "
                "Copy it there, or use a folder that all nodes see."
            )
    files = [_read_owed(path, rank) for path, rank in zip(mine, inherited, strict=True)]
    roots = here.gather_objects(
        [(record.trained, record.unlisted) for record in files[0]] if here.rank == 0 else None
    )[0]
    if len(roots) != len(optimizers):
        raise PlanError(
            f"The checkpoint in {folder} has the state of {len(roots)} wrapped optimizers. "
            "Received a model with "
            f"{len(optimizers)}. Compile it as it was."
        )
    for records in files[:1]:  # a rank that was not there gets its own from BroadcastState
        for generator, seed in zip(seed_generators(model), records[0].seeds, strict=False):
            generator.state.assign(seed)
    for index, (optimizer, (paths, beside)) in enumerate(zip(optimizers, roots, strict=True)):
        names_of = exchanger_in(optimizer).names_of
        known = dict(zip(names_of(model.weights), model.weights, strict=True))  # frozen ones, too
        needed = {path for file in files for path in file[index].paths} | set(paths)
        if unknown := sorted(needed - set(known)):
            raise PlanError(
                f"The checkpoint in {folder} holds state of {unknown[0]!r}, which this model "
                "does not have (it has "
                f"{min(known)!r}, ...). Give the model and its layers the names that they had."
            )
        if paths and not optimizer.built:
            now = [] if len(optimizers) > 1 else model.trainable_variables
            # then Keras says that the optimizer's state begins anew
            new = set(names_of(now)) - set(paths)
            optimizer.build(now if new else [known[path] for path in paths])
        for name in unlisted(optimizer).keys() & beside:
            unlisted(optimizer)[name].assign(beside[name])
    if weights.is_file():  # the others get it by BroadcastState
        model.load_weights(weights)
    for index, optimizer in enumerate(optimizers):
        _hand_over(optimizer, [file[index] for file in files], ranks, here.topology.size)
    if model.train_function is not None:
        model.make_train_function(force=True)  # the one there is uses the residuals of before
    return head["epoch"] + 1


def _hand_over(
    optimizer: keras.optimizers.Optimizer, records: list[Record], old: int, new: int
) -> None:
    """Let an optimizer continue with what this rank inherits of `old` ranks, now that there are
    `new`.
    """
    exchanger = exchanger_in(optimizer)
    factor = 1.0 if exchanger.operation == "sum" else new / old
    lefts = [left for record in records for left in record.lefts]
    unpacked = lefts if new != old else []
    exchanger.continue_from(
        sum_owed(
            [
                *(kept.owed for kept in records),
                *(owed_of(left.plan, left.residuals, left.rank) for left in unpacked),
            ],
            factor,
        ),
        sum_owed(
            [
                *(kept.velocity for kept in records),
                *(owed_of(left.plan, left.velocities, left.rank) for left in unpacked),
            ],
            factor,
        ),
        lefts if new == old else [],
    )
    sums = sum_owed([kept.sums for kept in records], factor)
    for path, variable in accumulated(optimizer).items():
        variable.assign(
            np.reshape(sums[path], variable.shape) if path in sums else np.zeros(variable.shape)
        )


class Record(NamedTuple):
    """What one rank keeps beside the model, of one optimizer."""

    # Paths of the variables that the optimizer was built for, in its order
    trained: list[str]
    owed: Owed
    velocity: Owed
    # Gradients that are being accumulated
    sums: Owed
    lefts: list[Left]
    # What the optimizer keeps and Keras does not save
    unlisted: dict[str, np.ndarray]
    # Of the model's generators
    seeds: list[list[int]]

    @property
    def paths(self) -> set[str]:
        return {*self.owed, *self.velocity, *self.sums}.union(
            *(left.variables for left in self.lefts)
        )


def _model_name(number: int) -> str:
    return f"model-{number:04d}.keras"


def _owed_name(number: int, rank: int) -> str:
    return f"owed-{number:04d}-rank-{rank:04d}.npz"


def _put(part: Path, path: Path) -> None:
    """Give a written file its name; both are on the disk afterwards, also if the machine fails."""
    _sync(part)
    part.rename(path)
    try:
        _sync(path.parent)
    except OSError as error:
        # some network file systems cannot, for a folder
        if error.errno not in (errno.EINVAL, errno.EBADF, errno.ENOTSUP):
            raise


def _why_not(folder: Path) -> str | None:
    """Make a folder; say why nothing can be written there."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        return str(error)
    return (
        None
        if os.access(folder, os.W_OK | os.X_OK)
        else "no permission, or a read-only file system"
    )


def _sync(path: Path) -> None:
    opened = os.open(path, os.O_RDONLY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)


def _write_owed(model: keras.Model, path: Path) -> None:
    arrays: dict[str, np.ndarray] = {}

    def put(kept: Mapping[str, np.ndarray]) -> dict[str, str]:
        """Add arrays to the file; return what they are called there."""
        called = {name: f"array{number}" for number, name in enumerate(kept, len(arrays))}
        arrays.update((called[name], array) for name, array in kept.items())
        return called

    index = []
    for optimizer in wrapped_optimizers(model):
        exchanger, sums = (
            exchanger_in(optimizer),
            {name: np.ravel(total.numpy()) for name, total in accumulated(optimizer).items()},
        )
        index.append(
            {
                "trained": exchanger.names_of(
                    getattr(optimizer, "inner_optimizer", optimizer)._trainable_variables
                ),
                "owed": put(exchanger.owed),
                # NumPy's files know no bfloat16: float32 holds it exactly
                "velocity": put(exchanger.velocity),
                "sums": put({name: _wide(total) for name, total in sums.items()}),
                "seeds": [generator.state.numpy().tolist() for generator in seed_generators(model)],
                "unlisted": put(
                    {
                        name: _wide(variable.numpy())
                        for name, variable in unlisted(optimizer).items()
                    }
                ),
                "plans": [
                    {
                        "plan": left.plan.to_json(),
                        "steps": left.steps,
                        "residuals": put(left.residuals),
                        "velocities": put(left.velocities),
                    }
                    for left in exchanger.all_left()
                ],
            }
        )
    part = path.with_name(f".{path.name}")
    with part.open("wb") as file:
        np.savez(file, index=np.array(json.dumps(index)), **arrays)
    _put(part, path)


def _wide(array: np.ndarray) -> np.ndarray:
    return array.astype(np.promote_types(array.dtype, np.float32))


def _read_owed(path: Path, rank: int) -> list[Record]:
    """Return what `rank` kept, of each wrapped optimizer."""
    with np.load(path) as stored:

        def get(called: Mapping[str, str]) -> dict[str, np.ndarray]:
            return {name: stored[array] for name, array in called.items()}

        return [
            Record(
                row["trained"],
                get(row["owed"]),
                get(row["velocity"]),
                get(row["sums"]),
                [
                    Left(
                        Plan.from_json(plan["plan"]),
                        plan["steps"],
                        rank,
                        get(plan["residuals"]),
                        get(plan["velocities"]),
                    )
                    for plan in row["plans"]
                ],
                get(row.get("unlisted", {})),
                row.get("seeds", []),
            )
            for row in json.loads(str(stored["index"]))
        ]

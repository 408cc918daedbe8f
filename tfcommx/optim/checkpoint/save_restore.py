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

import json
from pathlib import Path
from typing import Any

import keras
import numpy as np

from tfcommx.comm import process
from tfcommx.optim.checkpoint.files import (
    HEAD,
    OURS,
    Record,
    heads,
    model_name,
    put_in_place,
    read_residuals,
    residuals_name,
    why_not_writable,
    write_residuals,
)
from tfcommx.optim.distributed_optimizer import unlisted
from tfcommx.optim.exchanger import sum_residuals
from tfcommx.optim.keras_internals import (
    accumulated,
    agree_on_names,
    exchanger_in,
    seed_generators,
    wrapped_optimizers,
)
from tfcommx.runtime.residuals import residuals_by_variable
from tfcommx.terms import PlanError


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
        for rank, said in enumerate(
            process.current().gather_objects(why_not_writable(self.folder))
        ):
            if said:
                raise PlanError(
                    "A checkpoint needs a folder that every rank can write to. Received "
                    f"{self.folder}, of which rank {rank} "
                    f"says: {said}. Make room for it, or give another."
                )
        heads(self.folder)
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
    here, folder = process.current(), Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    number = max((head["save"] + 1 for head in heads(folder) if head is not None), default=0)
    if here.rank == 0:
        part = folder / f".{model_name(number)}"
        model.save(part)
        put_in_place(part, folder / model_name(number))
    write_residuals(model, folder / residuals_name(number, here.rank))
    here.gather_objects("written")
    # one rank of each node: the folder may be the node's own
    if here.rank % here.topology.slots == 0:
        part = folder / f".{HEAD}.{here.rank}"
        part.write_text(
            json.dumps({"save": number, "epoch": epoch, "ranks": here.topology.size}) + "\n"
        )
        put_in_place(part, folder / HEAD)
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
    head = heads(Path(folder))[0]
    return 0 if head is None else head["epoch"] + 1


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
    here, folder = process.current(), Path(folder)
    if (head := heads(folder)[0]) is None:
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
    weights, inherited = folder / model_name(number), range(here.rank, ranks, here.topology.size)
    mine = [folder / residuals_name(number, rank) for rank in inherited]
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
    files = [read_residuals(path, rank) for path, rank in zip(mine, inherited, strict=True)]
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
        _continue_from(optimizer, [file[index] for file in files], ranks, here.topology.size)
    if model.train_function is not None:
        model.make_train_function(force=True)  # the one there is uses the residuals of before
    return head["epoch"] + 1


def _continue_from(
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
        sum_residuals(
            [
                *(kept.owed for kept in records),
                *(residuals_by_variable(left.plan, left.residuals, left.rank) for left in unpacked),
            ],
            factor,
        ),
        sum_residuals(
            [
                *(kept.velocity for kept in records),
                *(
                    residuals_by_variable(left.plan, left.velocities, left.rank)
                    for left in unpacked
                ),
            ],
            factor,
        ),
        lefts if new == old else [],
    )
    sums = sum_residuals([kept.sums for kept in records], factor)
    for path, variable in accumulated(optimizer).items():
        variable.assign(
            np.reshape(sums[path], variable.shape) if path in sums else np.zeros(variable.shape)
        )

"""Saving and restoring: the model and its optimizers from rank 0, residuals from every rank.

    folder/
      checkpoint.json                  written last: names the save that is whole, its epoch and
                                       step, the number of ranks, and older saves that are kept
      model-0003.keras                 of save 3: weights and optimizers' state, a plain Keras file
      residuals-0003-rank-0000.npz     one per rank: residuals and velocities, as they lie in its
                                       plans; sums of gradients; seeds

Saves are numbered, each one more than the last, also if an epoch is saved twice: no file of the
checkpoint that checkpoint.json names is ever replaced. So a run that is killed while it saves
leaves the one before intact, or the new one.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import keras
import numpy as np

from tfcommx.comm import process
from tfcommx.optim.centre import with_centre
from tfcommx.optim.checkpoint.files import (
    Head,
    model_name,
    put_in_place,
    read_heads,
    read_own_head,
    remove_other_saves,
    residuals_name,
    why_not_writable,
    write_head,
)
from tfcommx.optim.checkpoint.records import (
    OptimizerRecord,
    read_own,
    read_residuals,
    write_residuals,
)
from tfcommx.optim.keras_internals import seed_generators, statistics_of, unlisted
from tfcommx.optim.settle import settle
from tfcommx.optim.wrapped import (
    accumulated,
    agree_on_names,
    exchanger_in,
    trains_alone,
    wrapped_optimizers,
)
from tfcommx.runtime.rates import highest
from tfcommx.runtime.residuals import sum_residuals
from tfcommx.terms import PlanError, check_whole


class Checkpoint(keras.callbacks.Callback):
    """Save model, optimizers and residuals at the end of every epoch; the last ones are kept.

    Args:
        folder: where to; on every node, or on a file system that all nodes see.
        keep: saves that are kept, >= 1.

    **Ranks:** all. **Cost:** rank 0 writes the model, each rank its residuals (4 bytes per entry
    that it selects from).
    **Raises:** PlanError, before the first step, for a model that Keras cannot write down, for a
    damaged checkpoint.json, and for a folder that a rank cannot write to.
    """

    def __init__(self, folder: str | Path, keep: int = 1) -> None:
        super().__init__()
        self.folder, self.keep = Path(folder), check_whole("keep", keep)
        if self.keep < 1:
            raise PlanError(f"`keep` must be >= 1. Received {keep}.")

    def on_train_begin(self, logs: Any = None) -> None:
        """Refuse a folder or a model of which no checkpoint could be written."""
        everyone = process.current().gather_objects(why_not_writable(self.folder))
        for rank, reason in enumerate(everyone):
            if reason:
                raise PlanError(
                    "A checkpoint needs a folder that every rank can write to. Received "
                    f"{self.folder}, of which rank {rank} says: {reason}. Make room for it, or "
                    "give another."
                )
        read_heads(self.folder)
        wrapped_optimizers(self.model)
        try:
            json.dumps(keras.saving.serialize_keras_object(self.model))
        except Exception as error:  # Of any kind: it is raised by a get_config() of the user.
            raise PlanError(
                "A checkpoint needs a model that model.save can write down, with its optimizer "
                f"and its loss. Received {self.model.name!r}, for which Keras says: {error} Give "
                "that object a get_config(), or train without Checkpoint."
            ) from error

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Save."""
        save(self.model, self.folder, epoch, self.keep)


def save(
    model: keras.Model,
    folder: str | Path,
    epoch: int,
    keep: int = 1,
    *,
    step: int = 0,
    steps: int = 0,
    notes: dict[str, Any] | None = None,
) -> None:
    """Write a whole checkpoint of `epoch`, then delete those that are not to be kept.

    Args:
        model: built, compiled with wrapped optimizers.
        folder: is made if it is not there.
        epoch: the epoch that has ended, from 0; -1: none.
        keep: saves that are kept, this one included, >= 1.
        step: steps taken since: of the epoch under way.
        steps: that the epoch under way has; 0 if none is.
        notes: what `last` is to return, as JSON has it; those of rank 0 count.

    **Ranks:** all, between the same two steps; with ElasticAveraging each when it likes: the lowest
    that is there writes, the centre in the place of its weights.
    """
    here, folder = process.current(), Path(folder)
    if trains_alone(model):
        _save_centre(model, folder, Head(0, epoch, 1, step, steps, notes or {}), keep)
        return
    folder.mkdir(parents=True, exist_ok=True)
    heads = read_heads(folder)
    number = max((head.save + 1 for head in heads if head is not None), default=0)
    for optimizer in wrapped_optimizers(model):
        settle(optimizer)
    if here.rank == 0:
        part = folder / f".{model_name(number)}"
        model.save(part)
        put_in_place(part, folder / model_name(number))
    write_residuals(model, folder / residuals_name(number, here.rank))
    here.gather_objects("written")
    # One rank of each node: the folder may be the node's own.
    before = heads[0]
    older = () if before is None else (before._replace(older=()), *before.older)[: keep - 1]
    if here.rank % here.topology.slots == 0:
        head = Head(number, epoch, here.topology.size, step, steps, notes or {}, older)
        write_head(head, folder, here.rank)
    here.gather_objects("named")
    kept = {number, *(one.save for one in older)}
    remove_other_saves(folder, kept, here.rank, here.topology.size)


def last(folder: str | Path) -> Head | None:
    """Return what is known of the last whole checkpoint: epoch, step, ranks, notes; None without.

    **Ranks:** all; what rank 0 sees counts.
    """
    return read_heads(Path(folder))[0]


def _save_centre(model: keras.Model, folder: Path, head: Head, keep: int) -> None:
    """Write what one rank has, with the centre as weights, while the other ranks train on.

    It is a checkpoint of one rank, from which any number of them starts; `head` lacks its number
    and the saves before. Rank 0 writes it; if that has died, the lowest that is there.
    """
    here = process.current()
    if here.rank != min(set(range(here.topology.size)) - here.departures.ranks()):
        return
    folder.mkdir(parents=True, exist_ok=True)
    before = read_own_head(folder)
    number = 0 if before is None else before.save + 1
    older = () if before is None else (before._replace(older=()), *before.older)[: keep - 1]
    with with_centre(model):
        part = folder / f".{model_name(number)}"
        model.save(part)
        put_in_place(part, folder / model_name(number))
        write_residuals(model, folder / residuals_name(number, 0))
        write_head(head._replace(save=number, older=older), folder, 0)
    remove_other_saves(folder, {number, *(one.save for one in older)}, 0, 1)


def next_epoch(folder: str | Path) -> int:
    """Return the epoch after the last whole checkpoint; 0 without one.

    If it was saved in mid-epoch, that is the epoch that was under way.

    **Ranks:** all; what rank 0 sees counts.
    """
    head = last(folder)
    return 0 if head is None else head.epoch + 1


def restore(model: keras.Model, folder: str | Path) -> int:
    """Load the last whole checkpoint; return the next epoch's number, 0 if there is none.

    With the plan and the number of ranks that it was saved under, every rank continues with exactly
    its own residuals. Otherwise they are redistributed so that what they add to the weights is
    conserved: their sum over the ranks for op "sum", their sum divided by the number of ranks for
    op "average". Velocities are treated as residuals are; if the plan has no momentum they wait
    until one has. Sums of gradients that are being accumulated are redistributed likewise.
    Residuals of variables that do not train now wait until they do.

    Several wrapped optimizers, as attributes of the model, are told apart by the order in which
    they were set. Keras's own training step is traced again if there was one; a `tf.function` of
    your own must be made again.

    Args:
        model: built, compiled with wrapped optimizers.
        folder: as it was given to `save` or `Checkpoint`.

    **Ranks:** all; each must see the files of the ranks that it inherits from (its own number, and
    that plus multiples of the number of ranks). Without a checkpoint in `folder`, nothing is
    loaded.
    **Raises:** FileNotFoundError that names the missing file; PlanError for a model that is not
    built, or lacks variables or optimizers of the checkpoint.
    """
    here, folder = process.current(), Path(folder)
    head = read_heads(folder)[0]
    if head is None:
        return 0
    optimizers = wrapped_optimizers(model)
    _require_built(model)
    agree_on_names(model, 0)
    files = _read_files(folder, head)
    roots = _roots_of(files, folder, len(optimizers))
    if files:  # A rank that was not there gets its seeds from BroadcastState.
        for generator, seed in zip(seed_generators(model), files[0][0].seeds, strict=False):
            generator.state.assign(seed)
    for index, optimizer in enumerate(optimizers):
        records = [file[index] for file in files]
        known = _known_variables(optimizer, model, records, roots[index], folder)
        whole = model.trainable_variables if len(optimizers) == 1 else []
        _build_optimizer(optimizer, known, roots[index], whole)
    weights = folder / model_name(head.save)
    if weights.is_file():  # The others get it by BroadcastState.
        model.load_weights(weights)
    for optimizer in optimizers:
        if (sharding := exchanger_in(optimizer).sharding) is not None:
            sharding.shards.current.assign(True)  # The shards follow the weights, not the reverse
    for index, optimizer in enumerate(optimizers):
        _continue_from(optimizer, [file[index] for file in files], head.ranks, here.topology.size)
    if model.train_function is not None:
        model.make_train_function(force=True)  # The one there is uses the residuals of before.
    return head.epoch + 1


class RestoreOwn(keras.callbacks.Callback):
    """Give each rank back what it alone had in mid-epoch: batch norm's statistics, metrics' sums.

    Put it behind BroadcastState, which sets those of one rank everywhere. Metrics must be built.
    Nothing is done for a checkpoint of an epoch's end, where all are equal, and with another number
    of ranks.

    Args:
        folder: as `restore` took it.

    **Ranks:** all.
    """

    def __init__(self, folder: str | Path) -> None:
        super().__init__()
        self.folder = Path(folder)
        self.values: list[np.ndarray] = []

    def on_train_begin(self, logs: Any = None) -> None:
        """Read the values of this rank, and set the statistics."""
        here, head = process.current(), last(self.folder)
        if head is None or not head.step or head.ranks != here.topology.size:
            return
        self.values = read_own(self.folder / residuals_name(head.save, here.rank))
        self._assign(statistics_of(self.model), self.values)

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Set the metrics, which Keras has just reset."""
        count = len(statistics_of(self.model))
        self._assign(self.model.metrics_variables, self.values[count:])
        self.values = []

    @staticmethod
    def _assign(variables: Sequence[keras.Variable], values: Sequence[np.ndarray]) -> None:
        for variable, value in zip(variables, values, strict=False):
            variable.assign(value)


class _RootState(NamedTuple):
    """What every rank must know of rank 0's record of an optimizer."""

    # Names of the variables that it was built for, in its order
    trained: list[str]
    # What it keeps and Keras does not save, by attribute
    unlisted: dict[str, np.ndarray]


def _require_built(model: keras.Model) -> None:
    if not model.built or not model.weights:
        raise PlanError(
            f"A checkpoint is restored into a model that is built. Received {model.name!r}, which "
            "has no weights yet, or was never called. Call it on a batch, or "
            "model.build(input_shape), first."
        )


def _read_files(folder: Path, head: Head) -> list[list[OptimizerRecord]]:
    """Read what this rank inherits; refuse, on all ranks, a file that one of them does not see."""
    here = process.current()
    inherited = range(here.rank, head.ranks, here.topology.size)
    paths = [folder / residuals_name(head.save, rank) for rank in inherited]
    needed = [folder / model_name(head.save), *paths] if here.rank == 0 else paths
    missing = [str(path) for path in needed if not path.is_file()]
    for rank, names in enumerate(here.gather_objects(missing)):
        if names:
            raise FileNotFoundError(
                f"Rank {rank} needs {names[0]} to continue from the checkpoint of epoch "
                f"{head.epoch} in {folder}. Copy it there, or use a folder that all nodes see."
            )
    return [read_residuals(path, rank) for path, rank in zip(paths, inherited, strict=True)]


def _roots_of(
    files: Sequence[Sequence[OptimizerRecord]], folder: Path, optimizers: int
) -> list[_RootState]:
    """Return what rank 0 kept of each optimizer, on all ranks; refuse another number of them."""
    here = process.current()
    mine = [_RootState(record.trained, record.unlisted) for record in (files[0] if files else [])]
    roots = here.gather_objects(mine if here.rank == 0 else None)[0]
    if len(roots) != optimizers:
        raise PlanError(
            f"The checkpoint in {folder} has the state of {len(roots)} wrapped optimizers. "
            f"Received a model with {optimizers}. Compile it as it was."
        )
    return roots


def _known_variables(
    optimizer: keras.optimizers.Optimizer,
    model: keras.Model,
    records: Sequence[OptimizerRecord],
    root: _RootState,
    folder: Path,
) -> dict[str, keras.Variable]:
    """Return the model's variables by name, also frozen ones; refuse one that lacks any."""
    names = exchanger_in(optimizer).names.of(model.weights)
    known = dict(zip(names, model.weights, strict=True))
    needed = set(root.trained).union(*(record.variables for record in records))
    if unknown := sorted(needed - set(known)):
        raise PlanError(
            f"The checkpoint in {folder} holds state of {unknown[0]!r}, which this model does not "
            f"have (it has {min(known)!r}, ...). Give the model and its layers the names that "
            "they had."
        )
    return known


def _build_optimizer(
    optimizer: keras.optimizers.Optimizer,
    known: Mapping[str, keras.Variable],
    root: _RootState,
    trainable: Sequence[keras.Variable],
) -> None:
    """Build an optimizer for the variables that it had, and set what Keras does not save.

    If the model trains others too, it is built for all of `trainable`; then Keras says that the
    optimizer's state begins again.
    """
    if root.trained and not optimizer.built:
        new = set(exchanger_in(optimizer).names.of(trainable)) - set(root.trained)
        optimizer.build(trainable if new else [known[name] for name in root.trained])
    for name in unlisted(optimizer).keys() & root.unlisted:
        unlisted(optimizer)[name].assign(root.unlisted[name])


def _continue_from(
    optimizer: keras.optimizers.Optimizer, records: list[OptimizerRecord], old: int, new: int
) -> None:
    """Let an optimizer continue with what this rank inherits of `old` ranks; now there are `new`.

    With as many ranks as before, plans continue as they were. Otherwise they are taken apart.
    """
    exchanger = exchanger_in(optimizer)
    averages = exchanger.in_lock_step and exchanger.settings.operation == "average"
    factor = new / old if averages else 1.0
    states = [state for record in records for state in record.plan_states]
    apart = states if new != old else []
    residuals = [record.waiting_residuals for record in records]
    residuals += [state.residuals_by_variable() for state in apart]
    velocities = [record.waiting_velocities for record in records]
    velocities += [state.velocities_by_variable() for state in apart]
    exchanger.continue_from(
        sum_residuals(residuals, factor),
        sum_residuals(velocities, factor),
        states if new == old else [],
        highest(state.rate_exponent for state in apart),
    )
    sums = sum_residuals([record.accumulated for record in records], factor)
    for name, variable in accumulated(optimizer).items():
        zeros = np.zeros(variable.shape)
        variable.assign(np.reshape(sums[name], variable.shape) if name in sums else zeros)

"""Restore a checkpoint, even with another number of ranks or another plan."""

import contextlib
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from weakref import WeakKeyDictionary

import keras
import numpy as np

from tfcommx.checkpoint.files import Head, is_file, memory_model_name, model_name, residuals_name
from tfcommx.checkpoint.followers import Followers, SavedFollowers, read_followers
from tfcommx.checkpoint.newest import Newest, newest, read_inherited
from tfcommx.checkpoint.records import OptimizerRecord, read_own
from tfcommx.checkpoint.state import restore_exact, saved_by_keras, set_model, set_optimizer
from tfcommx.collectives import process
from tfcommx.core import CheckpointError, local_path, reading
from tfcommx.keras_internals.fit import restore_train_function
from tfcommx.keras_internals.models import (
    all_generators,
    finalize_layers,
    recurrent_states,
    trace_again,
)
from tfcommx.keras_internals.names import VariableNames
from tfcommx.keras_internals.optimizers import (
    inner_optimizer,
    kinds_of,
    rate_as_saved,
    state_kinds,
    trainable_variables,
    unlisted,
)
from tfcommx.launch.supervision import supervision
from tfcommx.optim.wrapped import accumulated, agree_on_names, exchanger_in, wrapped_optimizers
from tfcommx.runtime.gradient_state import GradientState, Vectors, add_vectors, scaled
from tfcommx.strategies.strategy import CommonState

# Kinds of state, as `state_kinds` calls them, of which an optimizer has one
_RATES = {"learning_rate", "schedule"}
# Remedy for a model's file that Keras does not load
MODEL = "Build the model as it was, or put a whole copy of the file in its place."


def last(folder: str | Path) -> Head | None:
    """Return epoch, step, ranks and notes of the last complete checkpoint; None without one.

    In a supervised run it may be in memory.

    **Ranks:** all; rank 0's view of the folder counts.
    """
    checkpoint = newest(_folder(folder))
    return None if checkpoint is None else checkpoint.head


def _folder(folder: str | Path) -> Path:
    """Return the folder of a checkpoint. **Raises:** CheckpointError for a file."""
    path = local_path("folder", folder)
    # A program would otherwise take it for a folder without a checkpoint, and train anew
    if is_file(path):
        raise CheckpointError(
            f"`folder` must be the folder of a checkpoint. Received the file {path}. Give its "
            f"folder: {path.parent}."
        )
    return path


def next_epoch(folder: str | Path) -> int:
    """Return the epoch after the last complete checkpoint; 0 without one.

    If it was saved in mid-epoch, that is the interrupted epoch.

    **Ranks:** all; rank 0's view of the folder counts.
    """
    head = last(folder)
    return 0 if head is None else head.epoch + 1


def restore(model: keras.Model, folder: str | Path) -> int:
    """Load the last complete checkpoint; return the next epoch's number, 0 without a checkpoint.

    In a supervised run (`tfcommx run --min-np`) the checkpoint may be in memory.

    With the plan and the number of ranks of the save, every rank continues with exactly its own
    residuals. Otherwise residuals are redistributed so that their contribution to the weights is
    conserved: their sum over the ranks for op "sum", their sum divided by the number of ranks for
    op "average". Velocities are treated like residuals; if the plan has no momentum, they are kept
    until a plan has. Accumulated sums of gradients are redistributed likewise. Residuals of
    variables that do not train now are kept until they do. States of recurrent layers with
    `stateful=True` are restored with the number of ranks and the batch of the save.

    Several wrapped optimizers are identified by the order in which they were set as attributes of
    the model, or by their order in dicts and lists. Keras's training step is traced again if it
    exists; a `tf.function` of the user must be created again.

    Args:
        model: built, compiled with wrapped optimizers.
        folder: the folder given to `save` or `Checkpoint`.

    **Ranks:** all; each must see the files of the ranks that it inherits from (its own number plus
    multiples of the number of ranks, from 0). Without a checkpoint in `folder`, the model is not
    changed.
    If a file of the last save is missing or damaged, the newest complete older save is loaded, with
    a warning.

    **Raises:** FileNotFoundError that names the missing file, if no older save is complete;
    CheckpointError that names a damaged file, for a file in place of the folder, and for a model
    that is not built, or lacks variables or optimizers of the checkpoint; ConfigurationError if the
    ranks name different folders.
    """
    checkpoint = newest(_folder(folder))
    if checkpoint is None:
        return 0
    load(model, checkpoint)
    return checkpoint.head.epoch + 1


# Model -> the checkpoint that it was restored from
_restored: WeakKeyDictionary[keras.Model, Newest] = WeakKeyDictionary()


def restored(model: keras.Model) -> Newest | None:
    """Return the checkpoint that a model was restored from; None if it was not restored."""
    return _restored.get(model)


# Model -> the next epoch, and the state of callbacks in the checkpoint that it was restored from
_followed: WeakKeyDictionary[keras.Model, tuple[int, SavedFollowers]] = WeakKeyDictionary()


def resume_followers(model: keras.Model, followers: Followers, epoch: int) -> None:
    """Set the callbacks of the first `fit` after a restoration, if it continues the saved run.

    Args:
        epoch: the first epoch of the `fit`, from 0.

    **Ranks:** all, once they have equal weights.
    """
    next_epoch, saved = _followed.pop(model, (-1, SavedFollowers([], False)))
    if epoch == next_epoch:
        followers.resume(saved.states)
        _resume_history(followers, saved)
    if saved.swapped:
        inner_optimizer(model.optimizer).swap_averages()


def finish_followers(model: keras.Model, followers: Followers, epochs: int | None) -> None:
    """Let callbacks end a restored `fit` that had no epoch left, so they restore best weights.

    Args:
        epochs: of the `fit`, which has ended if this is the next one; None: it had been stopped.

    **Ranks:** all.
    """
    next_epoch, saved = _followed.get(model, (-1, SavedFollowers([], False)))
    if epochs in (None, next_epoch):
        followers.finish(saved.states)
        _resume_history(followers, saved)


def _resume_history(followers: Followers, saved: SavedFollowers) -> None:
    # The user has not started this `fit`, and its script may read the history of all epochs
    if supervision() is not None and followers.history is not None:
        epochs, values = saved.history
        followers.history.epoch = list(epochs)
        followers.history.history = {name: list(row) for name, row in values.items()}


def load(model: keras.Model, checkpoint: Newest) -> None:
    """Load a checkpoint, as `restore` does. **Ranks:** all. **Raises:** as `restore`."""
    _restored[model] = checkpoint
    comm, head, folder = process.current(), checkpoint.head, checkpoint.folder
    optimizers = wrapped_optimizers(model)
    if not model.built or not model.weights:
        raise CheckpointError(
            f"A checkpoint is restored into a model that is built. Received {model.name!r}, which "
            "has no weights yet, or was never called. Call it on a batch, or "
            "model.build(input_shape), first."
        )
    agree_on_names(model, 0)
    name = memory_model_name if checkpoint.source == "memory" else model_name
    weights = folder / name(head.save)
    files = _read_files(folder, head, weights)
    roots = _roots_of(files, folder, len(optimizers))
    for optimizer, root in zip(optimizers, roots, strict=True):
        _require_kind(optimizer, root, folder)
        _pair_by_position(exchanger_in(optimizer).names, model, root.weights)
    if files:  # A rank without files receives its seeds from BroadcastState
        for generator, seed in zip(all_generators(model), files[0][0].seeds, strict=False):
            generator.state.assign(seed)
    # Built before the weights are loaded, because Keras skips the state of an optimizer without
    # variables
    for index, optimizer in enumerate(optimizers):
        records = [file[index] for file in files]
        variables = _known_variables(optimizer, model, records, roots[index], folder)
        # With several optimizers, only the checkpoint says which variables each of them trains
        trainable = model.trainable_variables if len(optimizers) == 1 else []
        _build_optimizer(optimizer, variables, roots[index], trainable)
        _require_state_kinds(optimizer, roots[index].trained, records, folder)
        # An optimizer that trained them before has residuals of steps that are undone, and one that
        # follows before the next step takes the restored ones
        names = variables if len(optimizers) == 1 else roots[index].trained
        exchanger_in(optimizer).take_over([variables[name] for name in names])
    with contextlib.ExitStack() as rates:
        for optimizer, root in zip(optimizers, roots, strict=True):
            rates.enter_context(rate_as_saved(optimizer, root.state_kinds))
        _load_values(model, checkpoint, weights, files, roots)
    _load_recurrent_states(model, folder, head)
    _followed[model] = head.epoch + 1, _followers_of(folder / residuals_name(head.save, 0))
    for optimizer in optimizers:
        if (sharding := exchanger_in(optimizer).sharding) is not None:
            sharding.shards.current.assign(True)  # Because the shards must follow the weights
    for index, optimizer in enumerate(optimizers):
        records = [file[index] for file in files]
        _load_states(optimizer, records, (head.ranks, comm.topology.size), roots[index].common)
    restore_train_function(model)  # A `fit` that was interrupted may have left its own
    if model.train_function is not None:
        trace_again(model)  # Because the present one uses the old residuals


def _load_values(
    model: keras.Model,
    checkpoint: Newest,
    weights: Path,
    files: Sequence[Sequence[OptimizerRecord]],
    roots: Sequence[OptimizerRecord],
) -> None:
    """Set the weights, and the state of optimizers that Keras saves, from the file `weights`."""
    comm, optimizers = process.current(), wrapped_optimizers(model)
    kind = f"The model of a checkpoint of {model.name!r}"
    if checkpoint.source == "memory":
        with np.load(weights) as arrays:
            set_model(model, arrays)
    elif is_file(weights):  # Ranks without the file receive the weights by BroadcastState
        with reading(kind, weights, MODEL, CheckpointError):
            model.load_weights(weights)
    for index, optimizer in enumerate(optimizers):
        # Other ranks receive the state by BroadcastState
        if comm.rank == 0 and (state := files[0][index].state):
            set_optimizer(optimizer, state)
    if checkpoint.source != "memory" and is_file(weights):
        root_file = checkpoint.folder / residuals_name(checkpoint.head.save, 0)
        if is_file(root_file):
            # Not on other ranks, because they receive state that Keras does not save by
            # BroadcastState
            same = [
                _trains_as_saved(optimizer, root)
                and (comm.rank == 0 or saved_by_keras(model, optimizer))
                for optimizer, root in zip(optimizers, roots, strict=True)
            ]
            restore_exact(model, root_file, same)
        finalize_layers(model)


def _load_recurrent_states(model: keras.Model, folder: Path, head: Head) -> None:
    """Set the states of stateful recurrent layers, if this rank has the same batches as before."""
    comm, states = process.current(), recurrent_states(model)
    path = folder / residuals_name(head.save, comm.rank)
    if not states or head.ranks != comm.topology.size or not is_file(path):
        return
    values = read_own(path, "recurrent")
    if [value.shape for value in values] == [tuple(state.shape) for state in states]:
        for state, value in zip(states, values, strict=True):
            state.assign(value)


def _followers_of(path: Path) -> SavedFollowers:
    """Return the state of callbacks in rank 0's file, on all ranks."""
    saved, problem = SavedFollowers([], False), ""
    comm = process.current()
    if comm.rank == 0:
        try:
            saved = read_followers(path)
        except CheckpointError as error:  # Raised on all ranks, because the others wait
            problem = str(error)
    ((*fields, problem), *_) = comm.gather_objects((*saved, problem))
    if problem:
        raise CheckpointError(problem)
    return SavedFollowers._make(fields)


def _pair_by_position(names: VariableNames, model: keras.Model, saved: Sequence[str]) -> None:
    """Rename a model's variables as in the checkpoint, if only numbers in the names differ."""
    # Keras numbers layers, so the second model of a process has other paths than the first
    current = names.of(model.weights)
    if len(current) != len(saved) or set(current) == set(saved):
        return
    plain = re.compile(r"_?\d+")
    if all(plain.sub("", a) == plain.sub("", b) for a, b in zip(current, saved, strict=True)):
        names.rename(model.weights, saved)


def _trains_as_saved(optimizer: keras.optimizers.Optimizer, root: OptimizerRecord) -> bool:
    """Return True if an optimizer must have the saved state: not sharded, same variables."""
    exchanger = exchanger_in(optimizer)
    names = exchanger.names.of(trainable_variables(optimizer))
    return exchanger.sharding is None and names == root.trained


def _read_files(folder: Path, head: Head, weights: Path) -> list[list[OptimizerRecord]]:
    """Read the inherited files; raise, on all ranks, if one of them cannot read a file."""
    files, missing, problem = read_inherited(folder, head, weights)
    rows = process.current().gather_objects((missing, problem))
    for rank, (missing, problem) in enumerate(rows):
        if missing:
            raise FileNotFoundError(
                f"Rank {rank} needs {missing} to continue from the checkpoint of epoch "
                f"{head.epoch} in {folder}. Copy it there, or use a folder that all nodes see."
            )
        if problem:
            raise CheckpointError(
                f"Rank {rank} cannot read the checkpoint of epoch {head.epoch} in {folder}. "
                f"Received: {problem} With keep=2 an older save is taken; without one, delete "
                "checkpoint.json to begin anew."
            )
    return files


def _roots_of(
    files: Sequence[Sequence[OptimizerRecord]], folder: Path, optimizers: int
) -> list[OptimizerRecord]:
    """Return rank 0's records, without its own state; refuse another number of optimizers."""
    comm = process.current()
    rows = [
        (
            *(record.trained, record.unlisted, record.weights, record.common),
            *(record.kinds, record.state_kinds),
        )
        for record in (files[0] if files else [])
    ]
    # From rank 0, because with more ranks than saved some inherit no file
    everyone = comm.gather_objects(rows if comm.rank == 0 else [])
    roots = [
        OptimizerRecord(trained, GradientState(), "", {}, unlisted, [], weights, common, {}, *kinds)
        for trained, unlisted, weights, common, *kinds in everyone[0]
    ]
    if len(roots) != optimizers:
        raise CheckpointError(
            f"The checkpoint in {folder} has the state of {len(roots)} wrapped optimizers. "
            f"Received a model with {optimizers}. Compile it as it was."
        )
    return roots


def _require_kind(
    optimizer: keras.optimizers.Optimizer, root: OptimizerRecord, folder: Path
) -> None:
    """Refuse an optimizer whose class is neither the saved one, nor a base or a subclass of it.

    Its state may have as many variables, as RMSprop's mean squares and SGD's momenta, which Keras
    would load.
    """
    kinds = kinds_of(optimizer)
    if kinds[0] not in root.kinds and root.kinds[0] not in kinds:
        raise CheckpointError(
            "A checkpoint is restored into a model with the optimizer that it was saved with. "
            f"Received {kinds[0]}, and {folder} has the state of {root.kinds[0]}. Compile the "
            "model as it was; to continue with another optimizer, call model.load_weights on the "
            ".keras file in that folder before `compile`."
        )


def _require_state_kinds(
    optimizer: keras.optimizers.Optimizer,
    trained: list[str],
    records: Sequence[OptimizerRecord],
    folder: Path,
) -> None:
    """Refuse options with other state, as momentum, of an optimizer of the saved variables.

    Keras would drop the saved state, or load it into other state if there are as many variables.
    """
    own = state_kinds(optimizer), [kind for record in records for kind in record.state_kinds]
    # All ranks' kinds together, because a rank with shards of whole variables lacks those of the
    # others. A fixed rate and a schedule may replace each other, because the script's is used
    kinds, saved = (
        sorted({kind for of_rank in part for kind in of_rank} - _RATES)
        for part in zip(*process.current().gather_objects(own), strict=True)
    )
    names = exchanger_in(optimizer).names
    if kinds != saved and names.of(trainable_variables(optimizer)) == trained:
        raise CheckpointError(
            "A checkpoint is restored into an optimizer with the state that it was saved with. "
            f"Received {optimizer.name!r} with {', '.join(kinds) or 'none'}; {folder} has "
            f"{', '.join(saved) or 'none'}. Give the optimizer the options that it had, such as "
            "momentum or use_ema."
        )


def _known_variables(
    optimizer: keras.optimizers.Optimizer,
    model: keras.Model,
    records: Sequence[OptimizerRecord],
    root: OptimizerRecord,
    folder: Path,
) -> dict[str, keras.Variable]:
    """Return the model's variables by name, also frozen ones; refuse a model that lacks any."""
    names = exchanger_in(optimizer).names.of(model.weights)
    by_name = dict(zip(names, model.weights, strict=True))
    needed = set(root.trained).union(root.common, *(record.variables for record in records))
    if unknown := sorted(needed - set(by_name)):
        raise CheckpointError(
            f"The checkpoint in {folder} holds state of {unknown[0]!r}, which this model does not "
            f"have (it has {min(by_name)!r}, ...). Give the model and its layers the names that "
            "they had."
        )
    return by_name


def _build_optimizer(
    optimizer: keras.optimizers.Optimizer,
    variables: Mapping[str, keras.Variable],
    root: OptimizerRecord,
    trainable: Sequence[keras.Variable],
) -> None:
    """Build an optimizer for its saved variables, and set the state that Keras does not save."""
    if root.trained and not optimizer.built:
        # If the model trains more variables, Keras warns that the optimizer's state is not loaded
        new = set(exchanger_in(optimizer).names.of(trainable)) - set(root.trained)
        optimizer.build(trainable if new else [variables[name] for name in root.trained])
    for name in unlisted(optimizer).keys() & root.unlisted:
        unlisted(optimizer)[name].assign(root.unlisted[name])


def _load_states(
    optimizer: keras.optimizers.Optimizer,
    records: list[OptimizerRecord],
    ranks: tuple[int, int],
    common: CommonState,
) -> None:
    """Load the states that this rank inherits; `ranks` is their number in the save, and now."""
    exchanger, (old, new) = exchanger_in(optimizer), ranks
    settings = exchanger.settings
    # A residual contributes its value over the number of ranks to an average, so with more ranks it
    # must grow by their ratio
    averages = settings.strategy.in_lock_step and settings.operation == "average"
    factor = new / old if averages else 1.0
    states = (
        exchanger.accept(record.gradients, record.residuals_of).times(factor) for record in records
    )
    exchanger.load(sum(states, GradientState()), common)
    sums: Vectors = {}
    for record in records:
        sums = add_vectors(sums, scaled(record.accumulated, factor))
    for name, variable in accumulated(optimizer).items():
        variable.assign(np.reshape(sums.get(name, np.zeros(variable.shape)), variable.shape))

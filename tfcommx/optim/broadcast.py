"""Copy one rank's variables to every rank, so that all start alike, or average them."""

import itertools
import math
import weakref
import zlib
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfcommx.collectives import process
from tfcommx.collectives.comm import Comm
from tfcommx.core import ConfigurationError, check_whole, require_equal
from tfcommx.keras_internals.adapted import finalize_normalizations
from tfcommx.keras_internals.models import bytes_of, numbered_stem, seeds_among
from tfcommx.keras_internals.names import AGREED_NAMES, path_of
from tfcommx.keras_internals.optimizers import accumulated_gradients, array_of

# Dtypes that Horovod does not support; a complex number travels as its two parts. The wider type
# holds each value exactly, and a uint64 wraps to int64 and back
_CARRIED_AS = {
    tf.bfloat16: tf.float32,
    tf.dtypes.experimental.float8_e4m3fn: tf.float32,
    tf.dtypes.experimental.float8_e5m2: tf.float32,
    tf.bool: tf.float32,
    tf.uint32: tf.int64,
    tf.uint64: tf.int64,
}


# Difference between the seeds of two ranks; larger than the number of a model's generators, because
# Keras may number their seeds consecutively
SEED_STEP = 1_000_003
# Bytes of small variables that are broadcast together: milliseconds of a fast network
LARGEST_BATCH = 2**24

# Wrapped optimizers that exist
WRAPPED: weakref.WeakSet[keras.optimizers.Optimizer] = weakref.WeakSet()


def broadcast_variables(variables: Iterable[keras.Variable | tf.Variable], root: int = 0) -> None:
    """Give every rank the values that rank `root` has: weights, an optimizer's state.

    For custom loops, as `callbacks.BroadcastState` is for `fit`: after everything is built and
    restored, before the first step. Seeds among `model.variables`, such as dropout's, are derived
    from those of rank `root`, and differ between the ranks. Plans and checkpoints then name the
    variables as rank `root` does. Keras's Normalization derives its constants from the new
    weights; other layers that derive some keep the old ones. The sums of gradients that a wrapped
    optimizer accumulates, and with strategy="sharded" its state, are not broadcast.

    >>> import keras
    >>> import tfcommx as cx
    >>> _ = cx.init()
    >>> model = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(2)])
    >>> optimizer = cx.DistributedOptimizer(keras.optimizers.SGD(0.1))
    >>> optimizer.build(model.trainable_variables)
    >>> cx.broadcast_variables([*model.weights, *optimizer.variables])

    Args:
        variables: Keras's or TensorFlow's, of any shape, numbers or flags, equally many on all
            ranks, in the same order.
        root: a rank, in [0, number of ranks).

    **Ranks:** all. **Cost:** a checksum of each variable; of those that differ between ranks, a
    broadcast for every 16 MiB of small ones, and for each larger one.
    **Raises:** ConfigurationError if ranks have other shapes or dtypes, or layers of the same names
    in another order, name different roots or none of the ranks, or for text, before anything is
    sent.
    """
    variables = list(variables)
    broadcast_values(variables, root)
    set_seeds_apart(seeds_among(variables), root)
    finalize_normalizations(variables)


def set_seeds_apart(states: Iterable[keras.Variable], root: int) -> None:
    """Add a number of this rank's to seeds that equal those of rank `root`."""
    # Ranks that drop the same entries learn less from a batch
    away = process.rank() - root
    if away:
        for state in states:
            # Operations of TensorFlow, because a user's tf.function may broadcast
            seed, count = tf.unstack(tf.cast(tf.convert_to_tensor(state), tf.int64))
            state.assign(tf.stack([(seed + away * SEED_STEP) % 2**31, count]))


def broadcast_values(variables: Sequence[keras.Variable | tf.Variable], root: int) -> None:
    """Give every rank the values of rank `root`, as `broadcast_variables`, and nothing else.

    **Ranks:** all. **Raises:** as `broadcast_variables`.
    """
    comm, own = process.current(), _each_ranks_own()
    # By identity, because Keras compares variables entry by entry
    variables = [variable for variable in variables if id(variable) not in own]
    root = check_whole("root", root)
    # Names of optimizers that name variables in `build`, and have taken no step
    exchangers = [optimizer.exchanger for optimizer in list(WRAPPED)]
    named = [part.names for part in exchangers if part.sharding is not None and not part.runs]
    known_as = [
        next(filter(None, (names.get(variable) for names in named)), path_of(variable))
        for variable in variables
    ]
    names, unequal = _require_equal_variables(variables, known_as, root)
    words = next((var for var in variables if tf.as_dtype(var.dtype) == tf.string), None)
    if words is not None:
        raise ConfigurationError(
            f"Variables must hold numbers or flags. Received {path_of(words)!r} of text on rank "
            f"{comm.rank}. Leave it out, and set it alike on all ranks."
        )
    for variable, name in zip(variables, names, strict=True):
        # A model that only some ranks have loaded from a file has other paths, such as "out/bias"
        # for "net/out/bias", and plans and checkpoints refer to variables by path. Also a name that
        # is the path, because an earlier broadcast may have agreed on another one
        AGREED_NAMES[variable] = name
    for own_names in named:
        known = [i for i, variable in enumerate(variables) if own_names.get(variable)]
        own_names.rename([variables[i] for i in known], [names[i] for i in known])
    # Named by position, because the engine pairs by name, and paths may differ between ranks
    for number, batch in enumerate(_batches(unequal)):
        values = [_carried(variable) for variable in batch]
        flat = tf.concat([tf.reshape(value, [-1]) for value in values], axis=0)
        received = comm.broadcast(flat, root, f"tfcommx/state{number}")
        parts = tf.split(received, [math.prod(value.shape) for value in values])
        for variable, value, part in zip(batch, values, parts, strict=True):
            shaped, dtype = tf.reshape(part, value.shape), tf.as_dtype(variable.dtype)
            variable.assign(
                tf.complex(*tf.unstack(shaped)) if dtype.is_complex else tf.cast(shaped, dtype)
            )


def _batches(variables: Sequence[keras.Variable | tf.Variable]) -> Iterator[list[Any]]:
    """Yield variables that travel together, because each broadcast waits for a cycle of Horovod's.

    Those of a batch have one dtype, and at most LARGEST_BATCH bytes unless it is one variable.
    """
    by_dtype = defaultdict(list)
    for variable in variables:
        by_dtype[tf.as_dtype(variable.dtype)].append(variable)
    for dtype, alike in by_dtype.items():
        batch: list[Any] = []
        free = LARGEST_BATCH
        for variable in alike:
            size = math.prod(variable.shape) * dtype.size
            if batch and size > free:
                yield batch
                batch, free = [], LARGEST_BATCH
            batch.append(variable)
            free -= size
        yield batch


def _carried(variable: keras.Variable | tf.Variable) -> tf.Tensor:
    """Return a variable's value in a dtype that Horovod carries."""
    value = tf.convert_to_tensor(variable)
    if value.dtype.is_complex:
        return tf.stack([tf.math.real(value), tf.math.imag(value)])
    return tf.cast(value, _CARRIED_AS.get(value.dtype, value.dtype))


def _each_ranks_own() -> set[int]:
    """Return the identities of the optimizers' variables that each rank has alone."""
    own: set[int] = set()
    for optimizer in list(WRAPPED):
        sharding = optimizer.exchanger.sharding
        parts = [*accumulated_gradients(optimizer), *(sharding.state if sharding else ())]
        own |= set(map(id, parts))
    return own


def average_variables(variables: Sequence[keras.Variable], comm: Comm, name: str) -> None:
    """Set variables to their means over the ranks. **Ranks:** all, outside of traced code."""
    # In float64, in which the mean of equal values has their bits
    parts = [tf.reshape(tf.cast(variable, tf.float64), [-1]) for variable in variables]
    mean = comm.allreduce(tf.concat(parts, axis=0), "world", name) / comm.topology.size
    means = tf.split(mean, [part.shape[0] for part in parts])
    for variable, part in zip(variables, means, strict=True):
        variable.assign(tf.cast(tf.reshape(part, variable.shape), variable.dtype))


def checksum_of(variable: keras.Variable | tf.Variable) -> int:
    """Return a CRC of a variable's entries, by which ranks find those that differ."""
    # On a processor that takes SHA-256 of 1.3 GB/s, a CRC of 3
    return zlib.crc32(bytes_of(array_of(variable)))


def require_root(roots: Sequence[int]) -> None:
    """Refuse a root that differs between the ranks, whose roots these are, or is none of them.

    **Ranks:** local. **Raises:** ConfigurationError.
    """
    require_equal("`root`", roots)
    if roots[0] not in range(len(roots)):
        raise ConfigurationError(
            f"`root` must be a rank in [0, {len(roots)}). Received {roots[0]!r}."
        )


def _require_equal_variables(
    variables: Sequence[keras.Variable], names: Sequence[str], root: int
) -> tuple[list[str], list[keras.Variable]]:
    """Refuse variables of unequal shapes or dtypes.

    Returns:
        Their names on rank `root`; those of which ranks have unequal values, which a second `fit`
        need not send again.
    """
    # Horovod would wait for variables that a rank lacks
    comm = process.current()
    local = [
        (name, tuple(variable.shape), keras.backend.standardize_dtype(variable.dtype))
        for name, variable in zip(names, variables, strict=True)
    ]
    # None in a user's tf.function, because values are not known while it is traced
    checksums = [checksum_of(part) if tf.executing_eagerly() else None for part in variables]
    roots, everyone, sums = zip(*comm.gather_objects((root, local, checksums)), strict=True)
    require_root(roots)
    for rank, remote in enumerate(everyone):
        for local_form, remote_form in itertools.zip_longest(local, remote):
            if local_form is None or remote_form is None or local_form[1:] != remote_form[1:]:
                raise ConfigurationError(
                    "Model and optimizer must have the same variables on every rank. On rank "
                    f"{comm.rank} there is {local_form or 'nothing more'} where rank {rank} has "
                    f"{remote_form or 'nothing more'}."
                )
    names_by_rank = [[path for path, _, _ in remote] for remote in everyone]
    require_same_order(names_by_rank)
    columns = zip(variables, *sums, strict=True)
    unequal = [part for part, *several in columns if None in several or len({*several}) > 1]
    return names_by_rank[root], unequal


def require_same_order(names_by_rank: Sequence[Sequence[str]]) -> None:
    """Refuse variables of layers that two ranks have in different orders.

    **Ranks:** local; with the same names all ranks raise the same error.
    **Raises:** ConfigurationError.
    """
    every = list(map(tuple, names_by_rank))
    # Layers, sorted -> the names of the first rank with these layers
    first_with: dict[tuple[tuple[str, ...], ...], tuple[str, ...]] = {}
    for names in dict.fromkeys(every):
        layers = _layers_in(names)
        # Layers whose names Keras has numbered, or models of other names, are paired by position:
        # only the same names in another order are surely a mistake
        first = first_with.setdefault(tuple(sorted(layers)), names)
        for position, pair in enumerate(zip(_layers_in(first), layers, strict=True)):
            if pair[0] != pair[1]:
                raise ConfigurationError(
                    "Variables must be in the same order on every rank, because they are paired by "
                    f"position. Rank {every.index(first)} has {first[position]!r} where rank "
                    f"{every.index(names)} has {names[position]!r}. Make the layers in a fixed "
                    "order, such as that of sorted(...): that of a set differs between processes."
                )


def _layers_in(paths: Sequence[str]) -> list[tuple[str, ...]]:
    """Return the layers in variables' paths, without the numbers that Keras added."""
    return [tuple(map(numbered_stem, path.split("/")[:-1])) for path in paths]

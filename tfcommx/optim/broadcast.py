"""Copy one rank's variables to every rank, so that all start from the same point."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

import keras
import tensorflow as tf

from tfcommx.comm import process
from tfcommx.optim.variable_names import path_of
from tfcommx.terms import PlanError

# Horovod does not have these dtypes itself.
_CARRIED_AS = {
    tf.bfloat16: tf.float32,
    tf.bool: tf.float32,
    tf.uint32: tf.int64,
    tf.uint64: tf.int64,
}


def broadcast_variables(variables: Iterable[keras.Variable | tf.Variable], root: int = 0) -> None:
    """Give every rank the values that rank `root` has: weights, an optimizer's state.

    For custom loops, as `callbacks.BroadcastState` is for `fit`: after everything is built and
    restored, before the first step. `model.variables` has the seeds of dropout, too: ranks that
    drop the same entries learn less from a batch. Plans and checkpoints then call the variables
    what rank `root` calls them: a rank that made another model before has other paths.

    >>> import keras
    >>> import tfcommx as cx
    >>> _ = cx.init()
    >>> model = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(2)])
    >>> optimizer = cx.DistributedOptimizer(keras.optimizers.SGD(0.1))
    >>> optimizer.build(model.trainable_variables)
    >>> cx.broadcast_variables([*model.weights, *optimizer.variables])

    Args:
        variables: Keras's or TensorFlow's, of any shape and dtype, equally many on all ranks, in
            the same order.
        root: a rank, in [0, number of ranks).

    **Ranks:** all. **Cost:** one broadcast per variable.
    **Raises:** PlanError if ranks have other shapes or dtypes, before anything is sent.
    """
    here, variables = process.current(), list(variables)
    if not 0 <= root < here.topology.size:
        raise PlanError(f"`root` must be a rank in [0, {here.topology.size}). Received {root!r}.")
    names = _require_equal_variables(variables)[root]
    for variable, name in zip(variables, names, strict=True):
        if name != path_of(variable):
            variable.tfcommx_name = name  # Read by VariableNames
    for number, variable in enumerate(variables):
        value = tf.convert_to_tensor(variable)
        carried = tf.cast(value, _CARRIED_AS.get(value.dtype, value.dtype))
        received = here.broadcast(carried, root, f"tfcommx/state{number}")
        variable.assign(tf.cast(received, value.dtype))


def _require_equal_variables(variables: Sequence[keras.Variable]) -> list[list[str]]:
    """Compare shapes and dtypes: Horovod would wait for what other ranks do not have.

    Returns:
        Of every rank the paths of its variables.
    """
    here = process.current()
    mine = [
        (path_of(variable), tuple(variable.shape), keras.backend.standardize_dtype(variable.dtype))
        for variable in variables
    ]
    everyone = here.gather_objects(mine)
    for rank, theirs in enumerate(everyone):
        for one, other in itertools.zip_longest(mine, theirs):
            if one is None or other is None or one[1:] != other[1:]:
                raise PlanError(
                    "Model and optimizer must have the same variables on every rank. On rank "
                    f"{here.rank} there is {one or 'nothing more'} where rank {rank} has "
                    f"{other or 'nothing more'}."
                )
    return [[path for path, _, _ in theirs] for theirs in everyone]

"""Wrapped Keras optimizers on ranks that are threads: eager steps, for laws of strategies."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfcommx.collectives.comm import Comm
from tfcommx.collectives.threads import ThreadComm
from tfcommx.core import Scheme, Topology
from tfcommx.keras_internals.optimizers import copy_with, steps_of, unlisted
from tfcommx.keras_internals.shards import UpdatesShards
from tfcommx.keras_internals.step import ExchangesGradients
from tfcommx.optim.exchanger import Exchanger
from tfcommx.optim.requested_plan import ExchangeSettings
from tfcommx.optim.step_boundary import consolidate
from tfcommx.strategies import strategy_of

SHAPES = {"first/kernel": (7, 5), "first/bias": (5,), "last/kernel": (5, 9), "last/bias": (9,)}
DENSE = Scheme()


def wrap(
    optimizer: keras.optimizers.Optimizer, comm: Comm, strategy: Any, scheme: Any, op: str
) -> keras.optimizers.Optimizer:
    """Wrap an optimizer as DistributedOptimizer does, for the rank of a thread."""
    strategy = strategy_of(strategy)
    mixin = UpdatesShards if strategy.shards_weights else ExchangesGradients
    wrapped = copy_with(mixin, optimizer)
    settings = ExchangeSettings(operation=op, strategy=strategy, check_replicas_every=3)
    wrapped.exchanger = Exchanger(comm, scheme, settings)
    wrapped.exchanger.serve(wrapped)
    return wrapped


def new_weights() -> list[keras.Variable]:
    numbers = np.random.default_rng(1)
    return [
        keras.Variable(numbers.normal(size=shape).astype("float32"), name=path.replace("/", "_"))
        for path, shape in SHAPES.items()
    ]


def gradients(rank: int, step: int) -> list[tf.Tensor]:
    numbers = np.random.default_rng([3, rank, step])
    return [tf.constant(numbers.normal(size=shape), tf.float32) for shape in SHAPES.values()]


def train(
    make: Callable[[], keras.optimizers.Optimizer],
    strategy: Any,
    topology: Topology,
    scheme: Any = DENSE,
    op: str = "average",
    steps: int = 4,
    after: Callable[[Any, list[keras.Variable]], Any] | None = None,
) -> list[Any]:
    """Take steps on every rank, with different gradients on each.

    Returns:
        The weights of every rank; or the results of `after(optimizer, weights)`.
    """

    def work(comm: Comm) -> Any:
        optimizer, weights = wrap(make(), comm, strategy, scheme, op), new_weights()
        for step in range(steps):
            optimizer.apply(gradients(comm.rank, step), weights)
        return after(optimizer, weights) if after else [one.numpy() for one in weights]

    return ThreadComm.run(topology, work)


def equal(one: list[list[np.ndarray]], other: list[list[np.ndarray]]) -> bool:
    """Return True if the weights of all ranks have the same bits."""
    return all(
        a.tobytes() == b.tobytes()
        for mine, theirs in zip(one, other, strict=True)
        for a, b in zip(mine, theirs, strict=True)
    )


def save(
    optimizer: keras.optimizers.Optimizer, weights: list[keras.Variable]
) -> dict[str, np.ndarray]:
    """Return, on rank 0, the optimizer's saved variables and the weights; elsewhere, nothing."""
    store: dict[str, np.ndarray] = {}
    consolidate(optimizer)
    if optimizer.exchanger.comm.rank == 0:
        optimizer.save_own_variables(store)
        store["weights"] = [one.numpy() for one in weights]
    return store


def continue_from(
    store: dict[str, np.ndarray],
    make: Callable[[], keras.optimizers.Optimizer],
    strategy: Any,
    topology: Topology,
    distinct: int,
) -> list[list[np.ndarray]]:
    """Take four steps from the result of `save`, as of `distinct` ranks; return the weights."""

    def go_on(comm: Comm) -> list[np.ndarray]:
        optimizer, mine = wrap(make(), comm, strategy, DENSE, "average"), new_weights()
        kept = {key: value for key, value in store.items() if key != "weights"}
        optimizer.build(mine)
        if comm.rank == 0:  # As a restored checkpoint: BroadcastState brings it to the others
            optimizer.load_own_variables(kept)
        for one, value in zip(mine, store["weights"], strict=True):
            one.assign(value)
        sharding = optimizer.exchanger.sharding
        sharding.share_loaded(0, steps_of(optimizer))
        apart = {id(one) for one in sharding.state}
        rest = [one for one in optimizer.variables if id(one) not in apart]
        rest += unlisted(optimizer).values()
        of_root = comm.gather_objects([one.numpy() for one in rest])[0]
        for one, value in zip(rest, of_root, strict=True):
            one.assign(value)
        again = save(optimizer, mine)
        assert all(again[key].tobytes() == value.tobytes() for key, value in kept.items() if again)
        for step in range(4):
            optimizer.apply(gradients(comm.rank % distinct, step), mine)
        return [one.numpy() for one in mine]

    return ThreadComm.run(topology, go_on)

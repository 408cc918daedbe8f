"""Wrapped Keras optimizers on ranks that are threads: eager steps, for laws of strategies."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfcommx.comm.base import Comm
from tfcommx.comm.threads import ThreadComm
from tfcommx.optim.exchange_settings import ExchangeSettings
from tfcommx.optim.exchanger import Exchanger
from tfcommx.optim.keras_internals import ExchangesGradients, UpdatesShards, copy_with
from tfcommx.strategies import strategy_of
from tfcommx.terms import Scheme, Topology

SHAPES = {"first/kernel": (7, 5), "first/bias": (5,), "last/kernel": (5, 9), "last/bias": (9,)}
DENSE = Scheme()


def wrap(
    optimizer: keras.optimizers.Optimizer, comm: Comm, strategy: Any, scheme: Any, op: str
) -> keras.optimizers.Optimizer:
    """Wrap an optimizer as DistributedOptimizer does, for the rank of a thread."""
    strategy = strategy_of(strategy)
    mixin = UpdatesShards if strategy.shards_weights else ExchangesGradients
    wrapped = copy_with(mixin, optimizer)
    settings = ExchangeSettings(operation=op, strategy=strategy, check_replicas_every=1)
    wrapped.exchanger = Exchanger(comm, scheme, settings)
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
    """Take steps on every rank, each by gradients of its own.

    Returns:
        Of every rank the weights; or what `after(optimizer, weights)` returns.
    """

    def work(comm: Comm) -> Any:
        optimizer, weights = wrap(make(), comm, strategy, scheme, op), new_weights()
        for step in range(steps):
            optimizer.apply(gradients(comm.rank, step), weights)
        return after(optimizer, weights) if after else [one.numpy() for one in weights]

    return ThreadComm.run(topology, work)

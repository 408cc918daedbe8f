"""The laws of a strategy."""

from __future__ import annotations

import keras
import numpy as np
import tensorflow as tf

from tfcommx.comm.base import Comm
from tfcommx.comm.threads import ThreadComm
from tfcommx.optim.exchange_settings import ExchangeSettings
from tfcommx.optim.exchanger import Exchanger
from tfcommx.optim.keras_internals import ExchangesGradients, UpdatesShards, copy_with
from tfcommx.optim.step_boundary import consolidate
from tfcommx.strategies import Strategy, strategy_of
from tfcommx.terms import Scheme, Topology
from tfcommx.testing import laws
from tfcommx.testing.laws import require


def check_strategy(asked: str | Strategy, steps: int = 4) -> None:
    """Hold a strategy to its laws: all ranks end with the same weights, and have moved.

    Args:
        asked: of the table, an instance, or "module:MEMBER".
        steps: with SGD and momentum, each rank with gradients of its own, >= 1.

    **Ranks:** none: everything runs in this process. **Cost:** a second.
    **Raises:** LawBroken; PlanError for a name that is none.
    """
    strategy = strategy_of(asked)
    for topology in (Topology(2, 1), Topology(2, 2)):
        where = f"{asked!r}, {topology.nodes} x {topology.slots} ranks"
        first, *others = ThreadComm.run(
            topology, lambda comm: _weights_after(steps, strategy, comm)
        )
        for rank, weights in enumerate(others, 1):
            require(
                all(map(np.array_equal, weights, first)),
                "All ranks must hold the same weights once they are consolidated.",
                where,
                f"Rank {rank} holds others than rank 0.",
            )
        start = [variable.numpy() for variable in _variables()]
        require(
            not any(map(np.array_equal, first, start)) and all(map(_is_finite, first)),
            "Steps must move the weights, and leave them finite.",
            where,
            "They did not.",
        )


def _is_finite(weights: np.ndarray) -> bool:
    return bool(np.isfinite(weights).all())


def _weights_after(steps: int, strategy: Strategy, comm: Comm) -> list[np.ndarray]:
    mixin = UpdatesShards if strategy.shards_weights else ExchangesGradients
    optimizer, weights = copy_with(mixin, keras.optimizers.SGD(0.1, momentum=0.5)), _variables()
    settings = ExchangeSettings(strategy=strategy)
    optimizer.exchanger = Exchanger(comm, Scheme(), settings)
    for step in range(steps):
        given = laws.normal_numbers(comm.rank, step)
        optimizer.apply([tf.constant(given[path]) for path in laws.SHAPES], weights)
    consolidate(optimizer)
    return [variable.numpy() for variable in weights]


def _variables() -> list[keras.Variable]:
    return [
        keras.Variable(np.ones(shape, np.float32), name=path.replace("/", "_"))
        for path, shape in laws.SHAPES.items()
    ]

"""Rebroadcast: synchronous, and every few steps rank 0's weights replace those of all ranks.

**Source:** Wang et al., "Efficient Communications in Training Large Scale Neural Networks" (2016),
Algorithm 3.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import tensorflow as tf

from tfcommx.runtime.executor import PlanExecutor
from tfcommx.strategies.base import Strategy, StrategyRun, Update
from tfcommx.strategies.broadcast_weights import broadcast_weights
from tfcommx.terms import check_whole


@dataclass(frozen=True)
class Rebroadcast(Strategy):
    """Apply the exchanged gradients on every rank; every few steps broadcast rank 0's weights.

    The gradients have the same bits on all ranks anyway: it helps only if the ranks' processors
    compute the update differently.
    """

    # Steps, an integer >= 1, after which the weights are broadcast; 5 as in the paper
    every: int = 5

    keeps_weights_equal: ClassVar[bool] = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "every", check_whole("every", self.every, least=1))

    def start(self, executor: PlanExecutor) -> StrategyRun:
        """Get ready for the steps of one plan."""
        return RebroadcastRun(executor, self.every)


class RebroadcastRun(StrategyRun):
    """The strategy at work on one plan."""

    def __init__(self, executor: PlanExecutor, every: int) -> None:
        super().__init__(executor)
        self._every = every

    @tf.autograph.experimental.do_not_convert
    def update(self, step: Update) -> None:
        """Apply the update here, as on every rank; broadcast the weights if it is time."""
        step.apply()
        if self._every == 1:
            broadcast_weights(step.weights, self.executor)
        else:
            tf.cond(
                self.executor.steps % self._every == 0,
                lambda: broadcast_weights(step.weights, self.executor),
                lambda: None,
            )

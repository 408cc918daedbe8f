"""Rebroadcast: synchronous, and every few steps rank 0's weights replace those of all ranks.

**Source:** Wang et al., "Efficient Communications in Training Large Scale Neural Networks" (2016),
Algorithm 3.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import tensorflow as tf

from tfcommx.runtime.executor import PlanExecutor
from tfcommx.strategies.base import StrategyRun, require_sums_on_all_ranks
from tfcommx.strategies.broadcast_weights import broadcast_weights
from tfcommx.terms import Plan, check_whole


@dataclass(frozen=True)
class Rebroadcast:
    """Apply the exchanged gradients on every rank; every few steps broadcast rank 0's weights.

    The gradients have the same bits on all ranks anyway: it helps only if the ranks' processors
    compute the update differently.
    """

    # Steps, an integer >= 1, after which the weights are broadcast; 5 as in the paper
    every: int = 5

    keeps_weights_equal: ClassVar[bool] = False
    updates_alike: ClassVar[bool] = False
    shards_weights: ClassVar[bool] = False
    reduces_to_root: ClassVar[bool] = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "every", check_whole("every", self.every, least=1))

    def check(self, plan: Plan) -> None:
        """Refuse a plan that brings the sums to rank 0 alone. **Raises:** PlanError."""
        require_sums_on_all_ranks(plan, self)

    def start(self, executor: PlanExecutor) -> StrategyRun:
        """Get ready for the steps of one plan."""
        return RebroadcastRun(executor, self.every)


class RebroadcastRun(StrategyRun):
    """The strategy at work on one plan."""

    def __init__(self, executor: PlanExecutor, every: int) -> None:
        super().__init__(executor)
        self._every = every

    # What follows is a graph already, also in a caller's loop.
    @tf.autograph.experimental.do_not_convert
    def update(
        self,
        apply: Callable[[], None],
        gradients: Sequence[tf.Tensor],
        weights: Mapping[str, tf.Variable],
        state: Sequence[tf.Variable] = (),
    ) -> None:
        """Apply the update here, as on every rank; broadcast the weights if it is time."""
        apply()
        with self.executor.scope():
            if self._every == 1:
                broadcast_weights(weights, self.executor)
            else:
                tf.cond(
                    self.executor.steps % self._every == 0,
                    lambda: broadcast_weights(weights, self.executor),
                    lambda: None,
                )

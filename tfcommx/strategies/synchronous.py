"""Synchronous: every rank applies the exchanged gradients. The identity of the strategies."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import tensorflow as tf

from tfcommx.runtime.executor import PlanExecutor
from tfcommx.strategies.base import StrategyRun, require_sums_on_all_ranks
from tfcommx.terms import Plan


@dataclass(frozen=True)
class Synchronous:
    """Exchange gradients at every step and apply them on every rank, as plain Horovod does.

    The gradients have the same bits on all ranks, so the weights do not drift apart.
    """

    reduces_to_root: ClassVar[bool] = False

    def check(self, plan: Plan) -> None:
        """Refuse a plan that brings the sums to rank 0 alone. **Raises:** PlanError."""
        require_sums_on_all_ranks(plan, self)

    def start(self, executor: PlanExecutor) -> StrategyRun:
        """Get ready for the steps of one plan."""
        return SynchronousRun(executor)


class SynchronousRun:
    """The synchronous strategy at work on one plan."""

    def __init__(self, executor: PlanExecutor) -> None:
        self.executor = executor

    def exchange(self, gradients: Mapping[str, tf.Tensor]) -> dict[str, tf.Tensor]:
        """Return the average (or sum) of the gradients over all ranks."""
        return self.executor.exchange(gradients)

    def update(
        self,
        apply: Callable[[], None],
        gradients: Sequence[tf.Tensor],
        weights: Mapping[str, tf.Variable],
    ) -> None:
        """Apply the update here, as on every rank."""
        apply()

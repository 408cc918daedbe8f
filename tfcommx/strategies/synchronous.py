"""Synchronous: every rank applies the exchanged gradients. The identity of the strategies."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from tfcommx.runtime.executor import PlanExecutor
from tfcommx.strategies.base import StrategyRun, require_sums_on_all_ranks
from tfcommx.terms import Plan


@dataclass(frozen=True)
class Synchronous:
    """Exchange gradients at every step and apply them on every rank, as plain Horovod does.

    The gradients have the same bits on all ranks, so the weights do not drift apart.
    """

    keeps_weights_equal: ClassVar[bool] = True
    updates_alike: ClassVar[bool] = True
    shards_weights: ClassVar[bool] = False
    reduces_to_root: ClassVar[bool] = False

    def check(self, plan: Plan) -> None:
        """Refuse a plan that brings the sums to rank 0 alone. **Raises:** PlanError."""
        require_sums_on_all_ranks(plan, self)

    def start(self, executor: PlanExecutor) -> StrategyRun:
        """Get ready for the steps of one plan."""
        return StrategyRun(executor)

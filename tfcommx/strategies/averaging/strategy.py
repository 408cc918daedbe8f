"""Weight averaging: every rank updates by its own gradients, then the weights are averaged.

    every = 3    update | update | update | average || update | update | update | average || ...

    every = 4, fragments = 2     step    1     2     3     4     5     6     7     8
                                 sends         a           b           a           b
    overlap = 1                  arrives             a           b           a

Every step it is AWAGD; every few steps local SGD; with an outer optimizer it is DiLoCo, and with
fragments and an overlap Streaming DiLoCo. Averaging the weights after an update that is linear
in the gradient (SGD, also with momentum) equals synchronous training, to float32 rounding, if
`every` is 1: the average of w - r g_i is w - r times the average of g_i, and likewise for the
velocities. It does not with clipping, or with Adam and other rules that are not linear, and never
with `every` above 1. (Weight decay is allowed because it reads the weights, which are equal.)

This file has the options; `run` has the steps, and rounds that end in a later step;
`outer_optimizer` moves the start weights.

**Source:** Ma, Mao, Taylor, "Theano-MPI: a Theano-based Distributed Training Framework" (2016),
section on AWAGD (average weights after gradient descent) and SUBGD (sum of updates before gradient
descent; it is `op="sum"` with the strategy "synchronous", or with sends="updates" here).
Douillard et al., "DiLoCo" (2023), and "Streaming DiLoCo with Overlapping Communication" (2025),
section 2. We choose a fragment by size, not by layer, and keep all updates of the steps that a
round overlaps (`OverlappedRounds`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from tfcommx import routes
from tfcommx.core import ConfigurationError, Plan, check_name, check_whole
from tfcommx.planner.plan import fragments_of_buckets
from tfcommx.runtime.executor import only_plan
from tfcommx.runtime.gradient_state import Executor
from tfcommx.strategies.averaging.outer_optimizer import OuterOptimizer
from tfcommx.strategies.averaging.run import WeightAveragingRun
from tfcommx.strategies.strategy import Strategy, StrategyRun

SENDS = ("weights", "updates")
MOMENTUM = ("keep", "average", "reset")


@dataclass(frozen=True)
class WeightAveraging(Strategy):
    """Update by each rank's own gradients; average the weights every few steps.

    Between averages the ranks' weights differ; at the end of an epoch, before an evaluation and
    before a checkpoint they are averaged (cx.consolidate).

    >>> import keras
    >>> WeightAveraging(32, outer=keras.optimizers.SGD(0.7, momentum=0.9, nesterov=True))
    WeightAveraging(every=32, sends='updates', momentum='keep', outer=SGD(learning_rate=0.7, \
momentum=0.9, nesterov=True), fragments=1, overlap=0)

    **Ranks:** all, with equal options. **Cost:** one exchange of all variables in `every` steps, by
    their schemes. sends="updates" keeps a copy of the weights at the last average, and `outer` its
    state with it: two copies with momentum. `overlap` keeps one copy more, or two with
    sends="weights"; the exchange uses the cores and the bandwidth that the steps leave free, and
    other Horovod collectives wait until it has ended.
    **Raises:** ConfigurationError for options out of range or that exclude each other.
    """

    # Steps, an integer >= 1, after which weights are averaged: tau
    every: int = 1
    # "weights", by dense schemes; or "updates", the sum of a rank's updates since the last average,
    # by any scheme, whose residuals hold the unsent entries. With `outer` always "updates"
    sends: str = "weights"
    # The optimizer's state at an average: each rank keeps its own, all average it, or all reset it
    # to 0
    momentum: str = "keep"
    # Keras optimizer that moves the weights of the last average by the averaged updates (DiLoCo:
    # SGD(0.7, momentum=0.9, nesterov=True)); None: they become the average
    outer: Any = None
    # Groups of variables with about equally many entries, in [1, every], whose averages are spread
    # evenly over the steps
    fragments: int = 1
    # Steps, in [0, every // fragments], for which training continues while a round is in transit;
    # 0: a step that sends waits for the average
    overlap: int = 0

    # Only in steps that begin with an average; `WeightAveragingRun.weights_are_equal` says which
    keeps_weights_equal: ClassVar[bool] = True
    updates_apart: ClassVar[bool] = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "every", check_whole("every", self.every, least=1))
        object.__setattr__(self, "fragments", check_whole("fragments", self.fragments, least=1))
        check_name("sends", self.sends, SENDS)
        check_name("momentum", self.momentum, MOMENTUM)
        if self.fragments > self.every:
            raise ConfigurationError(
                "At most one fragment is averaged a step. Received "
                f"fragments={self.fragments} with every={self.every}. Take at most `every`."
            )
        object.__setattr__(self, "overlap", check_whole("overlap", self.overlap, least=0))
        if self.overlap > self.every // self.fragments:
            raise ConfigurationError(
                "A round ends before the next one begins: `overlap` is at most every // fragments. "
                f"Received overlap={self.overlap} with every={self.every} and "
                f"fragments={self.fragments}. Take at most {self.every // self.fragments}."
            )
        if (self.fragments > 1 or self.overlap) and self.momentum != "keep":
            raise ConfigurationError(
                "Fragments, and rounds that overlap steps, are averaged at different steps, so "
                f'momentum must be "keep". Received momentum={self.momentum!r} with '
                f"fragments={self.fragments} and overlap={self.overlap}."
            )
        if self.outer is not None:
            object.__setattr__(self, "outer", OuterOptimizer.of(self.outer))
            object.__setattr__(self, "sends", "updates")

    @property
    def plan_fragments(self) -> int:
        """The number of groups of variables that have separate buckets."""
        return self.fragments

    def check(self, plan: Plan) -> None:
        """Refuse buckets that cannot carry weights or rounds, or that span two fragments.

        **Raises:** ConfigurationError.
        """
        super().check(plan)
        fragments_of_buckets(plan, self.fragments)
        for bucket in plan.buckets if self.overlap else ():
            if routes.get(bucket.route).needs_messages(bucket):
                raise ConfigurationError(
                    "Rounds that overlap steps need a route of collectives: messages of two "
                    "exchanges at a time could be mistaken for each other. Received "
                    f"overlap={self.overlap} with {bucket.name} on the route {bucket.route!r}. "
                    "Take another route, or overlap=0."
                )
        if self.sends == "updates":
            return
        unfit = next(
            (bucket for bucket in plan.buckets if bucket.keeps_residual or bucket.momentum), None
        )
        if plan.operation != "average" or unfit is not None:
            received = f"op={plan.operation!r}"
            if unfit:
                received = (
                    f"{unfit.name} on the route {unfit.route!r} with wire={unfit.wire!r} and "
                    f"compression={unfit.compression!r}"
                )
            raise ConfigurationError(
                'Weights travel whole, and are averaged: sends="weights" needs dense schemes '
                "without momentum, without a compression and without 16 or fewer bits on the wire, "
                f'which would round the weights, and op="average". Received {received}. Take '
                'sends="updates", or other schemes.'
            )

    def start(self, executor: Executor) -> StrategyRun:
        return WeightAveragingRun(only_plan(executor), self)

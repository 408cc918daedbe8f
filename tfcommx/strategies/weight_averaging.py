"""Weight averaging: every rank updates by its own gradients, then the weights are averaged.

    every = 3    update | update | update | average || update | update | update | average || ...

Every step it is AWAGD; every few steps local SGD. Averaging the weights after an update that is
linear in the gradient (SGD, also with momentum) equals synchronous training, to float32 rounding,
if `every` is 1: the average of w - r g_i is w - r times the average of g_i, and likewise for the
velocities. It does not with clipping, or with Adam and other rules that are not linear, and never
with `every` above 1. (Weight decay reads the weights, which are equal, so it may be there.)

**Source:** Ma, Mao, Taylor, "Theano-MPI: a Theano-based Distributed Training Framework" (2016),
section on AWAGD (average weights after gradient descent) and SUBGD (sum of updates before gradient
descent; it is `op="sum"` with the strategy "synchronous", or with sends="updates" here).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import tensorflow as tf

from tfcommx.kernels.untraced import untraced
from tfcommx.runtime.executor import PlanExecutor
from tfcommx.strategies.base import Strategy, StrategyRun, Update
from tfcommx.terms import Plan, PlanError, check_name, check_whole

SENDS = ("weights", "updates")
MOMENTUM = ("keep", "average", "reset")


@dataclass(frozen=True)
class WeightAveraging(Strategy):
    """Update by each rank's own gradients; average the weights every some steps.

    Between averages the ranks' weights differ; at the end of an epoch, before an evaluation and
    before a checkpoint they are averaged (cx.consolidate).
    """

    # Steps, an integer >= 1, after which weights are averaged: tau
    every: int = 1
    # "weights", by dense schemes; or "updates", the sum of a rank's updates since the last average,
    # by any scheme, whose residuals hold what was not sent
    sends: str = "weights"
    # Of the optimizer's state at an average: each rank keeps its own, all average, or all begin
    # again from 0
    momentum: str = "keep"

    # In the steps that begin with an average; `WeightAveragingRun.weights_are_equal` says which
    keeps_weights_equal: ClassVar[bool] = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "every", check_whole("every", self.every, least=1))
        check_name("sends", self.sends, SENDS)
        check_name("momentum", self.momentum, MOMENTUM)

    def check(self, plan: Plan) -> None:
        """Refuse what cannot carry weights: sums, selections, momentum. **Raises:** PlanError."""
        super().check(plan)
        if self.sends == "updates":
            return
        odd = next((one for one in plan.buckets if one.keeps_residual or one.momentum), None)
        if plan.operation != "average" or odd is not None:
            what = f"op={plan.operation!r}"
            if odd:
                what = f"{odd.name} on the route {odd.route!r} with wire={odd.wire!r}"
            raise PlanError(
                'Weights travel whole, and are averaged: sends="weights" needs dense schemes '
                "without momentum and without 16 bits on the wire, which would round the weights, "
                f'and op="average". Received {what}. Take sends="updates", or other schemes.'
            )

    def start(self, executor: PlanExecutor) -> StrategyRun:
        """Get ready for the steps of one plan."""
        return WeightAveragingRun(executor, self)


class WeightAveragingRun(StrategyRun):
    """The strategy at work on one plan."""

    def __init__(self, executor: PlanExecutor, options: WeightAveraging) -> None:
        super().__init__(executor)
        self._options, self.steps_per_exchange = options, options.every
        with tf.device("/cpu:0"):
            # Steps since the last average
            self._steps = tf.Variable(0, dtype=tf.int64, trainable=False, name="tfcommx/since")
        # The weights at the last average, if updates are sent
        self._anchors: dict[str, tf.Variable] = {}
        # Of the last step
        self._weights: Mapping[str, tf.Variable] = {}
        self._state: Sequence[tf.Variable] = ()

    def exchange(self, gradients: Mapping[str, tf.Tensor]) -> dict[str, tf.Tensor]:
        """Return this rank's own gradients."""
        return dict(gradients)

    def follow_rate(self, rate: tf.Tensor) -> None:
        """Do nothing: residuals hold updates, in which the rate is already."""

    def weights_are_equal(self) -> tf.Tensor | bool:
        """Tell whether the last step ended with an average."""
        return self._options.every == 1 or tf.equal(self._steps.value(), 0)

    @tf.autograph.experimental.do_not_convert
    def update(self, step: Update) -> None:
        """Apply the update of this rank; average if it is time."""
        self._weights, self._state = step.weights, step.state
        every = self._options.every
        # Without data there is no step
        with tf.control_dependencies(list(step.gradients)[-1:]):
            before = self._steps.read_value()
        if self._options.sends == "updates":
            self._make_anchors(step.weights)
            self._at_zero(before, self._set_anchors)
        with tf.control_dependencies([before]):
            step.apply()
            after = self._steps.assign((before + 1) % every).read_value()
        self._at_zero(after, self._average)

    def _at_zero(self, steps: tf.Tensor, work: Callable[[], None]) -> None:
        """Do some work if a count of steps is 0: always if each step averages."""
        if self._options.every == 1:
            with tf.control_dependencies([steps]):
                work()
        else:
            tf.cond(tf.equal(steps, 0), work, lambda: None)

    def _make_anchors(self, weights: Mapping[str, tf.Variable]) -> None:
        if not self._anchors:
            with untraced():
                self._anchors = {
                    path: tf.Variable(tf.zeros_like(weight), trainable=False, name="tfcommx/anchor")
                    for path, weight in weights.items()
                }

    def _set_anchors(self) -> None:
        for path, anchor in self._anchors.items():
            anchor.assign(self._weights[path])

    def _average(self) -> None:
        """Average what is sent, by the plan. **Ranks:** all."""
        sent = {path: tf.convert_to_tensor(weight) for path, weight in self._weights.items()}
        if self._options.sends == "updates":
            sent = {path: value - self._anchors[path] for path, value in sent.items()}
        for path, value in self.executor.exchange(sent).items():
            if self._options.sends == "updates":
                value = self._anchors[path] + value
            self._weights[path].assign(value)
        self._average_state()

    def _average_state(self) -> None:
        """Do with the optimizer's state what the option says."""
        comm = self.executor.comm
        for place, slot in enumerate(self._state):
            if not slot.dtype.is_floating or self._options.momentum == "keep":
                continue
            if self._options.momentum == "reset":
                slot.assign(tf.zeros_like(slot))
                continue
            with self.executor.scope():
                total = comm.allreduce(tf.convert_to_tensor(slot), "world", f"state{place}")
            slot.assign(total / tf.cast(comm.topology.size, total.dtype))

    def consolidate(self) -> None:
        """Average now, if steps were taken since the last time."""
        if int(self._steps.numpy()):
            self._average()
            self._steps.assign(0)

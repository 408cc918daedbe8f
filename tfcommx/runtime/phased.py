"""MomentumExecutor: exchanges momenta of some variables and gradients of others, by separate plans.

    variables that send no momentum   -> gradients ---------------------------------> result
    others                            -> momenta -----------------------------------> result
    ... with a learning phase         -> cond(frozen?) -> gradients | momenta ------> result

Both phases are in the graph of one step, so a change of the phase needs no new trace, and a
checkpoint of either phase can be loaded. The optimizer decides when the phase changes, on all ranks
at the same step. Each bucket has a separate condition, because it must be sent while gradients of
others are computed. Both phases share the residuals, because momenta are sent in the unit of
gradients: residuals of the last gradients are sent with the first momenta.
"""

from collections.abc import Mapping, Sequence, Set
from dataclasses import replace
from typing import NamedTuple

import tensorflow as tf

from tfcommx.collectives.comm import Comm
from tfcommx.core import DENSE_CODES, Plan
from tfcommx.runtime.bucket_runner import BucketRunner
from tfcommx.runtime.executor import PlanExecutor, agree_on_plan
from tfcommx.runtime.gradient_state import GradientState


class LearningPhase(NamedTuple):
    """The steps in which gradients are exchanged in place of momenta."""

    # Wire format of gradients in place of the momenta's codes; the rest of the scheme is the same
    wire: str
    # An integer scalar of the optimizer: > 0 from the first step with momenta on
    frozen_at: tf.Variable


class MomentumExecutor:
    """Plans of momenta, of gradients in a phase before, and of the other variables' gradients."""

    def __init__(
        self,
        momenta: Plan,
        others: Plan | None,
        learning: LearningPhase | None,
        comm: Comm,
        divided_by_rate: bool = False,
    ) -> None:
        """Prepare the exchange by all plans.

        Args:
            momenta: plan of the variables that send their momentum.
            others: plan of the variables that never do; None: all variables do.
            learning: None: momenta are exchanged from the first step.
            divided_by_rate: True if momenta are divided by the learning rate.

        **Ranks:** all, outside of traced code, with equal plans. **Raises:** as PlanExecutor.
        """
        self.comm, self._phase = comm, learning
        self._others = [] if others is None else [PlanExecutor(others, comm)]
        self._momenta = PlanExecutor(momenta, comm, divided_by_rate)
        self._all = [*self._others, self._momenta]
        # Only a plan: its buckets use the state of the momenta's, which saves 4 bytes an entry on
        # each rank
        self._learning = [] if learning is None else [_of_gradients(momenta, learning.wire)]
        for plan in self._learning:
            agree_on_plan(plan, comm)
        # Collectives of the learning phase have separate names, because they have other shapes
        self._learning_scope = comm.own_scope()

    @property
    def plan(self) -> Plan:
        return self._momenta.plan

    @property
    def plans(self) -> list[Plan]:
        """The plans of all phases, that of momenta last."""
        others = [executor.plan for executor in self._others]
        return [*others, *self._learning, self.plan]

    @tf.autograph.experimental.do_not_convert
    def exchange(self, gradients: Mapping[str, tf.Tensor]) -> dict[str, tf.Tensor]:
        """Return the average of each gradient, or of the momentum passed in its place.

        **Ranks:** all. **Cost:** of the plans of the present phase.
        """
        result: dict[str, tf.Tensor] = {}
        for executor in self._others:
            result |= executor.exchange({path: gradients[path] for path in executor.plan.paths})
        sent = {path: gradient for path, gradient in gradients.items() if path not in result}
        if self._phase is None:
            result |= self._momenta.exchange(sent)
            return result
        frozen, (learning,) = self._phase.frozen_at > 0, self._learning
        # Made in each trace, because `load` may replace the momenta's runners, whose state these
        # share
        of_gradients = {
            runner.bucket.name: BucketRunner(learning, index, runner.state, self.comm)
            for index, runner in enumerate(self._momenta.runners)
        }

        def work(
            runner: BucketRunner, tensors: Sequence[tf.Tensor], step: tf.Tensor
        ) -> list[tf.Tensor]:
            def learn() -> list[tf.Tensor]:
                with self.comm.scope(self._learning_scope):
                    return of_gradients[runner.bucket.name].exchange(tensors, step)

            received: list[tf.Tensor] = tf.cond(
                frozen, lambda: runner.exchange(tensors, step), learn
            )
            return received

        result |= self._momenta.exchange(sent, work=work)
        return result

    def follow_rate(self, rate: tf.Tensor) -> None:
        for executor in self._all:
            executor.follow_rate(rate)

    def steps_taken(self) -> int:
        return self._momenta.steps_taken()

    def dense_bytes_between_nodes(self) -> float:
        return sum(executor.dense_bytes_between_nodes() for executor in self._all)

    def export(self, variables: Set[str] | None = None) -> GradientState:
        return sum((executor.export(variables) for executor in self._all), GradientState())

    def load(self, state: GradientState) -> GradientState:
        # Each executor takes the variables of its plan, and returns the others' state
        for executor in self._all:
            state = executor.load(state)
        return state

    def drop_residuals(self) -> None:
        """Set the residuals of momenta to 0, also in traced code."""
        for runner in self._momenta.runners:
            if (residual := runner.state.residual) is not None:
                residual.assign(tf.zeros_like(residual))

    def clear(self, variables: Set[str]) -> None:
        for executor in self._all:
            executor.clear(variables)


def _of_gradients(momenta: Plan, wire: str) -> Plan:
    """Return a plan of the same buckets for gradients in place of momenta."""
    buckets = (
        replace(bucket, wire=wire) if bucket.wire in DENSE_CODES else bucket
        for bucket in momenta.buckets
    )
    return replace(momenta, buckets=tuple(buckets))

"""MomentumExecutor: momenta of some variables travel by one plan, gradients of others by another.

    variables that send no momentum   -> gradients ---------------------------------> result
    others                            -> momenta -----------------------------------> result
    ... with a learning phase         -> cond(frozen?) -> gradients | momenta ------> result

Both phases are in the graph of one step, so nothing is traced again when the phase changes, and a
checkpoint of either phase can be loaded into it. The optimizer decides when that is, on all ranks
at the same step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Set
from typing import NamedTuple

import tensorflow as tf

from tfcommx.collectives.comm import Comm
from tfcommx.core import Plan
from tfcommx.runtime.executor import PlanExecutor
from tfcommx.runtime.gradient_state import GradientState


class LearningPhase(NamedTuple):
    """The steps in which gradients travel in place of momenta."""

    plan: Plan
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
        momenta_have_rate: bool = False,
    ) -> None:
        """Get ready for all plans.

        Args:
            momenta: of the variables that send their momentum.
            others: of those that never do; None: all do.
            learning: of the same variables as `momenta`; None: momenta travel from the first step.
            comm: of this rank.
            momenta_have_rate: momenta contain the learning rate, so their residuals do too.

        **Ranks:** all, outside of traced code, with equal plans. **Raises:** as PlanExecutor.
        """
        self.comm, self._phase = comm, learning
        self._others = [] if others is None else [PlanExecutor(others, comm)]
        self._learning = [] if learning is None else [PlanExecutor(learning.plan, comm)]
        self._momenta = PlanExecutor(momenta, comm)
        self._follow_rate = [*self._others, *self._learning]
        if not momenta_have_rate:
            self._follow_rate.append(self._momenta)

    @property
    def _all(self) -> list[PlanExecutor]:
        return [*self._others, *self._learning, self._momenta]

    @property
    def _active(self) -> list[PlanExecutor]:
        """The executors of the present phase. Outside of traced code."""
        if self._phase is None or int(self._phase.frozen_at.numpy()) > 0:
            return [*self._others, self._momenta]
        return [*self._others, *self._learning]

    @property
    def plan(self) -> Plan:
        """The plan of momenta."""
        return self._momenta.plan

    @property
    def plans(self) -> list[Plan]:
        """The plans of all phases."""
        return [executor.plan for executor in self._all]

    @tf.autograph.experimental.do_not_convert
    def exchange(self, gradients: Mapping[str, tf.Tensor]) -> dict[str, tf.Tensor]:
        """Return the average of each gradient, or of the momentum that is given in its place.

        **Ranks:** all. **Cost:** of the plans of the present phase.
        """
        result: dict[str, tf.Tensor] = {}
        for executor in self._others:
            result |= executor.exchange({path: gradients[path] for path in executor.plan.paths})
        names = [path for path in gradients if path not in result]
        sent = {path: gradients[path] for path in names}
        if self._phase is None:
            result |= self._momenta.exchange(sent)
            return result
        # In the last call of an iterator, which has no data, nothing here may run.
        with tf.control_dependencies([sent[names[-1]]]):
            frozen = self._phase.frozen_at > 0

        def by(executor: PlanExecutor) -> Callable[[], list[tf.Tensor]]:
            def run() -> list[tf.Tensor]:
                received = executor.exchange(sent)
                return [received[path] for path in names]

            return run

        received = tf.cond(frozen, by(self._momenta), by(self._learning[0]))
        return result | dict(zip(names, received, strict=True))

    def follow_rate(self, rate: tf.Tensor) -> None:
        """Record the step's learning rate, a float scalar, before `exchange`."""
        for executor in self._follow_rate:
            executor.follow_rate(rate)

    def dense_bytes_between_nodes(self) -> float:
        """Return the bytes plain Horovod would have sent between nodes for the steps so far."""
        return sum(executor.dense_bytes_between_nodes() for executor in self._all)

    def export(self, variables: Set[str] | None = None) -> GradientState:
        """Return a copy of this rank's state of these variables in the present phase; None: of all.

        The residual of gradients when the phase changed is not in it, and is never sent.
        """
        return sum((one.export(variables) for one in self._active), GradientState())

    def load(self, state: GradientState) -> GradientState:
        """Add a state before the first step; return the part that has no place here.

        **Ranks:** all, outside of traced code.
        """
        rates = GradientState(rates=state.rates)
        active = self._active
        for executor in self._all:
            if executor in active:
                state = executor.load(state)
            else:
                executor.load(rates)
        return state

    def clear(self, variables: Set[str]) -> None:
        """Forget the residuals of these variables. Outside of traced code."""
        for executor in self._all:
            executor.clear(variables)

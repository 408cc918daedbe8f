"""PhasedExecutor: gradients travel by one plan, and from some step on momenta by another.

    variables that send no momentum   -> always   --------------------------------> result
    others                            -> cond(frozen?) -> learning | frozen ------> result

Both phases are in the graph of one step, so nothing is traced again when the phase changes, and a
checkpoint of either phase can be loaded into it. The optimizer decides when that is, on all ranks
at the same step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Set

import tensorflow as tf

from tfcommx.collectives.comm import Comm
from tfcommx.core import Plan
from tfcommx.runtime.executor import PlanExecutor
from tfcommx.runtime.gradient_state import GradientState


class PhasedExecutor:
    """Three plans: of the variables that send no momentum, and of the others in each phase."""

    def __init__(
        self, always: Plan | None, learning: Plan, frozen: Plan, frozen_at: tf.Variable, comm: Comm
    ) -> None:
        """Get ready for all plans.

        Args:
            always: of the variables that send no momentum; None: all do.
            learning, frozen: of the others, before and after the change.
            frozen_at: an integer scalar of the optimizer: > 0 from the change on.
            comm: of this rank.

        **Ranks:** all, outside of traced code, with equal plans. **Raises:** as PlanExecutor.
        """
        self.comm, self._frozen_at = comm, frozen_at
        self._always = [] if always is None else [PlanExecutor(always, comm)]
        self._learning, self._frozen = PlanExecutor(learning, comm), PlanExecutor(frozen, comm)

    @property
    def _all(self) -> list[PlanExecutor]:
        return [*self._always, self._learning, self._frozen]

    @property
    def _active(self) -> list[PlanExecutor]:
        """The executors of the present phase. Outside of traced code."""
        frozen = int(self._frozen_at.numpy()) > 0
        return [*self._always, self._frozen if frozen else self._learning]

    @property
    def plan(self) -> Plan:
        """The plan of momenta."""
        return self._frozen.plan

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
        for executor in self._always:
            result |= executor.exchange({path: gradients[path] for path in executor.plan.paths})
        names = [path for path in gradients if path not in result]
        sent = {path: gradients[path] for path in names}
        # In the last call of an iterator, which has no data, nothing here may run.
        with tf.control_dependencies([sent[names[-1]]]):
            frozen = self._frozen_at > 0

        def by(executor: PlanExecutor) -> Callable[[], list[tf.Tensor]]:
            def run() -> list[tf.Tensor]:
                received = executor.exchange(sent)
                return [received[path] for path in names]

            return run

        received = tf.cond(frozen, by(self._frozen), by(self._learning))
        return result | dict(zip(names, received, strict=True))

    def follow_rate(self, rate: tf.Tensor) -> None:
        """Record the step's learning rate, a float scalar, before `exchange`."""
        for executor in self._all:
            executor.follow_rate(rate)

    def dense_bytes_between_nodes(self) -> float:
        """Return the bytes plain Horovod would have sent between nodes for the steps so far."""
        return sum(executor.dense_bytes_between_nodes() for executor in self._all)

    def export(self, variables: Set[str] | None = None) -> GradientState:
        """Return a copy of this rank's state of these variables in the present phase; None: of all.

        What 16 bits had rounded off when the phase changed is not in it, nor sent any more.
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

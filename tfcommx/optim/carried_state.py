"""CarriedState: residuals, velocities and a strategy's state between two plans.

            first step    change of scheme, of variables, of optimizer    restore
    optimizer   |---------------------------|---------------------------|------>
    plan            |=======================|===========================|=====>
    carried     ----^                   in  ^  out                  in  ^  out

At each `|` residuals and velocities leave the plan that ends (`add`) and enter the one that begins
(`move_into`); between two plans, and for variables that no plan exchanges, they wait here.
"""

from __future__ import annotations

from collections.abc import Callable

from tfcommx.runtime.executor import PlanExecutor
from tfcommx.runtime.rates import UNKNOWN
from tfcommx.runtime.residuals import PlanState, VariableState, sum_states, without
from tfcommx.runtime.trial import TrialExecutor
from tfcommx.strategies import CommonState


class CarriedState:
    """What one rank has not sent yet and no plan at work keeps."""

    def __init__(self) -> None:
        # Velocities are here also while plans have no momentum
        self.state = VariableState()
        # Exponent of the highest learning rate under earlier plans
        self.rate_exponent = UNKNOWN
        # Plans of a checkpoint, until the model asks for an equal one
        self.restored: list[PlanState] = []
        # What the strategy keeps of variables that no run has now
        self.common: CommonState = {}
        # Bytes between nodes that plain Horovod would have sent in the steps of earlier plans
        self.dense_bytes = 0.0

    def add(self, state: VariableState) -> None:
        """Take over what a plan had that is not used any more."""
        self.state = sum_states([self.state, state])

    def add_common(self, state: CommonState, names: set[str]) -> None:
        """Take over what the strategy keeps of these variables."""
        self.common |= {name: kept for name, kept in state.items() if name in names}

    def take_common(self, names: set[str]) -> CommonState:
        """Return what the strategy keeps of these variables, and forget it."""
        return {name: self.common.pop(name) for name in names & self.common.keys()}

    def take_residuals(self, names: set[str]) -> VariableState:
        """Return the residuals of these variables, and forget them."""
        found = VariableState(self.state.of(names).residuals)
        self.state = self.state._replace(residuals=without(self.state.residuals, names))
        return found

    def move_into(
        self, executor: PlanExecutor | TrialExecutor, agree_on_rate: Callable[[], int]
    ) -> None:
        """Give a new plan what waits for its variables.

        Args:
            executor: of the new plan.
            agree_on_rate: returns the highest rate's exponent over all ranks.

        **Ranks:** all, outside of traced code.
        """
        plan = executor.plan
        rate = agree_on_rate()
        for state in [state for state in self.restored if state.plan.paths & plan.paths]:
            self.restored.remove(state)
            # It has another plan if the model or the scheme has changed since
            if not executor.restore(state):
                self.add(state.by_variable())
        executor.continue_rate(rate)
        executor.import_by_variable(self.state)
        self.state = VariableState(
            without(self.state.residuals, plan.paths),
            without(self.state.velocities, plan.paths_with_momentum),
            without(self.state.compressions, plan.paths_with_compression),
        )

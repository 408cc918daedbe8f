"""RequestedPlan: schemes and settings as asked for, turned into plans.

It lives as long as the optimizer; a change of scheme replaces the schemes in it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import keras

from tfcommx.comm.base import Comm
from tfcommx.optim.automatic import executor_for
from tfcommx.optim.exchange_settings import ExchangeSettings, double_momentum_error
from tfcommx.optim.expected_run import ExpectedRun
from tfcommx.optim.variable_names import VariableNames
from tfcommx.planner.automatic import PlanRequest, auto_as_plain, find_auto
from tfcommx.planner.check import check_scheme, require_coverage
from tfcommx.planner.plan import Gradient
from tfcommx.runtime.executor import PlanExecutor
from tfcommx.runtime.trial import TrialExecutor
from tfcommx.strategies import Synchronous
from tfcommx.terms import Plan, PlanError, Scheme


class RequestedPlan:
    """Schemes, or a plan given, and what is known of the run: makes executors."""

    def __init__(
        self,
        comm: Comm,
        schemes: Scheme | Mapping[str, Scheme],
        settings: ExchangeSettings,
        names: VariableNames,
    ) -> None:
        """Check what can be checked before the first step. **Raises:** PlanError."""
        self._comm, self._settings, self._names = comm, settings, names
        self.check(schemes)
        self.schemes, self._given_plan = by_pattern(schemes), settings.plan
        if settings.plan is not None and settings.plan.topology != comm.topology:
            raise PlanError(
                f"The plan is for {settings.plan.topology}. Received a launch of {comm.topology}. "
                "Make it for this cluster."
            )
        # For "auto"; `fit` and recipes fill it in
        self.expected_run = ExpectedRun()
        # As given; or as measured, once "auto" has looked at them again
        self.links = settings.links

    @property
    def is_chosen(self) -> bool:
        """Whether "auto" chooses among plans."""
        synchronous = isinstance(self._settings.strategy, Synchronous)
        return synchronous and self._given_plan is None and find_auto(self.schemes) is not None

    def check(self, schemes: Scheme | Mapping[str, Scheme]) -> None:
        """Refuse schemes that cannot be carried out. **Raises:** PlanError."""
        for pattern, scheme in by_pattern(schemes).items():
            if not isinstance(pattern, str) or not isinstance(scheme, Scheme):
                raise PlanError(
                    "A tfcommx.Scheme is required, or a mapping from patterns of variable paths, "
                    f"such as '*embedding*', to Schemes. Received {scheme!r} for {pattern!r}."
                )
            check_scheme(scheme, self._comm.topology, self._comm.messages.possible)
            if scheme.momentum and self._settings.own_momentum:
                raise PlanError(double_momentum_error(self._settings.own_momentum))
        find_auto(by_pattern(schemes))

    def replace(self, schemes: Scheme | Mapping[str, Scheme]) -> None:
        """Ask for other schemes, that were checked; a plan that was given does not count now."""
        self.schemes, self._given_plan = by_pattern(schemes), None

    def plan_of(self, variables: Sequence[keras.Variable]) -> Plan:
        """Return the plan given, or one made from the schemes, with "auto" as plain Horovod.

        **Raises:** PlanError for a given plan of other variables.
        """
        if self._given_plan:
            require_coverage(self._given_plan, set(self._names.of(variables)))
            return self._given_plan
        to_root = self._settings.strategy.reduces_to_root
        return self._asked(variables).plan(auto_as_plain(self.schemes), to_root)

    def executor_of(self, variables: Sequence[keras.Variable]) -> PlanExecutor | TrialExecutor:
        """Return what exchanges these variables' gradients. **Ranks:** all, untraced."""
        strategy = self._settings.strategy
        if self._given_plan is None:
            asked = self._asked(variables)
            return executor_for(self.schemes, asked, self._comm, strategy, self.expected_run)
        plan = self.plan_of(variables)
        strategy.check(plan)
        return PlanExecutor(plan, self._comm)

    def _asked(self, variables: Sequence[keras.Variable]) -> PlanRequest:
        gradients = [
            Gradient(name, tuple(one.shape), keras.backend.standardize_dtype(one.dtype))
            for name, one in zip(self._names.of(variables), variables, strict=True)
        ]
        settings = self._settings
        measured = self.links, settings.profile
        fragments = settings.strategy.plan_fragments
        return PlanRequest(gradients, self._comm.topology, settings.operation, *measured, fragments)


def by_pattern(schemes: Scheme | Mapping[str, Scheme]) -> dict[str, Scheme]:
    """Return pattern of variable paths -> Scheme; a single Scheme is for all."""
    return dict(schemes) if isinstance(schemes, Mapping) else {"*": schemes}

"""RequestedPlan: the requested schemes and settings, turned into plans.

It lives as long as the optimizer; a change of scheme replaces the schemes in it, and never the
`ExchangeSettings`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import keras

from tfcommx.collectives.comm import Comm
from tfcommx.core import (
    AUTO,
    DENSE_CODES,
    NO_COMPRESSION,
    NOISY,
    OPERATIONS,
    Links,
    Plan,
    PlanError,
    Profile,
    Scheme,
    check_name,
)
from tfcommx.keras_internals.momenta import LearnsThenSendsMomentum, SendsMomentum
from tfcommx.keras_internals.names import VariableNames
from tfcommx.optim.automatic import ExpectedRun, announce, executor_for
from tfcommx.planner.automatic import PlanRequest, auto_as_plain, find_auto
from tfcommx.planner.budget import fewer_bytes
from tfcommx.planner.check import check_scheme, require_coverage
from tfcommx.planner.plan import Gradient
from tfcommx.runtime.executor import PlanExecutor
from tfcommx.runtime.gradient_state import Executor
from tfcommx.runtime.phased import LearningPhase, MomentumExecutor
from tfcommx.strategies.strategy import Strategy
from tfcommx.strategies.synchronous import Synchronous

# Wire of the gradients of variables that send no momentum. `asa` and `torus` add bfloat16 in
# float32, and so keep all rounding errors; `torus` adds float16 in float16 between nodes
WIRE_OF_OTHERS = "bfloat16"


@dataclass(frozen=True)
class ExchangeSettings:
    """The settings of an exchanger that a change of scheme does not change."""

    # "average" or "sum" over the ranks
    operation: str = "average"
    # Determines how the weights are updated
    strategy: Strategy = field(default_factory=Synchronous)
    # Cost of messages, for routes with several forms; None: nominal, or as "auto" measures
    links: Links | None = None
    # Times at which gradients are ready, for mergings that depend on times
    profile: Profile | None = None
    # An existing plan, in place of one that is made from the scheme
    plan: Plan | None = None
    # Steps between two comparisons of the replicas, >= 1; None: never
    check_replicas_every: int | None = 100
    # The wrapped optimizer's own momentum, or its beta_1, >= 0
    own_momentum: float = 0.0
    # Class of a wrapped optimizer that sends momenta in place of gradients; None: it does not
    sender: type[SendsMomentum] | None = None

    def __post_init__(self) -> None:
        check_name("op", self.operation, OPERATIONS)
        if self.sender is not None:
            self._check_sender(self.sender.__name__)
        buckets = () if self.plan is None else self.plan.buckets
        if self.own_momentum and any(bucket.momentum for bucket in buckets):
            raise PlanError(double_momentum_error(self.own_momentum))
        for bucket in buckets:
            self.check_wire(bucket.wire)

    def _check_sender(self, name: str) -> None:
        required = {
            'strategy="synchronous"': isinstance(self.strategy, Synchronous),
            'op="average"': self.operation == "average",
            "plan=None": self.plan is None,
        }
        for argument, is_given in required.items():
            if not is_given:
                raise PlanError(
                    f"{name} moves the momentum that all ranks agree on by the mean over the "
                    f"ranks, and makes several plans. It needs {argument}. Received strategy="
                    f"{self.strategy}, op={self.operation!r} and plan="
                    f"{'None' if self.plan is None else 'a Plan'}. Leave them out, or wrap one of "
                    "keras.optimizers, or cx.optimizers.LARS or LAMB."
                )

    def check_wire(self, wire: str) -> None:
        """Refuse gradients in 1 or 2 bits in front of a momentum. **Raises:** PlanError."""
        exchanges = self.strategy.in_lock_step and not self.strategy.updates_apart
        if wire in NOISY and self.own_momentum and exchanges and self.sender is None:
            raise PlanError(
                "Gradients in 1 or 2 bits diverge in front of a momentum, which amplifies their "
                f"noise. Received wire={wire!r} and an optimizer with momentum or beta_1 = "
                f"{self.own_momentum}. Take OneBitAdam, OneBitLAMB, LowBitSGD or LowBitLARS of "
                "cx.optimizers, which send their momentum; otherwise wire='int4', or an optimizer "
                "without momentum."
            )


def double_momentum_error(own_momentum: float) -> str:
    """Return the error for momentum in a scheme and in the optimizer."""
    return (
        "Momentum must be applied once. Received a scheme with `momentum` and an optimizer with "
        f"its own (momentum or beta_1 = {own_momentum}). Set the optimizer's to 0, or leave "
        "`momentum` out of the scheme."
    )


class RequestedPlan:
    """Make executors from schemes, or a given plan, and facts about the run."""

    def __init__(
        self,
        comm: Comm,
        schemes: Scheme | Mapping[str, Scheme],
        settings: ExchangeSettings,
        names: VariableNames,
    ) -> None:
        """Check the schemes as far as possible before the first step. **Raises:** PlanError."""
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
        # Given links, or the measured ones once "auto" has measured again
        self.links = settings.links
        self._has_advised = False

    @property
    def is_chosen(self) -> bool:
        """True if "auto" chooses among plans."""
        synchronous = isinstance(self._settings.strategy, Synchronous)
        return synchronous and self._given_plan is None and find_auto(self.schemes) is not None

    def check(
        self,
        schemes: Scheme | Mapping[str, Scheme],
        variables: Sequence[keras.Variable] = (),
    ) -> None:
        """Refuse schemes that cannot be carried out, for any variables or for these.

        **Raises:** PlanError; ConfigurationError of a strategy.
        """
        for pattern, scheme in by_pattern(schemes).items():
            if not isinstance(pattern, str) or not isinstance(scheme, Scheme):
                remedy = f" Write tfcommx.Scheme({scheme!r})." * isinstance(scheme, str)
                raise PlanError(
                    "A tfcommx.Scheme is required, or a mapping from patterns of variable paths, "
                    f"such as '*embedding*', to Schemes. Received {scheme!r} for {pattern!r}."
                    f"{remedy}"
                )
            check_scheme(scheme, self._comm.topology, self._comm.messages.possible)
            if scheme.momentum and self._settings.own_momentum:
                raise PlanError(double_momentum_error(self._settings.own_momentum))
            self._settings.check_wire(scheme.wire)
        if self._settings.sender is not None:
            _check_schemes_of_momenta(by_pattern(schemes), self._settings.sender)
        # Only for their errors
        find_auto(by_pattern(schemes))
        if variables and self._settings.sender is None:
            self._settings.strategy.check(self._plan_by(by_pattern(schemes), variables))

    def replace(self, schemes: Scheme | Mapping[str, Scheme]) -> None:
        """Replace the schemes by others, already checked, and discard a given plan."""
        self.schemes, self._given_plan = by_pattern(schemes), None

    def plan_of(self, variables: Sequence[keras.Variable]) -> Plan:
        """Return the plan given, or one made from the schemes, with "auto" as plain Horovod.

        **Raises:** PlanError for a given plan of other variables.
        """
        if self._given_plan:
            gradients = self._request(variables).gradients
            require_coverage(
                self._given_plan, {gradient.path: gradient.entries for gradient in gradients}
            )
            return self._given_plan
        return self._plan_by(self.schemes, variables)

    def _plan_by(self, schemes: Mapping[str, Scheme], variables: Sequence[keras.Variable]) -> Plan:
        to_root = self._settings.strategy.reduces_to_root
        return self._request(variables).plan(auto_as_plain(schemes), to_root)

    def executor_of(
        self, variables: Sequence[keras.Variable], sender: SendsMomentum | None = None
    ) -> Executor:
        """Return the executor of these gradients, or of `sender`'s momenta. **Ranks:** all."""
        strategy = self._settings.strategy
        if sender is not None:
            return self._executor_of_momenta(variables, sender)
        request = self._request(variables)
        executor: Executor
        if self._given_plan is None:
            executor = executor_for(self.schemes, request, self._comm, strategy, self.expected_run)
        else:
            plan = self.plan_of(variables)
            strategy.check(plan)
            executor = PlanExecutor(plan, self._comm)
        may_advise = isinstance(strategy, Synchronous) and not self.is_chosen
        # Once: a low-bit sum in place of a selection that the user named
        if may_advise and not self._has_advised:
            advice = fewer_bytes(executor.plan, request.gradients)
            if advice is not None:
                announce(self._comm, advice)
            self._has_advised = advice is not None
        return executor

    def _executor_of_momenta(
        self, variables: Sequence[keras.Variable], sender: SendsMomentum
    ) -> Executor:
        request = self._request(variables)
        of_others = {
            pattern: replace(scheme, wire=WIRE_OF_OTHERS) if scheme.wire in DENSE_CODES else scheme
            for pattern, scheme in self.schemes.items()
        }
        sends = [sender.sends_momentum(variable) for variable in variables]
        paths = [gradient.path for gradient in request.gradients]
        moving = {path for path, moves in zip(paths, sends, strict=True) if moves}
        fixed = set(paths) - moving
        if not moving:
            return PlanExecutor(request.plan(of_others), self._comm)
        learning = None
        if isinstance(sender, LearnsThenSendsMomentum):
            learning = LearningPhase(sender.learning_wire, sender.frozen_at.value)
        plan = request.plan(self.schemes, only=moving)
        others = request.plan(of_others, only=fixed) if fixed else None
        return MomentumExecutor(plan, others, learning, self._comm, sender.divides_by_rate)

    def _request(self, variables: Sequence[keras.Variable]) -> PlanRequest:
        gradients = [
            Gradient(name, tuple(variable.shape), keras.backend.standardize_dtype(variable.dtype))
            for name, variable in zip(self._names.of(variables), variables, strict=True)
        ]
        settings = self._settings
        return PlanRequest(
            gradients,
            self._comm.topology,
            settings.operation,
            self.links,
            settings.profile,
            settings.strategy.plan_fragments,
            has_momentum=bool(settings.own_momentum),
        )


def by_pattern(schemes: Scheme | Mapping[str, Scheme]) -> dict[str, Scheme]:
    """Return pattern of variable paths -> Scheme; a single Scheme is for all."""
    return dict(schemes) if isinstance(schemes, Mapping) else {"*": schemes}


def _check_schemes_of_momenta(schemes: Mapping[str, Scheme], sender: type[SendsMomentum]) -> None:
    """Refuse schemes by which momenta cannot travel. **Raises:** PlanError."""
    name, wire = sender.__name__, sender.default_wire
    for scheme in schemes.values():
        dense = scheme.selection == "all" and scheme.compression == NO_COMPRESSION
        if scheme.route == AUTO or not dense:
            raise PlanError(
                f"{name} sends every entry of its momentum, by a route that is named. Received "
                f"route={scheme.route!r}, selection={scheme.selection!r} and compression="
                f"{scheme.compression!r}. Take Scheme('asa', wire={wire!r}) or Scheme('torus', "
                f"wire={wire!r})."
            )
    if not any(scheme.wire in DENSE_CODES for scheme in schemes.values()):
        raise PlanError(
            f"{name} needs a scheme that writes {', '.join(DENSE_CODES)}. Received wire="
            f"{', '.join(repr(scheme.wire) for scheme in schemes.values())}. Take Scheme('asa', "
            f"wire={wire!r}), or wrap one of keras.optimizers."
        )

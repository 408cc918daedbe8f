"""The settings of a wrapped optimizer's exchange that do not change during training."""

from __future__ import annotations

from dataclasses import dataclass, field

from tfcommx.strategies import Strategy, Synchronous
from tfcommx.terms import OPERATIONS, Links, Plan, PlanError, Profile, check_name


@dataclass(frozen=True)
class ExchangeSettings:
    """The settings of an exchanger that a change of scheme does not change."""

    # "average" or "sum" over the ranks
    operation: str = "average"
    # Who updates the weights
    strategy: Strategy = field(default_factory=Synchronous)
    # What messages cost, for routes that can go several ways; None: nominal, or as "auto" measures
    links: Links | None = None
    # When gradients are ready, for what goes by time
    profile: Profile | None = None
    # Made before, in place of one that is made from the scheme
    plan: Plan | None = None
    # Steps between two comparisons of the replicas, >= 1; None: never
    check_replicas_every: int | None = 100
    # The wrapped optimizer's own momentum, or its beta_1, >= 0
    own_momentum: float = 0.0

    def __post_init__(self) -> None:
        check_name("op", self.operation, OPERATIONS)
        buckets = () if self.plan is None else self.plan.buckets
        if self.own_momentum and any(bucket.momentum for bucket in buckets):
            raise PlanError(double_momentum_error(self.own_momentum))


def double_momentum_error(own_momentum: float) -> str:
    """Return the error for momentum in a scheme and in the optimizer."""
    return (
        "Momentum must be applied once. Received a scheme with `momentum` and an optimizer with "
        f"its own (momentum or beta_1 = {own_momentum}). Set the optimizer's to 0, or leave "
        "`momentum` out of the scheme."
    )

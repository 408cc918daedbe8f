"""The contract of a strategy, which decides when ranks exchange values and who applies updates.

model.fit -> optimizer.apply -> run.exchange(gradients) -> Keras clips -> run.update(...)
                                [ranks exchange]                          [some or all apply it;
                                                                           weights are shared]
          -> epoch ends      -> run.consolidate()
                                [weights become whole and equal]
"""

from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar, NamedTuple, Protocol, runtime_checkable

import numpy as np
import tensorflow as tf

from tfcommx.core import Plan, PlanError
from tfcommx.routes.messages import MessageOptions
from tfcommx.runtime.gradient_state import Executor

# Variable path -> name -> a run's state of the variable, equal on all ranks
CommonState = dict[str, dict[str, np.ndarray]]


class Update(NamedTuple):
    """The update of one step; the strategy decides if this rank applies it."""

    # Applies `gradients` to the weights
    apply: Callable[[], None]
    # The result of `StrategyRun.exchange`, clipped by Keras
    gradients: Sequence[tf.Tensor]
    # Variable path -> variable, for exactly the variables of the plan
    weights: Mapping[str, tf.Variable]
    # The optimizer's state for each entry of the weights, such as momentum
    state: Sequence[tf.Variable] = ()
    # (number of nodes) -> variable path -> factor for the update that `apply` has made, which
    # lowers its noise to that of gradients averaged over all nodes; empty if no correction applies
    noise_factors: Callable[[int], Mapping[str, tf.Tensor]] = lambda _: {}


class StrategyRun:
    """The run of a strategy on one plan, which may keep state between steps.

    This class is the identity member, synchronous training. Methods that a step traces are graph
    code, which the optimizer's `apply` keeps AutoGraph from converting.
    """

    # Training steps in which all variables are exchanged once
    steps_per_exchange = 1
    # True if the run copies the weights in one step and reads the copies in later ones, so that no
    # other run may change the weights in between
    keeps_copies = False

    def __init__(self, executor: Executor) -> None:
        self.executor = executor

    def exchange(self, gradients: Mapping[str, tf.Tensor]) -> dict[str, tf.Tensor]:
        """Return the gradients that this rank continues with, before Keras clips them.

        Args:
            gradients: variable path -> dense tensor, for exactly the variables of the plan.

        Returns:
            Variable path -> tensor; with a strategy that `shards_weights`, name of a shard ->
            tensor, in the order of the shards.

        **Ranks:** all.
        """
        sums: dict[str, tf.Tensor] = self.executor.exchange(gradients)
        return sums

    def agreed_weights(self, weights: Mapping[str, tf.Variable]) -> Mapping[str, tf.Variable]:
        """Return the weights that all ranks must have in common where `weights_are_equal`.

        Called at the beginning of each step, before `exchange`.

        Args:
            weights: variable path -> variable, as they were when gradients were computed: Keras's
                weight decay moves them between `exchange` and `update`.
        """
        return weights

    def follow_rate(self, rate: tf.Tensor) -> None:
        """Record the step's learning rate: residuals of gradients shrink as it rises."""
        self.executor.follow_rate(rate)

    def update(self, step: Update) -> None:
        """Apply a step's update if it is this rank's task; share the weights when due.

        **Ranks:** all.
        """
        step.apply()

    def weights_are_equal(self) -> tf.Tensor | bool:
        """Return True if all ranks have the same weights before this step; called once a step."""
        return True

    def consolidate(self) -> None:
        """Make the weights whole and equal on all ranks, for an evaluation or a file.

        Does nothing if they are. **Ranks:** all, outside of traced code, between the same steps.
        """

    def settle(self) -> None:
        """Wait for exchanges under way; the weights do not change. Outside of traced code.

        Afterwards this rank's state may be read, or another run may replace this one.
        """

    def dense_bytes_between_nodes(self) -> float:
        """Return the bytes between nodes of plain Horovod for this run's steps, mean over ranks."""
        return self.executor.dense_bytes_between_nodes()

    def common_state(self) -> CommonState:
        """Return the run's state, equal on all ranks, for checkpoints and later plans.

        Outside of traced code, after `consolidate`.
        """
        return {}

    def continue_from(self, state: CommonState) -> None:
        """Load state of these variables from an earlier run or a checkpoint, before the steps."""


@runtime_checkable
class Strategy(Protocol):
    """A user's choice: a frozen dataclass of options, equal (by its repr) on all ranks.

    A strategy inherits from this class and overrides the members that differ.
    """

    # All ranks have the same weights, to the bit, in steps where `weights_are_equal` says so
    keeps_weights_equal: ClassVar[bool] = True
    # Only rank 0 needs the sums of gradients; routes with a reduction reduce to it
    reduces_to_root: ClassVar[bool] = False
    # The optimizer updates this rank's shards of the weights, and keeps state only for them
    shards_weights: ClassVar[bool] = False
    # Ranks apply different gradients, so weights and their moving averages differ for a while
    updates_apart: ClassVar[bool] = False
    # Constraints may change the variables after a step, as Keras's do
    takes_constraints: ClassVar[bool] = True
    # Ranks take every step together; otherwise each trains, and may end, independently
    in_lock_step: ClassVar[bool] = True

    @property
    def plan_fragments(self) -> int:
        """The groups of variables, >= 1, that `planner.plan` must keep in separate buckets."""
        return 1

    def check(self, plan: Plan) -> None:
        """Refuse a plan that the strategy cannot work with. **Raises:** PlanError."""
        for bucket in plan.buckets:
            options = bucket.options
            if isinstance(options, MessageOptions) and options.collective == "reduce":
                raise PlanError(
                    f"With {self} every rank needs the sums of gradients. Received a plan whose "
                    f"{bucket.name} is reduced to rank 0 alone. Make it with reduce_to_root=False, "
                    'or take strategy="root".'
                )
            if self.updates_apart and bucket.clip_norm is not None:
                raise PlanError(
                    "`clip_norm` of a scheme limits gradients, and would cut off a part of the "
                    f"updates that {self} sends in their place. Received {bucket.name} with "
                    f"clip_norm={bucket.clip_norm}. Give the limit to the Keras optimizer "
                    "(global_clipnorm), which clips the gradients of each step."
                )

    def start(self, executor: Executor) -> StrategyRun:
        """Prepare the steps of one plan. **Ranks:** all, outside of traced code."""
        return StrategyRun(executor)

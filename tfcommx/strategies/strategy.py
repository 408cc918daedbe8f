"""What a strategy is: what the ranks exchange, when, and who applies the update.

model.fit -> optimizer.apply -> run.exchange(gradients) -> Keras clips -> run.update(...)
                                [what is exchanged]                       [who applies it;
                                                                           weights are shared]
          -> epoch ends      -> run.consolidate()
                                [weights become whole and equal]
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar, NamedTuple, Protocol, runtime_checkable

import numpy as np
import tensorflow as tf

from tfcommx.collectives.comm import Comm
from tfcommx.core import Plan, PlanError
from tfcommx.routes.messages import MessageOptions
from tfcommx.runtime.gradient_state import Executor

# Variable path -> name -> what a run keeps of the variable, equal on all ranks
CommonState = dict[str, dict[str, np.ndarray]]


class Update(NamedTuple):
    """The update of one step, which a strategy lets this rank apply or not."""

    # Applies `gradients` to the weights
    apply: Callable[[], None]
    # What `StrategyRun.exchange` returned, clipped by Keras
    gradients: Sequence[tf.Tensor]
    # Variable path -> variable, for exactly the variables of the plan
    weights: Mapping[str, tf.Variable]
    # What the optimizer keeps for each entry of the weights, such as momentum
    state: Sequence[tf.Variable] = ()
    # (number of nodes) -> variable path -> factor of the update that `apply` has made, by which it
    # has the noise of gradients averaged over so many nodes; empty where nothing is to be corrected
    noise_factors: Callable[[int], Mapping[str, tf.Tensor]] = lambda _: {}


class StrategyRun:
    """A strategy at work on one plan: it may keep state of its own between steps.

    What this class does is the identity, synchronous training. Methods that a step traces are graph
    code, which AutoGraph must not convert, also in a caller's loop.
    """

    # Training steps in which all variables are exchanged once
    steps_per_exchange = 1

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
        """Apply a step's update if this rank does; share the weights if it is time.

        **Ranks:** all.
        """
        step.apply()

    def weights_are_equal(self) -> tf.Tensor | bool:
        """Tell whether all ranks have the same weights before this step; asked once a step."""
        return True

    def consolidate(self) -> None:
        """Make the weights whole and equal on all ranks, for an evaluation or a file.

        Does nothing if they are. **Ranks:** all, outside of traced code, between the same steps.
        """

    def settle(self) -> None:
        """Wait until nothing is under way; the weights stay as they are. Outside of traced code.

        Afterwards what this rank keeps may be read, or another run may take this one's place.
        """

    def dense_bytes_between_nodes(self) -> float:
        """Return what plain Horovod would have sent between nodes for this run's steps.

        Bytes per rank, as the mean over the ranks.
        """
        return self.executor.dense_bytes_between_nodes()

    def common_state(self) -> CommonState:
        """Return what the run keeps between steps, equal on all ranks, by variable.

        Checkpoints and later plans get it. Outside of traced code, after `consolidate`.
        """
        return {}

    def continue_from(self, state: CommonState) -> None:
        """Take what an earlier run or a checkpoint kept of these variables, before the steps."""


@runtime_checkable
class Strategy(Protocol):
    """What a user asks for: a frozen dataclass of options, equal (by its repr) on all ranks.

    A strategy inherits from this class and says what differs.
    """

    # All ranks have the same weights, to the bit, in steps where the run says so
    keeps_weights_equal: ClassVar[bool] = True
    # Every rank applies the same gradients to the same weights: ranks may share that work
    updates_alike: ClassVar[bool] = False
    # The sums of gradients are needed on rank 0 alone: routes that can, reduce to it
    reduces_to_root: ClassVar[bool] = False
    # The optimizer updates this rank's shards of the weights, and keeps state for no more
    shards_weights: ClassVar[bool] = False
    # Ranks apply gradients of their own, so weights and their moving averages differ for a while
    updates_apart: ClassVar[bool] = False
    # Constraints may change the variables after a step, as Keras's do
    takes_constraints: ClassVar[bool] = True
    # Ranks take every step together; otherwise each trains, and may end, by itself
    in_lock_step: ClassVar[bool] = True

    @property
    def plan_fragments(self) -> int:
        """The number of groups of variables, >= 1, that a plan must keep in buckets of their own.

        `planner.plan` says which they are.
        """
        return 1

    def check(self, plan: Plan) -> None:
        """Refuse a plan that the strategy cannot work with. **Raises:** PlanError."""
        require_sums_on_all_ranks(plan, self)

    def start(self, executor: Executor) -> StrategyRun:
        """Get ready for the steps of one plan. **Ranks:** all, outside of traced code."""
        return StrategyRun(executor)


def agree_on_strategy(strategy: Strategy, comm: Comm) -> None:
    """Refuse, on every rank, strategies that differ between ranks.

    **Ranks:** all. **Cost:** one small exchange on the host, before training.
    **Raises:** PlanError that names both strategies and the rank.
    """
    everyone = comm.gather_objects(repr(strategy))
    for rank, other in enumerate(everyone):
        if other != everyone[0]:
            raise PlanError(
                f"The strategy must be the same on every rank. Rank 0 has {everyone[0]} and rank "
                f"{rank} has {other}. Pass the same `strategy` on every rank."
            )


def require_sums_on_all_ranks(plan: Plan, strategy: Strategy) -> None:
    """Refuse a plan that reduces to the root, for a strategy where every rank needs the sums.

    **Raises:** PlanError.
    """
    for bucket in plan.buckets:
        options = bucket.options
        if isinstance(options, MessageOptions) and options.collective == "reduce":
            raise PlanError(
                f"With {strategy} every rank needs the sums of gradients. Received a plan whose "
                f"{bucket.name} is reduced to rank 0 alone. Make it with reduce_to_root=False, or "
                'take strategy="root".'
            )

"""Exchanger: all that a wrapped optimizer has to do with the other ranks.

                wrap      first step       SwitchScheme      restore
    optimizer   |==================================================>  `settings`, `names`, `guard`,
                |                                                     `requested` (schemes -> plans)
                |                                                     `carried` (between plans)
    a plan                |================|=================|=====>  `runs`: the strategy at work
    a step                | | | | | | | | | | | | | | | | | | | | |   `step`: variables, gradients

What is one strategy's or one plan's own belongs to its run, or to the run's executor.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfcommx.collectives.comm import Comm, WatchedSum
from tfcommx.core import ConfigurationError, Scheme
from tfcommx.kernels.traced import untraced
from tfcommx.optim.carried_state import CarriedState
from tfcommx.optim.keras_internals import StepUnderWay, compiled_by_xla, traced_batch
from tfcommx.optim.requested_plan import ExchangeSettings, RequestedPlan, VariableNames
from tfcommx.optim.sharding import Sharding
from tfcommx.runtime.rates import highest
from tfcommx.runtime.replica_guard import ReplicaGuard
from tfcommx.runtime.residuals import PlanState, VariableState, sum_states
from tfcommx.strategies import CommonState, StrategyRun, Update, agree_on_strategy

log = logging.getLogger("tfcommx")


class Exchanger:
    """The exchange of one optimizer's gradients, for every set of variables that comes."""

    def __init__(
        self, comm: Comm, schemes: Scheme | Mapping[str, Scheme], settings: ExchangeSettings
    ) -> None:
        """Check what can be checked before the first step. **Raises:** ConfigurationError."""
        self.comm, self.settings = comm, settings
        self.names = VariableNames()
        self.requested = RequestedPlan(comm, schemes, settings, self.names)
        # Whether all ranks take every step together
        self.in_lock_step = settings.strategy.in_lock_step
        every = settings.check_replicas_every if self.in_lock_step else None
        self.guard = ReplicaGuard(comm, every, settings.strategy.keeps_weights_equal)
        self.carried = CarriedState()
        # How `copy` and `pickle` make the wrapped optimizer again; the wrap sets it
        self.reduce_for_pickle: Callable[..., tuple[Any, ...]] | None = None
        # The wrapped optimizer; the wrap sets it
        self.optimizer: Callable[[], keras.optimizers.Optimizer | None] = lambda: None
        # How an outer LossScaleOptimizer decides: "none" is there, "local" (alone) or "agreed"
        self.loss_scale = "none"
        self._not_finite = WatchedSum(comm, "finite", "the agreement on finite gradients")
        # The shards of a strategy that has them, from the optimizer's build on
        self.sharding: Sharding | None = None
        # Names of a set of variables -> the strategy at work on their plan
        self.runs: dict[tuple[str, ...], StrategyRun] = {}
        self.step = StepUnderWay()

    @property
    def ranks(self) -> int:
        """The number of ranks."""
        return self.comm.topology.size

    def switch(self, schemes: Scheme | Mapping[str, Scheme]) -> None:
        """Exchange by other schemes from now on; what was not sent yet is sent under the new ones.

        Velocities continue under the new schemes, their sum over the ranks conserved; under schemes
        without momentum they wait until others with momentum follow. Functions that were traced
        before must be traced again (the callback SwitchScheme does it).

        **Ranks:** all, between the same two steps. **Raises:** ConfigurationError for a scheme that
        cannot be carried out.
        """
        self.requested.check(schemes)
        if not self.in_lock_step:
            raise ConfigurationError(
                "A change of scheme needs ranks that exchange gradients. Received one with "
                f"{self.settings.strategy}. Leave SwitchScheme out."
            )
        self.consolidate()
        self.carried.state = self.state_outside_plans()
        for plan in self._running():
            self.carried.add(plan.by_variable())
        self._drop_runs()
        self.requested.replace(schemes)

    def continue_from(
        self,
        state: VariableState,
        restored: list[PlanState],
        rate: int,
        common: CommonState,
    ) -> None:
        """Keep what a checkpoint holds in place of what is kept here; traffic goes on."""
        self._drop_runs()
        self.carried.rate_exponent = rate
        self.carried.state, self.carried.restored = state, restored
        self.carried.common = common

    def traffic(self) -> dict[str, float]:
        """Return the bytes between nodes of this process so far, and of plain Horovod.

        The latter is what it would have sent for the same steps.
        """
        dense = sum(run.dense_bytes_between_nodes() for run in self.runs.values())
        return {
            "bytes_between_nodes": self.comm.traffic().between,
            "bytes_between_nodes_dense": self.carried.dense_bytes + dense,
        }

    # --- Plans, one for each set of variables -----------------------------------------------

    def run_for(self, variables: Sequence[keras.Variable]) -> StrategyRun:
        """Return the strategy at work on the plan of these variables; start it if it is new."""
        names = tuple(self.names.of(variables))
        if names not in self.runs:
            ahead = self.requested.expected_run
            if not ahead.whole_run:
                self.requested.expected_run = ahead._replace(batch=traced_batch() or ahead.batch)
            with untraced():  # Also while a step is traced: planning is done once, for real.
                self._take_from_overlapping(set(names))
                self._take_from_predecessors(variables)
                self.runs[names] = self._start(variables, names)
        return self.runs[names]

    def _start(self, variables: Sequence[keras.Variable], names: tuple[str, ...]) -> StrategyRun:
        """Plan, agree, and take over what waits for these variables. **Ranks:** all."""
        agree_on_strategy(self.settings.strategy, self.comm)
        executor = self.requested.executor_of(variables)
        self.carried.move_into(
            executor, lambda: highest(self.comm.gather_objects(self.highest_rate()))
        )
        run = self.settings.strategy.start(executor)
        run.continue_from(self.carried.take_common(executor.plan.paths))
        if self.sharding is not None:
            self.sharding.attach(run, self.names.of(self.sharding.variables))
        return run

    def _take_from_overlapping(self, names: set[str]) -> None:
        """Take what other plans keep of these variables: another plan exchanges their gradients."""
        for others, run in self.runs.items():
            if names & set(others):
                log.warning(
                    "Gradients of another set of variables are exchanged from now on: %r, for "
                    "example, was added or removed. All ranks must change alike, or they wait for "
                    "each other.",
                    sorted(names ^ set(others))[0],
                )
                run.consolidate()
                self.carried.add_common(run.common_state(), names)
                self.carried.add(run.executor.export_by_variable(names))

    def _take_from_predecessors(self, variables: Sequence[keras.Variable]) -> None:
        """Take residuals over from optimizers that exchanged these variables' gradients before.

        Their velocities stay: a new optimizer begins with none.
        """
        found = [getattr(variable, "tfcommx_exchanger", None) for variable in variables]
        for predecessor in {id(one): one for one in found}.values():
            if predecessor not in (None, self):
                rates = [self.carried.rate_exponent, predecessor.highest_rate()]
                self.carried.rate_exponent = highest(rates)
                handed = predecessor.export_residuals(variables)
                mine = dict(zip(map(id, variables), self.names.of(variables), strict=True))
                named = {mine[key]: part for key, part in handed.items()}
                self.carried.add(VariableState(named))
        for variable in variables:
            variable.tfcommx_exchanger = self

    def export_residuals(self, variables: Sequence[keras.Variable]) -> dict[int, np.ndarray]:
        """Return, by id of the variable, what is not sent yet of these variables; forget it here.

        **Ranks:** all, outside of traced code.
        """
        names = dict(zip(self.names.of(variables), map(id, variables), strict=True))
        for run in self.runs.values():
            run.settle()
        parts = [run.executor.export_by_variable(set(names)) for run in self.runs.values()]
        parts.append(self.carried.take_residuals(set(names)))
        return {names[name]: part for name, part in sum_states(parts).residuals.items()}

    def _drop_runs(self) -> None:
        """Forget all plans: their steps still count, and other trials do not wait for theirs."""
        self.carried.dense_bytes = self.traffic()["bytes_between_nodes_dense"]
        self.carried.rate_exponent = self.highest_rate()
        self.carried.common = self.common_state()
        for run in self.runs.values():
            run.settle()
            self.comm.trials.leave(run.executor)
        self.runs = {}

    def consolidate(self) -> None:
        """Make the weights whole and equal. **Ranks:** all, outside of traced code."""
        for run in self.runs.values():
            run.consolidate()

    def average_apart(self, averages: Sequence[keras.Variable]) -> None:
        """Average moving averages of the weights over the ranks, if each rank has its own.

        The mean of the ranks' moving averages is the moving average of their mean weights: both are
        sums with the same factors.

        **Ranks:** all, outside of traced code. **Cost:** one allreduce of them, in float64: equal
        ones stay equal to the bit; none with a strategy whose ranks update alike.
        """
        if not averages or self.ranks == 1 or not self.settings.strategy.updates_apart:
            return
        parts = [tf.reshape(tf.cast(one, tf.float64), [-1]) for one in averages]
        total = self.comm.allreduce(tf.concat(parts, axis=0), "world", "tfcommx/averages")
        means = tf.split(total / self.ranks, [part.shape[0] for part in parts])
        for one, mean in zip(averages, means, strict=True):
            one.assign(tf.cast(tf.reshape(mean, one.shape), one.dtype))

    def weights_of(self, variables: Sequence[keras.Variable]) -> dict[str, tf.Variable]:
        """Return name -> TensorFlow's variable."""
        values = [one if isinstance(one, tf.Variable) else one.value for one in variables]
        return dict(zip(self.names.of(variables), values, strict=True))

    def plan_states(self) -> list[PlanState]:
        """Return the state of every plan on this rank, also of restored ones."""
        return self._running() + self.carried.restored

    def _running(self) -> list[PlanState]:
        return [state for run in self.runs.values() for state in run.executor.states()]

    def state_by_variable(self) -> VariableState:
        """Return what this rank keeps in all, by variable: residuals and velocities."""
        kept = (plan.by_variable() for plan in self.plan_states())
        return sum_states([self.state_outside_plans(), *kept])

    def common_state(self) -> CommonState:
        """Return what the strategy keeps between steps, equal on all ranks, by variable."""
        found = dict(self.carried.common)
        for run in self.runs.values():
            found |= run.common_state()
        return found

    def state_outside_plans(self) -> VariableState:
        """Return what this rank keeps and no plan does."""
        outside = [run.executor.outside_plans() for run in self.runs.values()]
        return sum_states([self.carried.state, *outside])

    def highest_rate(self) -> int:
        """Return the exponent of the highest learning rate so far, or UNKNOWN."""
        kept = [*(run.executor for run in self.runs.values()), *self.carried.restored, self.carried]
        return highest(one.rate_exponent for one in kept)

    # --- A step ------------------------------------------------------------------------------

    @tf.autograph.experimental.do_not_convert
    def prepare_step(
        self, variables: Sequence[keras.Variable], built: Sequence[keras.Variable] = ()
    ) -> None:
        """Take note of the next gradients' variables, and of all that the optimizer has.

        **Raises:** ConfigurationError for what would fail or hang later: XLA, and a loss scale
        decided by each rank alone.
        """
        self.step.variables = tuple(variables)
        self.names.of([*built, *variables])
        if compiled_by_xla():
            raise ConfigurationError(
                "Horovod's collectives cannot be compiled by XLA. Received jit_compile=True "
                "(Keras's 'auto' turns it on with a GPU). Call model.compile(..., "
                "jit_compile=False), or add the callback BroadcastState."
            )
        if self.loss_scale == "local" and self.ranks > 1:
            raise ConfigurationError(
                "A LossScaleOptimizer outside of the wrapped optimizer decides on each rank alone "
                "whether to take a step. Wrap it: "
                "DistributedOptimizer(LossScaleOptimizer(optimizer)), or add the callback "
                "BroadcastState. (MultiOptimizer, which looks the same from inside, cannot hold "
                "wrapped optimizers.)"
            )

    @tf.autograph.experimental.do_not_convert
    def exchange(
        self, gradients: Sequence[tf.Tensor], learning_rate: tf.Tensor, steps: tf.Tensor
    ) -> list[tf.Tensor]:
        """Return the gradients that the strategy lets the optimizer continue with.

        With a synchronous one: averaged (or summed) over the ranks, bit-identical on all.

        Args:
            gradients: of this rank, in the order of the variables.
            learning_rate: float scalar, of this step.
            steps: integer scalar, that the optimizer has taken.

        **Ranks:** all. **Raises:** ReplicaError if replicas that must be equal differ.
        """
        variables, self.step.exchange_ran = self.step.variables, True
        names = self.names.of(variables)
        run = self.run_for(variables)
        run.follow_rate(learning_rate)  # Waits for no gradient, as residuals do not
        with tf.control_dependencies(list(gradients[-1:])):  # No data: no step
            weights, equal = self.weights_of(variables), run.weights_are_equal()
            self.guard.check(weights, learning_rate, steps, equal)
        gradients = [
            tf.ensure_shape(gradient, variable.shape)
            for gradient, variable in zip(gradients, variables, strict=True)
        ]
        result = run.exchange(dict(zip(names, gradients, strict=True)))
        return list(result.values()) if self.sharding else [result[name] for name in names]

    @tf.autograph.experimental.do_not_convert
    def update(
        self,
        apply: Callable[[], None],
        gradients: Sequence[tf.Tensor],
        state: Sequence[tf.Variable],
    ) -> None:
        """Let the strategy apply the update, or not, and share the weights.

        **Ranks:** all.
        """
        weights = self.weights_of(self.step.variables)
        self.run_for(self.step.variables).update(Update(apply, gradients, weights, state))

    @tf.autograph.experimental.do_not_convert
    def finite_on_all_ranks(self, finite: tf.Tensor) -> tf.Tensor:
        """Tell whether `finite` (bool) holds on every rank, if ranks take their steps together.

        **Ranks:** all. **Cost:** one allreduce of 4 bytes.
        """
        if self.ranks == 1 or not self.in_lock_step:
            return finite
        mine = tf.reshape(tf.cast(tf.logical_not(finite), tf.float32), [1])
        return tf.equal(self._not_finite(mine)[0], 0)

    @tf.autograph.experimental.do_not_convert
    def check_exchange_ran(self, optimizer: str) -> None:
        """Refuse an optimizer whose step has bypassed `exchange`.

        **Raises:** ConfigurationError.
        """
        if not self.step.exchange_ran:
            raise ConfigurationError(
                f"A wrapped optimizer must take its step as Keras's own do. {optimizer!r} has "
                "taken it without an exchange: it hands the gradients on, as "
                "keras.optimizers.MultiOptimizer does, or has a step of its own, or Keras has "
                f"another one in this version, {keras.__version__}. Wrap one of Keras's, or one "
                "for each part of the model in a training step of your own."
            )

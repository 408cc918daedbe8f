"""What a wrapped optimizer knows of the other ranks: schemes, plans, residuals, counters.

Kept out of Keras's variables.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfcommx.comm.base import Comm
from tfcommx.optim.automatic import executor_for
from tfcommx.optim.exchange_settings import ExchangeSettings, momentum_twice
from tfcommx.optim.keras_internals import StepUnderWay, compiled_by_xla, traced_batch
from tfcommx.optim.run_ahead import RunAhead
from tfcommx.optim.sharding import Sharding
from tfcommx.optim.variable_names import VariableNames
from tfcommx.planner.automatic import Asked, auto_of, with_auto_plain
from tfcommx.planner.check import check_scheme, require_coverage
from tfcommx.planner.plan import Gradient
from tfcommx.runtime.executor import PlanExecutor
from tfcommx.runtime.rates import UNKNOWN, highest
from tfcommx.runtime.replica_guard import ReplicaGuard
from tfcommx.runtime.residuals import PlanState, Residuals, sum_residuals, without
from tfcommx.runtime.trial import TrialExecutor
from tfcommx.strategies import StrategyRun, agree_on_strategy, in_lock_step
from tfcommx.terms import Plan, PlanError, Scheme

log = logging.getLogger("tfcommx")


class Exchanger:
    """The exchange of one optimizer's gradients, for every set of variables that comes."""

    def __init__(
        self, comm: Comm, schemes: Scheme | Mapping[str, Scheme], settings: ExchangeSettings
    ) -> None:
        """Check what can be checked before the first step. **Raises:** PlanError."""
        self.comm, self.settings = comm, settings
        self.check(schemes)
        self.schemes, self._given_plan = by_pattern(schemes), settings.plan
        if settings.plan is not None and settings.plan.topology != comm.topology:
            raise PlanError(
                f"The plan is for {settings.plan.topology}. Received a launch of {comm.topology}. "
                "Make it for this cluster."
            )
        # Whether all ranks take every step together
        self.in_lock_step = in_lock_step(settings.strategy)
        every = settings.check_replicas_every if self.in_lock_step else None
        self.guard = ReplicaGuard(comm, every, settings.strategy.keeps_weights_equal)
        self.names = VariableNames()
        # For "auto"; whoever knows the run sets it
        self.ahead = RunAhead()
        # Names of a set of variables -> the strategy at work on their plan
        self.runs: dict[tuple[str, ...], StrategyRun] = {}
        # Of plans that are not used any more, until the next plan takes them over
        self.waiting_residuals: Residuals = {}
        # Likewise; kept while plans have no momentum
        self.waiting_velocities: Residuals = {}
        # Likewise: the exponent of the highest learning rate
        self.rate_exponent = UNKNOWN
        # Plans of a checkpoint, until the model asks for an equal one
        self.restored: list[PlanState] = []
        # How `copy` and `pickle` make the wrapped optimizer again; the wrap sets it
        self.reduce: Callable[[keras.optimizers.Optimizer], tuple[Any, ...]] | None = None
        # How an outer LossScaleOptimizer decides: "none" is there, "local" (alone) or "agreed"
        self.loss_scale = "none"
        # Whether the step that is under way has exchanged its gradients
        self.exchange_ran = False
        self.step = StepUnderWay()
        # Bytes between nodes of plain Horovod, for the steps of plans that are not used any more
        self._dense_bytes = 0.0
        # Whose gradients come next. Kept here: Keras would count a list of variables on the
        # optimizer as part of its state.
        self._variables: list[keras.Variable] = []
        # The shards of a strategy that has them, from the optimizer's build on
        self.sharding: Sharding | None = None
        self._finite_scope = ""
        self._finite_waits = comm.activity.waits(["the agreement on finite gradients"], False)

    @property
    def ranks(self) -> int:
        """The number of ranks."""
        return self.comm.topology.size

    def check(self, schemes: Scheme | Mapping[str, Scheme]) -> None:
        """Refuse schemes that cannot be carried out. **Raises:** PlanError."""
        for pattern, scheme in by_pattern(schemes).items():
            if not isinstance(pattern, str) or not isinstance(scheme, Scheme):
                raise PlanError(
                    "A tfcommx.Scheme is required, or a mapping from patterns of variable paths, "
                    f"such as '*embedding*', to Schemes. Received {scheme!r} for {pattern!r}."
                )
            check_scheme(scheme, self.comm.topology, self.comm.has_messages)
            if scheme.momentum and self.settings.own_momentum:
                raise PlanError(momentum_twice(self.settings.own_momentum))
        auto_of(by_pattern(schemes))

    @tf.autograph.experimental.do_not_convert
    def prepare_step(
        self, variables: Sequence[keras.Variable], built: Sequence[keras.Variable] = ()
    ) -> None:
        """Take note of whose gradients come next, and which variables the optimizer has in all.

        **Raises:** PlanError for what would fail or hang later: XLA, and a loss scale decided by
        each rank alone.
        """
        self._variables = list(variables)
        self.names.of([*built, *variables])
        if compiled_by_xla():
            raise PlanError(
                "Horovod's collectives cannot be compiled by XLA. Received jit_compile=True "
                "(Keras's 'auto' turns it on with a GPU). Call model.compile(..., "
                "jit_compile=False), or add the callback BroadcastState."
            )
        if self.loss_scale == "local" and self.ranks > 1:
            raise PlanError(
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
        """Return the gradients that the optimizer continues with, as the strategy says.

        With a synchronous one: averaged (or summed) over the ranks, bit-identical on all.

        Args:
            gradients: of this rank, in the order of the variables.
            learning_rate: float scalar, of this step.
            steps: integer scalar, that the optimizer has taken.

        **Ranks:** all. **Raises:** ReplicaError if replicas that must be equal differ.
        """
        variables, self.exchange_ran = self._variables, True
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
        """Call `apply` on the ranks that update the weights, and share them, as the strategy says.

        **Ranks:** all.
        """
        weights = self.weights_of(self._variables)
        self.run_for(self._variables).update(apply, gradients, weights, state)

    def settle(self) -> None:
        """Make the weights whole and equal. **Ranks:** all, outside of traced code."""
        for run in self.runs.values():
            run.settle()

    def weights_of(self, variables: Sequence[keras.Variable]) -> dict[str, tf.Variable]:
        """Return name -> TensorFlow's variable."""
        values = [one if isinstance(one, tf.Variable) else one.value for one in variables]
        return dict(zip(self.names.of(variables), values, strict=True))

    @tf.autograph.experimental.do_not_convert
    def check_exchange_ran(self, optimizer: str) -> None:
        """Refuse an optimizer whose step has bypassed `exchange`. **Raises:** PlanError."""
        if not self.exchange_ran:
            raise PlanError(
                f"A wrapped optimizer must take its step as Keras's own do. {optimizer!r} has "
                "taken it without an exchange: it hands the gradients on, as "
                "keras.optimizers.MultiOptimizer does, or has a step of its own, or Keras has "
                f"another one in this version, {keras.__version__}. Wrap one of Keras's, or one "
                "for each part of the model in a training step of your own."
            )

    @tf.autograph.experimental.do_not_convert
    def all_ranks(self, finite: tf.Tensor) -> tf.Tensor:
        """Tell whether `finite` (bool) holds on every rank.

        **Ranks:** all. **Cost:** one allreduce of 4 bytes.
        """
        if self.ranks == 1 or not self.in_lock_step:
            return finite
        bad = tf.reshape(tf.cast(tf.logical_not(finite), tf.float32), [1])
        self._finite_scope = self._finite_scope or self.comm.own_scope()
        number = self._finite_waits.begin([bad])
        with self.comm.scope(self._finite_scope):
            bad = self.comm.allreduce(bad, "world", "finite")
        self._finite_waits.end(0, [bad], number)
        return tf.equal(bad[0], 0)

    def switch(self, schemes: Scheme | Mapping[str, Scheme]) -> None:
        """Exchange by other schemes from now on; what was not sent yet is sent under the new ones.

        Velocities continue under the new schemes, their sum over the ranks conserved; under schemes
        without momentum they wait until others with momentum follow. Functions that were traced
        before must be traced again (the callback SwitchScheme does it).

        **Ranks:** all, between the same two steps. **Raises:** PlanError for a scheme that cannot
        be carried out.
        """
        self.check(schemes)
        if not self.in_lock_step:
            raise PlanError(
                "A change of scheme needs ranks that exchange gradients. Received one with "
                f"{self.settings.strategy}. Leave SwitchScheme out."
            )
        self.settle()
        self.waiting_residuals = self.residuals_outside_plans()
        for state in self._running():
            self._keep_waiting(state.residuals_by_variable(), state.velocities_by_variable())
        self._drop_runs()
        self.schemes, self._given_plan = by_pattern(schemes), None

    def continue_from(
        self, residuals: Residuals, velocities: Residuals, restored: list[PlanState], rate: int
    ) -> None:
        """Keep what a checkpoint holds in place of what is kept here; traffic goes on."""
        self._drop_runs()
        self.rate_exponent = rate
        self.waiting_residuals, self.waiting_velocities = residuals, velocities
        self.restored = restored

    def _drop_runs(self) -> None:
        """Forget all plans: their steps still count, and other trials do not wait for theirs."""
        self._dense_bytes = self.traffic()["bytes_between_nodes_dense"]
        self.rate_exponent = self.highest_rate()
        for run in self.runs.values():
            self.comm.trials.leave(run.executor)
        self.runs = {}

    def all_residuals(self) -> Residuals:
        """Return what this rank has not sent yet, over all plans."""
        kept = (state.residuals_by_variable() for state in self.plan_states())
        return sum_residuals([self.residuals_outside_plans(), *kept])

    def residuals_outside_plans(self) -> Residuals:
        """Return what this rank has not sent yet and no plan keeps."""
        waiting = [run.executor.waiting() for run in self.runs.values()]
        return sum_residuals([self.waiting_residuals, *waiting])

    def all_velocities(self) -> Residuals:
        """Return this rank's part of the velocities, over all plans."""
        kept = [state.velocities_by_variable() for state in self.plan_states()]
        return sum_residuals([self.waiting_velocities, *kept])

    def plan_states(self) -> list[PlanState]:
        """Return the state of every plan on this rank, also of restored ones."""
        return self._running() + self.restored

    def highest_rate(self) -> int:
        """Return the exponent of the highest learning rate so far, or UNKNOWN."""
        kept = [*(run.executor for run in self.runs.values()), *self.restored, self]
        return highest(one.rate_exponent for one in kept)

    def _running(self) -> list[PlanState]:
        return [state for run in self.runs.values() for state in run.executor.states()]

    def traffic(self) -> dict[str, float]:
        """Return the bytes between nodes of this process so far, and of plain Horovod.

        The latter is what it would have sent for the same steps.
        """
        dense = sum(
            run.steps_per_exchange * run.executor.dense_bytes_between_nodes()
            for run in self.runs.values()
        )
        return {
            "bytes_between_nodes": self.comm.traffic().between,
            "bytes_between_nodes_dense": self._dense_bytes + dense,
        }

    def _keep_waiting(self, residuals: Residuals, velocities: Residuals) -> None:
        """Keep what a plan had that is not used any more, until others take it over."""
        self.waiting_residuals = sum_residuals([self.waiting_residuals, residuals])
        self.waiting_velocities = sum_residuals([self.waiting_velocities, velocities])

    def run_for(self, variables: Sequence[keras.Variable]) -> StrategyRun:
        """Return the strategy at work on the plan of these variables; start it if it is new."""
        names = tuple(self.names.of(variables))
        if names not in self.runs:
            if not self.ahead.whole_run:
                self.ahead = self.ahead._replace(batch=traced_batch() or self.ahead.batch)
            with tf.init_scope():  # Also while a step is traced: planning is done once, for real.
                self._take_from_overlapping(set(names))
                self._take_from_predecessors(variables)
                self.runs[names] = self._start(variables, names)
        return self.runs[names]

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
                self._keep_waiting(*run.executor.export_residuals(names))

    def _take_from_predecessors(self, variables: Sequence[keras.Variable]) -> None:
        """Take residuals over from optimizers that exchanged these variables' gradients before.

        Their velocities stay: a new optimizer begins with none.
        """
        found = [getattr(variable, "tfcommx_exchanger", None) for variable in variables]
        for predecessor in {id(one): one for one in found}.values():
            if predecessor not in (None, self):
                self.rate_exponent = highest([self.rate_exponent, predecessor.highest_rate()])
                handed = predecessor.hand_residuals_over(variables)
                mine = dict(zip(map(id, variables), self.names.of(variables), strict=True))
                self._keep_waiting({mine[key]: part for key, part in handed.items()}, {})
        for variable in variables:
            variable.tfcommx_exchanger = self

    def hand_residuals_over(self, variables: Sequence[keras.Variable]) -> dict[int, np.ndarray]:
        """Return, by id of the variable, what is not sent yet of these variables; forget it here.

        **Ranks:** all, outside of traced code.
        """
        names = dict(zip(self.names.of(variables), map(id, variables), strict=True))
        parts = [run.executor.export_residuals(set(names))[0] for run in self.runs.values()]
        parts += [
            {name: self.waiting_residuals[name] for name in names & self.waiting_residuals.keys()}
        ]
        self.waiting_residuals = without(self.waiting_residuals, set(names))
        return {names[name]: part for name, part in sum_residuals(parts).items()}

    def _start(self, variables: Sequence[keras.Variable], names: tuple[str, ...]) -> StrategyRun:
        """Plan, agree, and take over what waits for these variables. **Ranks:** all."""
        agree_on_strategy(self.settings.strategy, self.comm)
        executor = self._make_executor(variables)
        plan, covered = executor.plan, executor.plan.paths
        rate = highest(self.comm.gather_objects(self.highest_rate()))
        for state in [state for state in self.restored if state.variables & covered]:
            self.restored.remove(state)
            if not executor.restore(state):  # The model or the scheme has changed since.
                self._keep_waiting(state.residuals_by_variable(), state.velocities_by_variable())
        executor.continue_rate(rate)
        executor.import_residuals(self.waiting_residuals, self.waiting_velocities)
        self.waiting_residuals = without(self.waiting_residuals, covered)
        self.waiting_velocities = without(self.waiting_velocities, plan.paths_with_momentum)
        run = self.settings.strategy.start(executor)
        if self.sharding is not None:
            self.sharding.attach(run, self.names.of(self.sharding.variables))
        return run

    def plan_of(self, variables: Sequence[keras.Variable]) -> Plan:
        """Return the plan given, or one made from the schemes, with "auto" as plain Horovod.

        **Raises:** PlanError for a given plan of other variables.
        """
        if self._given_plan:
            require_coverage(self._given_plan, set(self.names.of(variables)))
            return self._given_plan
        to_root = self.settings.strategy.reduces_to_root
        return self._asked(variables).plan(with_auto_plain(self.schemes), to_root)

    def _make_executor(self, variables: Sequence[keras.Variable]) -> PlanExecutor | TrialExecutor:
        strategy = self.settings.strategy
        if self._given_plan is None:
            asked = self._asked(variables)
            return executor_for(self.schemes, asked, self.comm, strategy, self.ahead)
        plan = self.plan_of(variables)
        strategy.check(plan)
        return PlanExecutor(plan, self.comm)

    def _asked(self, variables: Sequence[keras.Variable]) -> Asked:
        gradients = [
            Gradient(name, tuple(one.shape), keras.backend.standardize_dtype(one.dtype))
            for name, one in zip(self.names.of(variables), variables, strict=True)
        ]
        settings = self.settings
        measured = settings.links, settings.profile
        return Asked(gradients, self.comm.topology, settings.operation, *measured)


def by_pattern(schemes: Scheme | Mapping[str, Scheme]) -> dict[str, Scheme]:
    """Return pattern of variable paths -> Scheme; a single Scheme is for all."""
    return dict(schemes) if isinstance(schemes, Mapping) else {"*": schemes}

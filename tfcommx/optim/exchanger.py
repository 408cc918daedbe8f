"""Exchanger: the plans of a wrapped optimizer, one for each set of variables, and their state.

                wrap      first step       SwitchScheme      restore
    optimizer   |==================================================>  `settings`, `names`,
                |                                                     `requested` (schemes -> plans)
                |                                                     `waiting` (between plans)
    a plan                |================|=================|=====>  `runs`: the strategy at work
    a step                | | | | | | | | | | | | | | | | | | | | |   `guard`: conditions of a step

The state of one strategy or one plan belongs to its run, or to the run's executor.
"""

import weakref
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import replace
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfcommx.collectives.comm import Comm
from tfcommx.core import NOMINAL, ConfigurationError, Plan, Scheme, log
from tfcommx.keras_internals.momenta import SendsMomentum
from tfcommx.keras_internals.names import ByVariable, VariableNames, path_of
from tfcommx.keras_internals.step import traced_batch
from tfcommx.kernels.traced import untraced
from tfcommx.optim.broadcast import WRAPPED, average_variables
from tfcommx.optim.requested_plan import ExchangeSettings, RequestedPlan
from tfcommx.optim.sharding import Sharding
from tfcommx.optim.step_guard import StepGuard
from tfcommx.runtime.executor import agree_on_settings
from tfcommx.runtime.gradient_state import GradientState, without
from tfcommx.runtime.phased import MomentumExecutor
from tfcommx.strategies.sharded.strategy import Sharded, ShardedRun
from tfcommx.strategies.strategy import CommonState, StrategyRun, Update


class Exchanger:
    """The exchange of one optimizer's gradients, for every set of variables that it receives."""

    def __init__(
        self, comm: Comm, schemes: Scheme | Mapping[str, Scheme], settings: ExchangeSettings
    ) -> None:
        """Check the settings, as far as possible now. **Raises:** ConfigurationError."""
        self.comm, self.settings = comm, settings
        self.names = VariableNames()
        self.requested = RequestedPlan(comm, schemes, settings, self.names)
        self.guard = StepGuard(comm, settings, self.names)
        # State between plans, and of variables that no plan exchanges
        self.waiting, self._common = GradientState(), CommonState()
        # Bytes that plain Horovod would have sent between nodes in the steps of earlier plans
        self._dense_bytes = 0.0
        # Makes the wrapped optimizer again in `copy` and `pickle`; set by the wrap
        self.reduce_for_pickle: Callable[..., tuple[Any, ...]]
        # Ids of the optimizer's variables before it was built ahead of its first step, until that
        self.built_early: frozenset[int] | None = None
        # The wrapped optimizer
        self.optimizer: Callable[[], keras.optimizers.Optimizer | None] = lambda: None
        # The shards of a strategy that has them, from the optimizer's build on
        self.sharding: Sharding | None = None
        # Names of a set of variables -> the strategy at work on their plan
        self.runs: dict[tuple[str, ...], StrategyRun] = {}
        # Variable -> the set in which it was exchanged last, whose run has its state
        self._set_of: dict[str, tuple[str, ...]] = {}
        # Names of a set -> bool scalar, True if the state of some of them went to another set
        self._replaced: dict[tuple[str, ...], tf.Variable] = {}
        # Names of a set -> steps of its run when another run took state of some of them
        self._steps_at_leave: dict[tuple[str, ...], int] = {}

    def serve(self, optimizer: keras.optimizers.Optimizer) -> None:
        """Record the wrapped optimizer, of which this is the exchanger.

        When it is freed, its variables are released. They could not be freed otherwise, because
        residuals wait here for the next optimizer of these variables.
        """

        def release(_: object) -> None:
            self.sharding = None

        self.optimizer = weakref.ref(optimizer, release)
        WRAPPED.add(optimizer)
        if self.settings.strategy.in_lock_step:
            self.comm.make_join_a_barrier()

    def make_sharding(
        self, variables: Sequence[keras.Variable], decays: Sequence[bool], whole: bool
    ) -> Sharding:
        """Make this rank's shards of the variables, by the plan, the strategy and the links.

        Args:
            variables, decays: in forward order, and whether weight decay applies to each.
            whole: whether the optimizer needs whole variables.

        Local: the ranks compare their settings at the first step.
        **Raises:** PlanError for variables that cannot be sharded.
        """
        strategy, links = self.settings.strategy, self.settings.links or NOMINAL
        assert isinstance(strategy, Sharded), "no other strategy shards weights"
        plan = self.requested.plan_of(variables)
        weights = self.names.weights_of(variables)
        known_as = [path_of(variable) for variable in variables] if whole else None
        shards = strategy.make_shards(plan, weights, decays, self.comm.rank, links, known_as)
        self.sharding = Sharding(variables, shards, self.comm, strategy.group)
        # A pull at the next step's beginning knows no constraints, and has nothing to overlap if
        # all weights are pulled at once.
        unconstrained = all(variable.constraint is None for variable in variables)
        self.sharding.can_pull_first = unconstrained and strategy.pull != "at_once"
        return self.sharding

    def pull_shards(self) -> None:
        """Set the weights to the shards of all ranks. **Ranks:** all, outside of traced code."""
        assert self.sharding is not None, "the optimizer is built"
        run = self.run_for(self.sharding.variables)
        assert isinstance(run, ShardedRun), "only Sharded makes shards"
        run.pull("shards")

    @property
    def ranks(self) -> int:
        return self.comm.topology.size

    @property
    def rank(self) -> int:
        return self.comm.rank

    def switch(self, schemes: Scheme | Mapping[str, Scheme]) -> None:
        """Exchange by other schemes from now on; residuals are sent under the new ones.

        Velocities continue under the new schemes, their sum over the ranks conserved; under schemes
        without momentum they wait until others with momentum follow. Functions that were traced
        before must be traced again (the callback SwitchScheme does it).

        **Ranks:** all, between the same two steps. **Raises:** ConfigurationError for a scheme that
        cannot be carried out.
        """
        self.requested.check(schemes)
        if not self.settings.strategy.in_lock_step:
            raise ConfigurationError(
                "A change of scheme needs ranks that exchange gradients. Received one with "
                f"{self.settings.strategy}. Leave SwitchScheme out."
            )
        self.consolidate()
        # Ends all runs; the next step plans by the new schemes, and takes their state over
        self.load(self.export(), self.common_state())
        self.requested.replace(schemes)

    def export(self, names: Set[str] | None = None) -> GradientState:
        """Return a copy of this rank's state of these variables; None: of all. Untraced."""
        parts = (run.executor.export(names) for run in self.runs.values())
        return sum(parts, self.waiting if names is None else self.waiting.of(names))

    def load(self, state: GradientState, common: CommonState) -> None:
        """Continue from a state, and that of the strategy, in place of this one; plan anew."""
        # Past steps still count as traffic
        self._dense_bytes = self.traffic()["bytes_between_nodes_dense"]
        for run in self.runs.values():
            run.settle()
            # Other optimizers' trials would wait forever for one that takes no more steps
            self.comm.trials.leave(run.executor)
        self.runs, self._set_of, self._replaced, self._steps_at_leave = {}, {}, {}, {}
        self.waiting, self._common = state, common

    def plans(self) -> list[Plan]:
        """Return the plans by which gradients are exchanged; all that a trial compares."""
        return [plan for run in self.runs.values() for plan in run.executor.plans]

    def traffic(self) -> dict[str, float]:
        """Return this process's bytes between nodes, and those of plain Horovod for its steps."""
        dense = sum(run.dense_bytes_between_nodes() for run in self.runs.values())
        return {
            "bytes_between_nodes": self.comm.traffic().between,
            "bytes_between_nodes_dense": self._dense_bytes + dense,
        }

    # --- Plans, one for each set of variables -----------------------------------------------

    def run_for(self, variables: Sequence[keras.Variable]) -> StrategyRun:
        """Return the strategy at work on the plan of these variables; start it if it is new."""
        names = tuple(self.names.of(variables))
        if names not in self.runs:  # A caller may pass the same variables in another order
            names = next((known for known in self.runs if {*known} == {*names}), names)
        overlapping = {self._set_of[name] for name in names if name in self._set_of} - {names}
        is_new = names not in self.runs
        expected = self.requested.expected_run
        # The length of the traced step's input, if it is known, counts more than an earlier number
        if is_new and not expected.whole_run:
            self.requested.expected_run = expected._replace(batch=traced_batch() or expected.batch)
        taken_over = any(last_exchanger(variable) is not self for variable in variables)
        if not is_new and (overlapping or taken_over) and self._takes_turns(names):
            return self.runs[names]
        if is_new or overlapping or taken_over:
            # Variables and collectives of a plan outlive the graph of the step that needs it first;
            # and tf.function traces again if its first trace has made a variable
            with untraced():
                self._take_from_overlapping(overlapping, set(names))
                self._take_from_predecessors(variables)
                if is_new:
                    self.runs[names] = self._start(variables, names)
                    with tf.device("/cpu:0"):
                        self._replaced[names] = tf.Variable(False, trainable=False)
                else:
                    # The state that other sets of variables, or other optimizers, have just handed
                    # over
                    self.waiting = self.runs[names].executor.load(self.waiting)
                    self._replaced[names].assign(False)
                    self._steps_at_leave.pop(names, None)
        self._set_of |= dict.fromkeys(names, names)
        return self.runs[names]

    def _takes_turns(self, names: tuple[str, ...]) -> bool:
        """Return True for a step that is traced again and whose graph is used beside another's.

        It keeps its own residuals, because one rank alone may trace it again, as for a shorter last
        batch, and would wait for the others in the collectives that move residuals.
        """
        if tf.executing_eagerly() or names not in self._steps_at_leave:
            return False
        with untraced():
            return self.runs[names].executor.steps_taken() > self._steps_at_leave[names]

    def _leave(self, paths: tuple[str, ...]) -> None:
        """Record that another run takes state of these variables."""
        self._steps_at_leave[paths] = self.runs[paths].executor.steps_taken()

    def _start(self, variables: Sequence[keras.Variable], names: tuple[str, ...]) -> StrategyRun:
        """Plan, agree, and load the state of these variables. **Ranks:** all."""
        strategy, requested = self.settings.strategy, self.requested
        agree_on_settings(
            self.comm,
            strategy=strategy,
            scheme=requested.schemes,
            links=requested.links,
            profile=self.settings.profile,
        )
        for variable in variables:
            constraint = getattr(variable, "constraint", None)
            if constraint is not None and not strategy.takes_constraints:
                raise ConfigurationError(
                    f"With {strategy} weights must have no constraint, which would change a node's "
                    f"weights and not those that all ranks agree on. Received {constraint!r} of "
                    f'{path_of(variable)!r}. Leave it out, or take strategy="synchronous".'
                )
        optimizer = self.optimizer()
        sender = optimizer if isinstance(optimizer, SendsMomentum) else None
        executor = requested.executor_of(variables, sender)
        self.waiting = executor.load(self.waiting)
        run = strategy.start(executor)
        run.continue_from({name: self._common.pop(name) for name in {*names} & self._common.keys()})
        if self.sharding is not None:
            self.sharding.attach(run, self.names.of(self.sharding.variables))
        return run

    def _take_from_overlapping(self, overlapping: Set[tuple[str, ...]], names: set[str]) -> None:
        """Take the state that the plans of other sets have of these variables."""
        # Sorted, because each of them has collectives, and the order of a set differs between
        # processes
        for paths in sorted(overlapping):
            run = self.runs[paths]
            log.warning(
                "Gradients of another set of variables are exchanged from now on: %r, for "
                "example, was added or removed. All ranks must change alike, or they wait for "
                "each other.",
                sorted(names ^ set(paths))[0],
            )
            # Otherwise weights that differ between the ranks would count as equal in the next run,
            # and the replica guard would end it
            run.consolidate()
            self._replaced[paths].assign(True)
            self._leave(paths)
            common = run.common_state()
            self._common |= {name: common[name] for name in common.keys() & names}
            self.waiting += run.executor.export(names)
            run.executor.clear(names)

    def _take_from_predecessors(self, variables: Sequence[keras.Variable]) -> None:
        """Take residuals over from optimizers that exchanged these variables' gradients before."""
        predecessors = {id(exchanger): exchanger for exchanger in map(last_exchanger, variables)}
        for predecessor in predecessors.values():
            if predecessor not in (None, self):
                state = predecessor.hand_over(variables, self.names)
                self.waiting += self.accept(state, predecessor.residuals_of)
        self.take_over(variables)

    def take_over(self, variables: Sequence[keras.Variable]) -> None:
        """Record that this exchanger, and no earlier one, has these variables' residuals."""
        for variable in variables:
            _LAST[variable] = self

    @property
    def residuals_of(self) -> str:
        """The unit of residuals: "updates" if the strategy's ranks update apart, or "gradients"."""
        return "updates" if self.settings.strategy.updates_apart else "gradients"

    def accept(self, state: GradientState, residuals_of: str) -> GradientState:
        """Return a state of another optimizer or a file, without residuals of another unit."""
        if residuals_of == self.residuals_of or not state.residuals:
            return state
        # They cannot be converted, because the optimizer that would turn gradients into updates is
        # gone, or has other moments by now
        log.warning(
            "Residuals are dropped, because they are sums of %s, and %s sends %s. To send them "
            "first, take a step with a dense scheme (SwitchScheme) before the strategy changes.",
            residuals_of,
            self.settings.strategy,
            self.residuals_of,
        )
        return replace(state, residuals={})

    def hand_over(self, variables: Sequence[keras.Variable], names: VariableNames) -> GradientState:
        """Return these variables' residuals under the names of another optimizer; forget them here.

        **Ranks:** all, outside of traced code.
        """
        # Velocities are not handed over, because a new optimizer begins with none
        renamed = dict(zip(self.names.of(variables), names.of(variables), strict=True))
        for run in self.runs.values():
            # A round under way changes the residuals, which are read next
            run.settle()
        state = self.export(renamed.keys())
        for paths, run in self.runs.items():
            run.executor.clear(renamed.keys())
            if renamed.keys() & set(paths):
                self._leave(paths)
        residuals = without(self.waiting.residuals, renamed.keys())
        self.waiting = replace(self.waiting, residuals=residuals)
        return GradientState(
            {renamed[name]: part for name, part in state.residuals.items()},
            rates={renamed[name]: rate for name, rate in state.rates.items()},
        )

    def drop_residuals(self) -> None:
        """Forget the unsent parts of all steps so far, and velocities. Outside of traced code.

        **Ranks:** local, between two steps.
        """
        for paths, run in self.runs.items():
            run.executor.clear(set(paths))
        self.waiting = replace(self.waiting, residuals={}, velocities={})

    def drop_residuals_of_momenta(self) -> None:
        """Set the residuals of momenta to 0, in traced code of a step. **Ranks:** all."""
        executor = self.run_for(self.guard.step.variables).executor
        # Otherwise no momentum is sent, because these variables are small or excluded
        if isinstance(executor, MomentumExecutor):
            executor.drop_residuals()

    def consolidate(self, averages: Sequence[keras.Variable] = ()) -> None:
        """Make the weights whole and equal, and moving averages of them that each rank has alone.

        **Ranks:** all, outside of traced code. **Cost:** the strategy's; if ranks update apart, an
        allreduce of the averages in float64.
        """
        for run in self.runs.values():
            run.consolidate()
        if not averages or self.ranks == 1 or not self.settings.strategy.updates_apart:
            return
        # The mean of the ranks' moving averages is the moving average of their mean weights: both
        # are sums with the same factors
        average_variables(averages, self.comm, "tfcommx/averages")

    def common_state(self) -> CommonState:
        """Return the strategy's state between steps, equal on all ranks, by variable."""
        state = dict(self._common)
        for run in self.runs.values():
            state |= run.common_state()
        return state

    # --- A step ------------------------------------------------------------------------------

    @tf.autograph.experimental.do_not_convert
    def exchange(
        self, gradients: Sequence[tf.Tensor], learning_rate: tf.Tensor, steps: tf.Tensor
    ) -> list[tf.Tensor]:
        """Return the gradients that the strategy passes on to the optimizer.

        With a synchronous one: averaged (or summed) over the ranks, bit-identical on all.

        Args:
            gradients: of this rank, in the order of the variables.
            learning_rate: float scalar, of this step.
            steps: integer scalar, that the optimizer has taken.

        **Ranks:** all. **Raises:** ReplicaError if replicas that must be equal differ.
        """
        step = self.guard.step
        variables, step.exchange_ran = step.variables, True
        names = self.names.of(variables)
        run = self.run_for(variables)
        if run.keeps_copies and not tf.executing_eagerly():
            gradients = self._refuse_turns(gradients, names)
        run.follow_rate(learning_rate)  # Without waiting for gradients, as residuals
        with tf.control_dependencies(list(gradients[-1:])):  # No step in a call without data
            weights = run.agreed_weights(self.names.weights_of(variables))
            equal = run.weights_are_equal()
            self.guard.replicas.check(weights, learning_rate, steps, equal)
        gradients = [
            _shaped(_not_whole(gradient, variable), variable)
            for gradient, variable in zip(gradients, variables, strict=True)
        ]
        result = run.exchange(dict(zip(names, gradients, strict=True)))
        # Those of shards are in the order of the shards, which the optimizer was built for
        return list(result.values()) if self.sharding else [result[name] for name in names]

    def _refuse_turns(
        self, gradients: Sequence[tf.Tensor], names: Sequence[str]
    ) -> list[tf.Tensor]:
        """Return the gradients; raise in the graph if a run of other variables replaced this one.

        A graph does not call `run_for`, which hands weights and residuals over from run to run.
        """
        replaced = self._replaced[self._set_of[names[0]]]

        message = (
            f"With {self.settings.strategy} one set of variables is trained at a time, "
            "because it keeps copies of the weights. Received another step of "
            f"{names[0]!r} and {len(names) - 1} more in a function that was traced before one "
            "that shares some of them. Take one function for all variables, with zeros for "
            "absent gradients, apply the gradients outside of tf.function, or take "
            'strategy="synchronous".'
        )

        def fail() -> np.ndarray:  # Without `self`, because TensorFlow never frees the function
            raise ConfigurationError(message)

        with tf.device("/cpu:0"):  # Not after the gradients, because none may wait for the last
            check = tf.cond(
                replaced.read_value(),
                lambda: tf.numpy_function(fail, [], tf.bool),
                lambda: tf.constant(True),
            )
        with tf.control_dependencies([check]):
            return [tf.identity(gradient) for gradient in gradients]

    @tf.autograph.experimental.do_not_convert
    def update(
        self,
        apply: Callable[[], None],
        gradients: Sequence[tf.Tensor],
        state: Sequence[tf.Variable],
        noise_factors: Callable[[int], Sequence[tf.Tensor]],
    ) -> None:
        """Let the strategy apply the update, or not, and share the weights. **Ranks:** all."""
        variables = self.guard.step.variables
        weights = self.names.weights_of(variables)

        def factors(nodes: int) -> dict[str, tf.Tensor]:
            # There are no factors if no correction applies
            return dict(zip(weights, noise_factors(nodes), strict=False))

        self.run_for(variables).update(Update(apply, gradients, weights, state, factors))


def _not_whole(gradient: tf.Tensor, variable: keras.Variable) -> tf.Tensor:
    """Return a gradient; one of whole numbers in the dtype of its variable, as Keras's updates do.

    Otherwise the average over the ranks would be rounded to whole numbers.
    """
    if gradient.dtype.is_floating or gradient.dtype.is_complex:
        return gradient
    return tf.cast(gradient, keras.backend.standardize_dtype(variable.dtype))


def _shaped(gradient: tf.Tensor, variable: keras.Variable) -> tf.Tensor:
    """Return a gradient with the static shape by which buckets are planned."""
    # Some have none, as of custom functions; an op for each of the others would take long to trace
    is_shaped = isinstance(gradient, tf.Tensor) and gradient.shape == tuple(variable.shape)
    return gradient if is_shaped else tf.ensure_shape(gradient, variable.shape)


# The exchanger that exchanged a variable's gradients last: another optimizer takes its residuals
# over. Exchangers don't refer to Keras's variables between steps.
_LAST: ByVariable[Exchanger] = ByVariable()


def last_exchanger(variable: keras.Variable) -> Exchanger | None:
    """Return the exchanger that exchanged a variable's gradients last; None: there was none."""
    return _LAST.get(variable)

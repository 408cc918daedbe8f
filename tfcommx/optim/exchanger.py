"""What a wrapped optimizer knows of the other ranks: schemes, plans, residuals, counters. Kept out
of Keras's variables.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf
from tensorflow.python.ops.control_flow_util import GraphOrParentsInXlaContext

from tfcommx.comm.base import Comm
from tfcommx.planner.check import check_scheme
from tfcommx.planner.plan import Gradient, make_plan
from tfcommx.runtime.executor import PlanExecutor
from tfcommx.runtime.residuals import Residuals, residuals_by_variable
from tfcommx.terms import Piece, Plan, PlanError, Scheme

log = logging.getLogger("tfcommx")


class PlanState(NamedTuple):
    """The state of one plan on one rank, as a checkpoint keeps it."""

    plan: Plan
    steps: int
    rank: int
    # Bucket name -> float32 [the rank's shard]
    residuals: dict[str, np.ndarray]
    # Likewise, of buckets with momentum
    velocities: dict[str, np.ndarray]

    @property
    def variables(self) -> set[str]:
        return {Piece.of(name).path for bucket in self.plan.buckets for name in bucket.variables}


class Exchanger:
    """The exchange of one optimizer's gradients, for every set of variables that it is
    called with.
    """

    def __init__(
        self,
        comm: Comm,
        schemes: Scheme | Mapping[str, Scheme],
        operation: str,
        plan: Plan | None = None,
        own_momentum: float = 0.0,
        **options: Any,
    ) -> None:
        """`own_momentum` is the wrapped optimizer's; `options` are more arguments of
        `make_plan`.
        """
        self.comm, self.own_momentum = comm, own_momentum
        self.check(schemes)
        if own_momentum and plan is not None and any(bucket.momentum for bucket in plan.buckets):
            raise PlanError(_twice(own_momentum))
        if plan is not None and plan.topology != comm.topology:
            raise PlanError(
                f"The plan is for {plan.topology}. Received a launch of {comm.topology}. Make it "
                "for this cluster."
            )
        self.schemes, self.operation, self.given, self.options = (
            by_pattern(schemes),
            operation,
            plan,
            options,
        )
        # refuse bad ones now
        Plan(
            (),
            comm.topology,
            operation,
            options.get("update", "all"),
            options.get("broadcast_every", 0),
        )
        self.exchanges: dict[tuple[str, ...], PlanExecutor] = {}
        self.owed: Residuals = {}  # of plans that were left, until the next plan takes it over
        self.velocity: Residuals = {}  # likewise; kept while plans have no momentum
        self.left: list[PlanState] = []  # restored plans, until the model asks for an equal one
        # of an outer LossScaleOptimizer: none, local (its own decision) or agreed
        self.loss_scale = "none"
        self._dense_bytes = 0.0  # of plans that were left
        self._variables: list[keras.Variable] = []
        # by id, which is its own as long as the variable is held here
        self._names: dict[int, tuple[str, keras.Variable]] = {}
        self.exchange_ran = False  # by the step that is under way
        self._finite_scope = ""

    def names_of(self, variables: Sequence[keras.Variable]) -> list[str]:
        """Return what plans, residuals and checkpoints call the variables: their paths, made unique
        in the order of the first call.

        Parts of a model may have layers of the same name, as two networks of keras.applications
        have.
        """
        taken = {name for name, _ in self._names.values()}
        for variable in variables:
            if id(variable) not in self._names:
                name, number = variable.path, 1
                while name in taken:
                    number += 1
                    name = f"{variable.path}#{number}"
                taken.add(name)
                self._names[id(variable)] = name, variable
        return [self._names[id(variable)][0] for variable in variables]

    def rename_variables(self, variables: Sequence[keras.Variable], names: Sequence[str]) -> None:
        """Give the variables these names, which are unique."""
        self._names.update(
            {
                id(variable): (name, variable)
                for variable, name in zip(variables, names, strict=True)
            }
        )

    @tf.autograph.experimental.do_not_convert
    def check_exchange_ran(self, optimizer: str) -> None:
        """Refuse an optimizer whose step has gone past `exchange`."""
        if not self.exchange_ran:
            raise PlanError(
                f"A wrapped optimizer must take its step as Keras's own do. {optimizer!r} has "
                "taken it without an exchange: "
                "it hands the gradients on, as keras.optimizers.MultiOptimizer does, or has a "
                "step of its own, or Keras has "
                f"another one in this version, {keras.__version__}. Wrap one of Keras's, or one "
                "for each part of the model in "
                "a training step of your own."
            )

    @tf.autograph.experimental.do_not_convert
    def prepare_step(
        self, variables: Sequence[keras.Variable], built: Sequence[keras.Variable] = ()
    ) -> None:
        """Say whose gradients come next, and which variables the optimizer has in all.

        Refuses what would fail or hang later: XLA, and a loss scale decided by each rank alone. The
        variables are kept here: Keras would count a list of variables on the optimizer as part of
        its state.
        """
        self._variables = list(variables)
        odd = [variable for variable in self._variables if not isinstance(variable, keras.Variable)]
        if odd:
            raise PlanError(
                "keras.Variable is required, as layers have them. Received a "
                f"{type(odd[0]).__name__} ({odd[0].name!r})."
            )
        self.names_of([*built, *variables])
        if not tf.executing_eagerly() and GraphOrParentsInXlaContext(
            tf.compat.v1.get_default_graph()
        ):
            raise PlanError(
                "Horovod's collectives cannot be compiled by XLA. Received jit_compile=True "
                "(Keras's 'auto' turns it on "
                "with a GPU). Call model.compile(..., jit_compile=False), or add the callback "
                "BroadcastState."
            )
        if self.loss_scale == "local" and self.comm.topology.size > 1:
            raise PlanError(
                "A LossScaleOptimizer outside of the wrapped optimizer decides on each rank "
                "alone whether to take a step. "
                "Wrap it: DistributedOptimizer(LossScaleOptimizer(optimizer)), or add the "
                "callback BroadcastState. "
                "(MultiOptimizer, which looks the same from inside, cannot hold wrapped "
                "optimizers.)"
            )

    @tf.autograph.experimental.do_not_convert
    def exchange(self, grads: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Return the gradients averaged (or summed) over the ranks, bit-identical on all.
        **Ranks:** all.
        """
        variables, self.exchange_ran = self._variables, True
        paths = self.names_of(variables)
        grads = [
            tf.ensure_shape(grad, variable.shape)
            for grad, variable in zip(grads, variables, strict=True)
        ]
        result = self._exchange_for(variables)(dict(zip(paths, grads, strict=True)))
        return [result[path] for path in paths]

    @tf.autograph.experimental.do_not_convert
    def update(self, apply: Callable[[], None], grads: Sequence[tf.Tensor]) -> None:
        """Call `apply` where the gradients that `exchange` returned are applied; share the weights
        as the plan says.

        **Ranks:** all.
        """
        exchange = self._exchange_for(self._variables)
        if exchange.updates_here:
            apply()
            done = []
        else:
            done = [exchange.force_execution(grads)]
        with tf.control_dependencies(done):
            exchange.share(
                {
                    name: variable.value
                    for name, variable in zip(
                        self.names_of(self._variables), self._variables, strict=True
                    )
                }
            )

    @tf.autograph.experimental.do_not_convert
    def all_ranks(self, finite: tf.Tensor) -> tf.Tensor:
        """Tell whether `finite` (bool) holds on every rank. **Ranks:** all. **Cost:** one allreduce
        of 4 bytes.
        """
        if self.comm.topology.size == 1:
            return finite
        bad = tf.reshape(tf.cast(tf.logical_not(finite), tf.float32), [1])
        self._finite_scope = self._finite_scope or self.comm.own_scope()
        with self.comm.scope(self._finite_scope):
            return tf.equal(self.comm.allreduce(bad, "world", "finite")[0], 0)

    def switch(self, schemes: Scheme | Mapping[str, Scheme]) -> None:
        """Exchange by other schemes from now on; what was not sent yet is sent under the new ones.

        Velocities go on under the new schemes, their sum over the ranks conserved; under schemes
        without momentum they rest until others with momentum follow. Functions that were traced
        before must be traced again (the callback SwitchScheme does it).
        **Ranks:** all, between the same two steps. **Raises:** PlanError for a scheme that cannot
        be carried out.
        """
        self.check(schemes)
        for left in self._running():
            self._unpack(left)
        self._dense_bytes += sum(
            exchange.dense_bytes_between_nodes() for exchange in self.exchanges.values()
        )
        self.schemes, self.given, self.exchanges = by_pattern(schemes), None, {}

    def _unpack(self, left: PlanState) -> None:
        """Keep the state of a plan that is not used any more until others take it over."""
        self.owed = sum_residuals(
            [self.owed, residuals_by_variable(left.plan, left.residuals, left.rank)]
        )
        self.velocity = sum_residuals(
            [self.velocity, residuals_by_variable(left.plan, left.velocities, left.rank)]
        )

    def all_residuals(self) -> Residuals:
        """Return what this rank has not sent yet, over all plans."""
        return sum_residuals(
            [
                self.owed,
                *(
                    residuals_by_variable(left.plan, left.residuals, left.rank)
                    for left in self.plan_states()
                ),
            ]
        )

    def all_velocity(self) -> Residuals:
        """Return this rank's part of the velocities, over all plans."""
        return sum_residuals(
            [
                self.velocity,
                *(
                    residuals_by_variable(left.plan, left.velocities, left.rank)
                    for left in self.plan_states()
                ),
            ]
        )

    def plan_states(self) -> list[PlanState]:
        """Return the state of every plan on this rank."""
        return self._running() + self.left

    def _running(self) -> list[PlanState]:
        return [
            PlanState(
                exchange.plan,
                int(exchange.steps.numpy()),
                self.comm.rank,
                {name: residual.numpy() for name, residual in exchange.residuals.items()},
                {name: velocity.numpy() for name, velocity in exchange.velocities.items()},
            )
            for exchange in self.exchanges.values()
        ]

    def traffic(self) -> dict[str, float]:
        """Return bytes sent between nodes by this process so far, and what plain Horovod would have
        sent for the same steps.
        """
        dense = self._dense_bytes + sum(
            exchange.dense_bytes_between_nodes() for exchange in self.exchanges.values()
        )
        return {
            "bytes_between_nodes": self.comm.traffic().between,
            "bytes_between_nodes_dense": dense,
        }

    def continue_from(self, owed: Residuals, velocity: Residuals, left: list[PlanState]) -> None:
        """Keep what a checkpoint holds in place of what is kept here; what was sent so far still
        counts as traffic.
        """
        self._dense_bytes = self.traffic()["bytes_between_nodes_dense"]
        self.owed, self.velocity, self.left, self.exchanges = owed, velocity, left, {}

    def check(self, schemes: Scheme | Mapping[str, Scheme]) -> None:
        """Refuse schemes that cannot be carried out. **Raises:** PlanError."""
        for pattern, scheme in by_pattern(schemes).items():
            if not isinstance(pattern, str) or not isinstance(scheme, Scheme):
                raise PlanError(
                    "A tfcommx.Scheme is required, or a mapping from patterns of variable paths, "
                    "such as '*embedding*', to "
                    f"Schemes. Received {scheme!r} for {pattern!r}."
                )
            check_scheme(scheme, self.comm.topology, self.comm.has_messages)
            if scheme.momentum and self.own_momentum:
                raise PlanError(_twice(self.own_momentum))

    def _exchange_for(self, variables: Sequence[keras.Variable]) -> PlanExecutor:
        key = tuple(self.names_of(variables))
        if key not in self.exchanges:
            with tf.init_scope():  # also while a step is traced: planning is done once, for real
                for names, other in self.exchanges.items():
                    if set(key) & set(names):
                        log.warning(
                            "Gradients of another set of variables are exchanged from now on: "
                            "%r, for one, came or went. All ranks "
                            "must change alike, or they wait for each other.",
                            sorted(set(key) ^ set(names))[0],
                        )
                        owed, velocity = other.export_residuals(set(key))
                        self.owed, self.velocity = (
                            sum_residuals([self.owed, owed]),
                            sum_residuals([self.velocity, velocity]),
                        )
                plan = self.given or make_plan(
                    [
                        Gradient(
                            name,
                            tuple(variable.shape),
                            keras.backend.standardize_dtype(variable.dtype),
                        )
                        for name, variable in zip(key, variables, strict=True)
                    ],
                    self.schemes,
                    self.comm.topology,
                    self.operation,
                    **self.options,
                )
                covered = {
                    Piece.of(name).path for bucket in plan.buckets for name in bucket.variables
                }
                if covered != set(key):
                    odd = sorted(covered ^ set(key))[0]
                    raise PlanError(
                        f"The plan must cover exactly the variables with gradients. {odd!r} is "
                        "only in "
                        f"{'the plan' if odd in covered else 'the model'}. Make the plan from "
                        "this model."
                    )
                exchange = PlanExecutor(plan, self.comm)
                for left in [left for left in self.left if left.variables & covered]:
                    self.left.remove(left)
                    if left.plan == plan:
                        exchange.continue_from(left.steps, left.residuals, left.velocities)
                    else:  # the model or the scheme has changed since
                        self._unpack(left)
                exchange.import_residuals(self.owed, self.velocity)
                self.owed = {path: part for path, part in self.owed.items() if path not in covered}
                moving = {
                    Piece.of(name).path
                    for bucket in plan.buckets
                    if bucket.momentum
                    for name in bucket.variables
                }
                self.velocity = {
                    path: part for path, part in self.velocity.items() if path not in moving
                }
                self.exchanges[key] = exchange
        return self.exchanges[key]


def by_pattern(schemes: Scheme | Mapping[str, Scheme]) -> dict[str, Scheme]:
    """Return pattern of variable paths -> Scheme; a single Scheme is for all."""
    return dict(schemes) if isinstance(schemes, Mapping) else {"*": schemes}


def _twice(own_momentum: float) -> str:
    return (
        "Momentum must be applied once. Received a scheme with `momentum` and an optimizer with "
        "its own "
        f"(momentum or beta_1 = {own_momentum}). Set the optimizer's to 0, or leave `momentum` "
        "out of the scheme."
    )


def sum_residuals(parts: Sequence[Residuals], factor: float = 1.0) -> Residuals:
    """Add what several ranks owed, variable by variable, times a factor."""
    total: Residuals = {}
    for part in parts:
        for path, values in part.items():
            total[path] = total.get(path, np.float32(0)) + values * np.float32(factor)
    return total

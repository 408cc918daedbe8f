"""StepAhead: each node trains on weights that contain its unsent updates.

A node i of n has the residual e_i of its updates; w are the weights that all ranks agree on.

    variables      x_i = w + c e_i                    c: the coefficient
    gradients      g_i = the mean over the node's ranks, at x_i
    optimizer      U_i = its update by g_i            moments are the node's own
    sparse route   e_i += U_i;  q_i = the largest entries of e_i;  e_i -= q_i
    all ranks      w += the mean of all q_i           the only traffic between nodes

Error feedback alone loses accuracy if few entries are sent, because it computes gradients at w,
which lacks the node's unsent updates. x_i differs between nodes, by residuals that stay bounded; w
does not. On a route that keeps residuals by rank (allgather) "node" means the rank.

Adam divides by the root of its second moment, which has more noise if it is computed from the
gradients of one node instead of all. With M and V the moments without their bias,

    s = min(M^2, V)        V' = s + (V - s) / n

and U_i divides by the root of V' in place of V (`keras_internals.adam_noise`).

**Source:** Xu, Huo, Huang, "Step-Ahead Error Feedback for Distributed Training with Compressed
Gradient" (AAAI 2021), algorithm 1; the coefficient is that of SA-PEF (arXiv 2601.20738). They keep
residuals of gradients; we keep those of updates, and correct the noise.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import tensorflow as tf

from tfcommx import routes
from tfcommx.core import Plan, PlanError, Topology, check_number
from tfcommx.kernels.traced import untraced
from tfcommx.runtime.bucket_runner import cut, flatten, join, unflatten
from tfcommx.runtime.executor import PlanExecutor, only_plan
from tfcommx.runtime.gradient_state import Executor
from tfcommx.strategies.strategy import Strategy, StrategyRun, Update


@dataclass(frozen=True)
class StepAhead(Strategy):
    """Compute each node's gradients at the agreed weights plus the node's own unsent updates.

    Between steps the model's variables differ between nodes; at the end of an epoch, before an
    evaluation and before a checkpoint they become the agreed weights (cx.consolidate). Assign to
    the variables only after that, because an assignment between other steps is lost.

    Variables on a sparse route take part. Others, such as biases, have the agreed weights; their
    updates are averaged. Updates of Keras's Adam and AdamW, without amsgrad, are corrected.

    >>> StepAhead()
    StepAhead(coefficient=1.0)

    **Ranks:** all, with equal options. **Cost:** memory for a copy of the weights, and for some
    four more during the update. Between nodes the scheme's bytes. Inside a node of s ranks the
    scheme's bytes plus an allreduce of the gradients and an all-gather of the residuals, together
    3 (s - 1)/s of the float32 vector. Some five passes over the weights, seven more for Adam.
    **Raises:** ConfigurationError for a coefficient out of range.
    """

    # Share of the residual in the variables, in (0, 1]; 1: they contain all the node's updates
    coefficient: float = 1.0

    updates_apart: ClassVar[bool] = True
    takes_constraints: ClassVar[bool] = False

    def __post_init__(self) -> None:
        coefficient = check_number("coefficient", self.coefficient, "in (0, 1]")
        object.__setattr__(self, "coefficient", coefficient)

    def check(self, plan: Plan) -> None:
        """Refuse residuals of other than updates, and nodes that differ between buckets."""
        super().check(plan)
        if plan.operation != "average":
            raise PlanError(
                'StepAhead averages updates: it needs op="average". Received '
                f"op={plan.operation!r}. Leave it out."
            )
        for bucket in plan.buckets:
            if bucket.momentum or bucket.compresses:
                raise PlanError(
                    "With StepAhead residuals must be sums of updates: schemes need momentum=0 and "
                    f'compression="none". Received {bucket.name} with momentum={bucket.momentum} '
                    f"and compression={bucket.compression!r}. Take a scheme that selects, such as "
                    "Scheme('hitopk', 'mstopk', density=0.02), and give momentum to the optimizer."
                )
        nodes_of(plan, plan.topology)

    def start(self, executor: Executor) -> StrategyRun:
        return StepAheadRun(only_plan(executor), self.coefficient)


def nodes_of(plan: Plan, topology: Topology) -> Topology:
    """Return the topology whose nodes each keep a residual: the ranks', or one of single ranks.

    **Raises:** PlanError if some buckets keep residuals by node, and others by rank.
    """
    sparse = [bucket for bucket in plan.buckets if bucket.k is not None]
    shards = {bucket.name: routes.get(bucket.route).shards for bucket in sparse}
    if len(set(shards.values())) > 1 and topology.slots > 1:
        raise PlanError(
            "With StepAhead all sparse routes must keep residuals alike, by node or by rank. "
            f"Received {', '.join(f'{name} by {kind}' for name, kind in shards.items())}. Take one "
            "route for all schemes that select."
        )
    return topology if "slots" in shards.values() else Topology(topology.size, 1)


class StepAheadRun(StrategyRun):
    executor: PlanExecutor
    keeps_copies = True

    def __init__(self, executor: PlanExecutor, coefficient: float) -> None:
        super().__init__(executor)
        comm = executor.comm
        self._nodes = nodes_of(executor.plan, comm.topology)
        # A residual on the wire is the sum over the node's ranks, whose updates are equal
        self._coefficient = coefficient / self._nodes.slots
        with tf.device("/cpu:0"):
            # True if the variables hold the agreed weights, or values assigned to them since
            self._consolidated = tf.Variable(True, trainable=False, name="tfcommx/consolidated")
        # Variable path -> the agreed weights, from the first step on
        self._agreed: dict[str, tf.Variable] = {}
        # The variables
        self._weights: Mapping[str, tf.Variable] = {}
        # During a step: the weights at which its gradients were computed
        self._began: dict[str, tf.Tensor] = {}
        self._sums = comm.progress.of_exchange(["the mean of a node's gradients"], counted=False)
        self._gathers = comm.progress.of_exchange(["the gather of residuals"], counted=False)

    def follow_rate(self, rate: tf.Tensor) -> None:
        """Do nothing: residuals hold updates, which include the rate already."""

    def agreed_weights(self, weights: Mapping[str, tf.Variable]) -> Mapping[str, tf.Variable]:
        """Return the agreed weights; keep the step's weights, which weight decay moves next."""
        self._weights = weights
        if not self._agreed:
            with untraced():
                self._agreed = {
                    path: tf.Variable(tf.zeros_like(weight), trainable=False, name="tfcommx_agreed")
                    for path, weight in weights.items()
                }

        def take_agreed() -> None:
            for path, weight in weights.items():
                self._agreed[path].assign(weight)

        tf.cond(self._consolidated.read_value(), take_agreed, lambda: None)
        self._began = {path: weight.read_value() for path, weight in weights.items()}
        return self._agreed

    def exchange(self, gradients: Mapping[str, tf.Tensor]) -> dict[str, tf.Tensor]:
        """Return the mean of the gradients over the ranks of the node."""
        if self._nodes.slots == 1:
            return dict(gradients)
        plan, comm = self.executor.plan, self.executor.comm
        pieces = cut(gradients, plan)
        means: dict[str, tf.Tensor] = {}
        number = self._sums.begin(pieces.values())
        with self.executor.scope():
            for bucket in plan.buckets:
                parts = [pieces[name] for name in bucket.variables]
                # The slots of a node must make the same update, to the bit, because each of them
                # sends and keeps one shard of it
                total = comm.allreduce(flatten(parts, bucket), "node", f"{bucket.name}/node")
                mean = total * tf.constant(1 / self._nodes.slots, total.dtype)
                means |= zip(bucket.variables, unflatten(mean, parts, bucket), strict=True)
        self._sums.end(0, means.values(), number)
        return join(means, gradients)

    def update(self, step: Update) -> None:
        """Apply the node's update, send a part of it, and add the rest to the agreed weights.

        **Ranks:** all.
        """
        began, self._began = self._began, {}
        decayed = {path: weight.read_value() for path, weight in step.weights.items()}
        step.apply()
        factors = step.noise_factors(self._nodes.nodes)
        updates = {}
        for path, weight in step.weights.items():
            update = weight.read_value() - decayed[path]
            if path in factors:
                update *= factors[path]
            # Weight decay, which Keras applied before, belongs to the node's update as well
            updates[path] = update + (decayed[path] - began[path])
        means = self.executor.exchange(updates)
        ahead = self._unsent(updates)
        for path, weight in step.weights.items():
            agreed = self._agreed[path].assign_add(means[path]).read_value()
            weight.assign(agreed + ahead[path] if path in ahead else agreed)
        # Not in a call without data, as in PlanExecutor.exchange_buckets
        with tf.control_dependencies(list(means.values())[-1:]):
            self._consolidated.assign(False)

    def _unsent(self, like: Mapping[str, tf.Tensor]) -> dict[str, tf.Tensor]:
        """Return the node's residuals times the coefficient, in the shapes and dtypes of `like`."""
        comm, pieces = self.executor.comm, cut(like, self.executor.plan)
        # Without a selection all of an update is sent, and nothing is ahead
        runners = [runner for runner in self.executor.runners if runner.bucket.k is not None]
        residuals = [runner.state.residual.read_value() for runner in runners]
        number = self._gathers.begin(residuals)
        unsent: dict[str, tf.Tensor] = {}
        with self.executor.scope():
            for runner, residual in zip(runners, residuals, strict=True):
                bucket = runner.bucket
                if self._nodes.slots > 1:
                    # Each slot keeps the residual of one shard of the node's update
                    residual = comm.all_gather(residual, "node", f"{bucket.name}/ahead")
                parts = [pieces[name] for name in bucket.variables]
                scaled = residual * tf.constant(self._coefficient, residual.dtype)
                unsent |= zip(bucket.variables, unflatten(scaled, parts, bucket), strict=True)
        self._gathers.end(0, unsent.values(), number)
        return join(unsent, like)

    def consolidate(self) -> None:
        if not bool(self._consolidated.numpy()):
            for path, weight in self._weights.items():
                weight.assign(self._agreed[path])
            self._consolidated.assign(True)

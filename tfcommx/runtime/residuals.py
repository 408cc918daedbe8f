"""GradientStore: the state of a plan's buckets between steps; exports and loads it by variable.

Between steps a rank keeps, of each bucket, its shard of

    residual    unsent gradients and rounding errors of narrow formats; on other dense routes the
                unsent gradients of earlier plans
    velocity    the momentum of a scheme with `momentum`
    compression the state of a compression, equal on all ranks
"""

from collections.abc import Callable, Mapping, Set
from typing import Any

import numpy as np
import tensorflow as tf

from tfcommx import compression, routes
from tfcommx.collectives.comm import Comm
from tfcommx.core import Bucket, Plan, Topology
from tfcommx.kernels.dense import narrowed
from tfcommx.kernels.device import residual_device
from tfcommx.runtime.gradient_state import (
    GradientState,
    Vectors,
    stretches,
    without,
)
from tfcommx.runtime.rates import HighestRate, RecentRate


def send_with_residual(gradient: tf.Tensor, residual: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """Return gradient plus residual in the gradient's dtype, and the part that it cannot hold.

    A finite sum beyond float16 is clipped, as `kernels.dense.write` does.

    >>> sent, residual = send_with_residual(tf.constant([2.0, 4.0]), tf.constant([1.0, 0.0]))
    >>> sent.numpy().tolist(), residual.numpy().tolist()
    ([3.0, 4.0], [0.0, 0.0])
    """
    # At least float32, so that it holds the rounding error of a 16-bit dtype, too
    wide = tf.float64 if gradient.dtype == tf.float64 else tf.float32
    total = tf.cast(gradient, wide) + tf.cast(residual, wide)
    # Otherwise the sum would be Inf in this step and, as the residual stays, in all later ones
    sent = _clipped(total, gradient.dtype)
    rounding_error = tf.cast(total - tf.cast(sent, wide), tf.float32)
    # NaN and Inf never enter a residual
    return sent, tf.where(tf.math.is_finite(sent), rounding_error, residual)


def _clipped(numbers: tf.Tensor, dtype: tf.DType) -> tf.Tensor:
    """Return numbers in a dtype; finite ones beyond 16 bits are clipped."""
    return narrowed(numbers, dtype.name) if dtype.size < 4 else tf.cast(numbers, dtype)


class BucketState:
    """This rank's state of one bucket between steps."""

    def __init__(self, bucket: Bucket, topology: Topology, rank: int) -> None:
        """Create the bucket's residual, velocity and compression state, if it has them."""
        self.bucket = bucket
        # The part of the flat vector for which this rank keeps residual and velocity
        self.shard = slice(*routes.get(bucket.route).shard(bucket, topology, rank))
        self.residual: Any = self._zeros("residual") if bucket.keeps_residual else None
        self.velocity: Any = self._zeros("velocity") if bucket.momentum else None
        self.compression: Any = None
        if bucket.compresses:
            first_state = compression.get(bucket.compression).first_state
            self.compression = self._variable("compression", lambda: first_state(bucket.shapes))
        # For a bucket that keeps no residual but received one from another plan: True while some of
        # it remains
        self.pending: Any = None

    def _zeros(self, kind: str) -> tf.Variable:
        return self._variable(kind, lambda: tf.zeros(self.shard.stop - self.shard.start))

    def _variable(self, kind: str, value: Callable[[], Any]) -> tf.Variable:
        with tf.device(residual_device()):
            return tf.Variable(value(), trainable=False, name=f"{self.bucket.name}/{kind}")

    def expect_residual(self) -> None:
        """Prepare for a residual of another plan; create it if the bucket keeps none."""
        if self.residual is None:
            self.residual = self._zeros("residual")
            with tf.device("/cpu:0"):
                self.pending = tf.Variable(True, trainable=False)
        if self.pending is not None:
            self.pending.assign(True)

    def add_velocity(self, flat: tf.Tensor) -> tf.Tensor:
        """Return the sum over the ranks with momentum, on a dense route: equal on all ranks."""
        if self.velocity is None:
            return flat
        moved = self.bucket.momentum * self.velocity + tf.cast(flat, tf.float32)
        # One step's NaN or Inf would stay in the velocity forever
        self.velocity.assign(tf.where(tf.math.is_finite(moved), moved, self.velocity))
        # Without a residual for the rest, which would grow for as long as the velocity is beyond
        # float16
        return _clipped(moved, flat.dtype)

    def add_residual(self, flat: tf.Tensor) -> tf.Tensor:
        """Return the sum over the ranks plus the residual of other plans, equal on all ranks."""
        if self.pending is None:
            return flat

        def flush() -> tf.Tensor:
            # The rounding error of the vector's dtype stays in the residual
            sent, unsent = send_with_residual(flat, self.residual.value())
            with tf.control_dependencies([unsent]):
                self.residual.assign(unsent)
                self.pending.assign(tf.reduce_any(unsent != 0))
            return tf.identity(sent)

        return tf.cond(self.pending, flush, lambda: tf.identity(flat))


class GradientStore:
    """The state of all buckets of a plan on this rank, the steps taken and the learning rate."""

    def __init__(self, plan: Plan, comm: Comm, divided_by_rate: bool = False) -> None:
        self.plan, self.comm = plan, comm
        self.states = {
            bucket.name: BucketState(bucket, plan.topology, comm.rank) for bucket in plan.buckets
        }
        with tf.device("/cpu:0"):  # Because seeds and conditions are read on the host
            self.steps = tf.Variable(0, dtype=tf.int64, trainable=False, name="tfcommx/steps")
        self._rate = RecentRate() if divided_by_rate else HighestRate()

    def follow_rate(self, rate: tf.Tensor) -> None:
        """Record the step's learning rate, a float scalar, before the exchange."""
        # Residuals shrink as it rises, because they stand for updates (see `rates`)
        residuals = [state.residual for state in self.states.values() if state.residual is not None]
        if residuals:
            self._rate.follow(rate, residuals)

    def export(self, variables: Set[str] | None = None) -> GradientState:
        """Return a copy of this rank's state of these variables; None: of all. Untraced."""
        # Sorted, because a set's order differs between processes, and files must not
        paths = sorted(self.plan.paths)
        # From rank 0 alone, because all ranks have the same: addends of all would load as a
        # multiple
        compressions = {
            path: np.array(part)
            for state in self.states.values()
            if state.compression is not None and self.comm.rank == 0
            for path, part in _cut_compression(state.bucket, state.compression.numpy())
            if part.size
        }
        state = GradientState(
            self._by_variable("residual"),
            self._by_variable("velocity"),
            compressions,
            dict.fromkeys(paths, int(self.steps.numpy())),
            dict.fromkeys(paths, rate) if (rate := self._rate.exponent) is not None else {},
        )
        return state if variables is None else state.of(variables)

    def _by_variable(self, kind: str) -> Vectors:
        """Return this rank's residuals or velocities; state equal on all ranks only on rank 0."""
        vectors: Vectors = {}
        sizes = self.plan.entries
        for state in self.states.values():
            variable = getattr(state, kind)
            if variable is None or (self.comm.rank and not state.bucket.keeps_residual):
                continue
            values = variable.numpy()
            for path, of_variable, of_shard in stretches(state.bucket, state.shard):
                # Zeros are left out, because each variable with a state costs collectives at `load`
                if values[of_shard].any():
                    # Pieces of one variable may lie in several buckets, and fill one vector
                    # together
                    vector = vectors.setdefault(path, np.zeros(sizes[path], np.float32))
                    vector[of_variable] = values[of_shard]
        return vectors

    def load(self, state: GradientState) -> GradientState:
        """Add a state of any plan before the first step; return the part that does not fit here.

        With the plan and the ranks of the export it is restored exactly. Otherwise its sums over
        the ranks are conserved: on a sparse route the rank that selects from a part of the vector
        receives the residuals of that part; on a dense one every rank receives their sum, which is
        added to the next gradients' sum, and the sum of the velocities.

        **Ranks:** all, outside of traced code. **Cost:** one exchange on the host, and at most
        three collectives for each bucket for which any rank has a state.
        """
        plan, comm = self.plan, self.comm
        own_state = state.of(plan.paths)
        # Every rank learns who has a state of which variables, because the collectives below need
        # all ranks, also those that load nothing
        states_of_ranks = comm.gather_objects(
            [
                max(own_state.steps.values(), default=0),
                sorted(set(own_state.rates.values())),
                list(own_state.residuals),
                list(own_state.velocities),
                {path: part.size for path, part in own_state.compressions.items()},
            ]
        )
        steps, exponents, residuals, velocities, compressions = zip(*states_of_ranks, strict=True)
        # The highest number of any rank, because seeds must follow one count and not repeat
        self.steps.assign(max(int(self.steps.numpy()), *steps))
        if known := set().union(*exponents):
            if self._rate.exponent is None:
                self._rate.continue_from(max(known))
            else:
                # As if these steps had been taken here: otherwise the next one would shrink the
                # loaded residuals, too, as if they came from the lower rate recorded here
                self.follow_rate(tf.constant(2.0 ** max(known)))
        with_residual, moving = set().union(*residuals), set().union(*velocities)
        sizes = {
            path: size for sizes_of_rank in compressions for path, size in sizes_of_rank.items()
        }
        for bucket_state in self.states.values():
            paths = {
                stretch.path
                for stretch in stretches(bucket_state.bucket, slice(0, bucket_state.bucket.padded))
            }
            if paths & with_residual:
                bucket_state.expect_residual()
                addend = self._redistributed(own_state.residuals, bucket_state, "residuals")
                _add(bucket_state.residual, addend)
            if bucket_state.velocity is not None and paths & moving:
                addend = self._redistributed(own_state.velocities, bucket_state, "velocities")
                _add(bucket_state.velocity, addend)
            if bucket_state.compression is not None and paths & sizes.keys():
                self._load_compression(own_state.compressions, sizes, bucket_state)
        return GradientState(
            without(state.residuals, plan.paths),
            without(state.velocities, plan.paths_with_momentum),
            without(state.compressions, plan.paths_with_compression),
            without(state.steps, plan.paths),
            without(state.rates, plan.paths),
        )

    def _redistributed(self, vectors: Vectors, state: BucketState, kind: str) -> np.ndarray:
        """Return the sum of the ranks' vectors, for this rank's shard of a bucket."""
        bucket, comm = state.bucket, self.comm
        full = np.zeros(bucket.padded, np.float32)
        for path, of_variable, of_bucket in stretches(bucket, slice(0, bucket.padded)):
            if path in vectors:
                full[of_bucket] = vectors[path][of_variable]
        total = tf.constant(full)
        # This rank's shard of the sum over its node
        if state.shard.stop - state.shard.start < bucket.padded:
            # The ranks of a node hold its shards, so this adds within the node only: the sum over
            # the nodes is conserved, because each node keeps the residuals that its ranks had
            total = comm.reduce_scatter(total, "node", f"{bucket.name}/import_{kind}")
        if not bucket.keeps_residual:
            total = comm.allreduce(total, "world", f"{bucket.name}/import_{kind}_sum")
        return np.asarray(total)

    def _load_compression(
        self, vectors: Vectors, sizes: Mapping[str, int], state: BucketState
    ) -> None:
        """Set a compression's state, except for variables with none or one of another length."""
        # `vectors`: this rank's addends by path; `sizes`: entries by path, of the state on any rank
        before = _cut_compression(state.bucket, state.compression.numpy())
        fits = [sizes.get(path) == part_before.size for path, part_before in before]
        part = [
            vectors[path] if path in vectors and fit else np.zeros_like(part_before)
            for (path, part_before), fit in zip(before, fits, strict=True)
        ]
        name = f"{state.bucket.name}/import_compression"
        # A sum, in which ranks without a state count as zeros, because one rank alone holds it
        total = self.comm.allreduce(tf.constant(np.concatenate(part)), "world", name).numpy()
        rows = zip(_cut_compression(state.bucket, total), before, fits, strict=True)
        state.compression.assign(
            np.concatenate(
                [new if fit else part_before for (_, new), (_, part_before), fit in rows]
            )
        )

    def clear(self, variables: Set[str]) -> None:
        """Set the residuals and velocities of these variables to zero. Outside of traced code."""
        for state in self.states.values():
            # The state of a compression stays, because it is no part of a gradient
            for variable in (state.residual, state.velocity):
                if variable is not None:
                    # A copy, because `numpy` may share the variable's memory, or be read-only
                    values = np.array(variable.numpy())
                    for path, _, of_shard in stretches(state.bucket, state.shard):
                        if path in variables:
                            values[of_shard] = 0
                    variable.assign(values)

    def release(self) -> None:
        """Free the memory of all buckets; no step may follow. Outside of graphs."""
        for state in self.states.values():
            for variable in (state.residual, state.velocity, state.compression):
                if variable is not None:
                    # Made empty, because a traced step holds the variable
                    with tf.device(variable.device):
                        # Not `assign`, which requires the same shape
                        tf.raw_ops.AssignVariableOp(resource=variable.handle, value=tf.zeros([0]))


def _add(variable: tf.Variable, vector: np.ndarray) -> None:
    """Add to a residual or velocity on the host, because TensorFlow may flush denormal numbers."""
    variable.assign(variable.numpy() + vector)


def _cut_compression(bucket: Bucket, state: np.ndarray) -> list[tuple[str, np.ndarray]]:
    """Return (variable, its part of the compression's state) for each variable of a bucket."""
    sizes = compression.get(bucket.compression).state_sizes(bucket.shapes)
    return list(zip(bucket.variables, np.split(state, np.cumsum(sizes)[:-1]), strict=True))

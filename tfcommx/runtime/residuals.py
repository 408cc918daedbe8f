"""GradientStore: the state of a plan's buckets between steps; exports and loads it by variable.

Between steps a rank keeps, of each bucket, its shard of

    residual    gradients that were not sent, and what narrow formats round off; on other dense
                routes what plans before had not sent
    velocity    the momentum of a scheme with `momentum`
    compression the state of a compression, equal on all ranks
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from typing import Any

import numpy as np
import tensorflow as tf

from tfcommx import compression, routes
from tfcommx.collectives.comm import Comm
from tfcommx.core import Bucket, Plan, Topology
from tfcommx.kernels.device import residual_device
from tfcommx.runtime.gradient_state import (
    GradientState,
    Vectors,
    stretches,
    variable_sizes,
    without,
)
from tfcommx.runtime.rates import HighestRate


def send_with_residual(gradient: tf.Tensor, residual: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """Return gradient plus residual, in the gradient's dtype, and what that dtype cannot carry.

    Where the sum is NaN or infinite the residual stays as it is.

    >>> sent, stays = send_with_residual(tf.constant([2.0, 4.0]), tf.constant([1.0, 0.0]))
    >>> sent.numpy().tolist(), stays.numpy().tolist()
    ([3.0, 4.0], [0.0, 0.0])
    """
    wide = tf.float64 if gradient.dtype == tf.float64 else tf.float32
    whole = tf.cast(gradient, wide) + tf.cast(residual, wide)
    sent = tf.cast(whole, gradient.dtype)
    rounding_error = tf.cast(whole - tf.cast(sent, wide), tf.float32)
    return sent, tf.where(tf.math.is_finite(sent), rounding_error, residual)


class BucketState:
    """What this rank keeps of one bucket between steps."""

    def __init__(self, bucket: Bucket, topology: Topology, rank: int) -> None:
        """Make the residual of a bucket that keeps one, and the velocity of one with momentum."""
        self.bucket = bucket
        # The part of the flat vector of which this rank keeps residual and velocity
        self.shard = slice(*routes.get(bucket.route).shard(bucket, topology, rank))
        self.residual: Any = self._zeros("residual") if bucket.keeps_residual else None
        self.velocity: Any = self._zeros("velocity") if bucket.momentum else None
        self.compression: Any = self._first_compression() if bucket.compresses else None
        # Of a bucket that keeps none, but got one from another plan: does any of it remain?
        self.pending: Any = None

    def _zeros(self, what: str) -> tf.Variable:
        with tf.device(residual_device()):
            return tf.Variable(
                tf.zeros(self.shard.stop - self.shard.start),
                trainable=False,
                name=f"{self.bucket.name}/{what}",
            )

    def _first_compression(self) -> tf.Variable:
        with tf.device(residual_device()):
            return tf.Variable(
                compression.get(self.bucket.compression).first_state(self.bucket.shapes),
                trainable=False,
                name=f"{self.bucket.name}/compression",
            )

    def expect_residual(self) -> None:
        """Get ready for a residual from elsewhere; a bucket that keeps none has had none so far."""
        if self.residual is None:
            self.residual = self._zeros("residual")
            with tf.device("/cpu:0"):
                self.pending = tf.Variable(True, trainable=False)
        if self.pending is not None:
            self.pending.assign(True)

    def add_velocity(self, flat: tf.Tensor) -> tf.Tensor:
        """Return the sum over the ranks with momentum, on a dense route: equal on all ranks.

        What is NaN or infinite does not stay in the velocity.
        """
        if self.velocity is None:
            return flat
        moved = self.bucket.momentum * self.velocity + tf.cast(flat, tf.float32)
        self.velocity.assign(tf.where(tf.math.is_finite(moved), moved, self.velocity))
        return tf.cast(moved, flat.dtype)

    def add_residual(self, flat: tf.Tensor) -> tf.Tensor:
        """Return the sum over the ranks plus what sparse plans had not sent, on a dense route.

        What the vector's dtype cannot carry stays. Equal on all ranks, as the sum itself is.
        """
        if self.pending is None:
            return flat
        return tf.cond(self.pending, lambda: self._flushed(flat), lambda: tf.identity(flat))

    def _flushed(self, flat: tf.Tensor) -> tf.Tensor:
        sent, stays = send_with_residual(flat, self.residual.value())
        with tf.control_dependencies([stays]):
            self.residual.assign(stays)
            self.pending.assign(tf.reduce_any(stays != 0))
        return tf.identity(sent)


class GradientStore:
    """The state of all buckets of a plan on this rank, the steps taken and the highest rate."""

    def __init__(self, plan: Plan, comm: Comm) -> None:
        self._plan, self._comm = plan, comm
        self.states = {
            bucket.name: BucketState(bucket, plan.topology, comm.rank) for bucket in plan.buckets
        }
        with tf.device("/cpu:0"):  # Seeds and conditions are read on the host.
            self.steps = tf.Variable(0, dtype=tf.int64, trainable=False, name="tfcommx/steps")
        self._highest_rate = HighestRate()

    def follow_rate(self, rate: tf.Tensor) -> None:
        """Shrink the residuals as the learning rate grows, a float scalar: that of this step."""
        residuals = [one.residual for one in self.states.values() if one.residual is not None]
        if residuals:
            self._highest_rate.follow(rate, residuals)

    def export(self, variables: Set[str] | None = None) -> GradientState:
        """Return a copy of this rank's state of these variables; None: of all."""
        paths = self._plan.paths
        compressions = {
            path: np.array(part)
            for state in self.states.values()
            if state.compression is not None and self._comm.rank == 0
            for path, part in _cut_compression(state.bucket, state.compression.numpy())
            if part.size
        }
        state = GradientState(
            self._by_variable("residual"),
            self._by_variable("velocity"),
            compressions,
            dict.fromkeys(paths, int(self.steps.numpy())),
            dict.fromkeys(paths, rate) if (rate := self._highest_rate.exponent) is not None else {},
        )
        return state if variables is None else state.of(variables)

    def _by_variable(self, kind: str) -> Vectors:
        """Return this rank's part of residuals or velocities; rank 0 has those that all share."""
        found: Vectors = {}
        sizes = variable_sizes(self._plan)
        for state in self.states.values():
            variable = getattr(state, kind)
            if variable is None or (self._comm.rank and not state.bucket.keeps_residual):
                continue
            values = variable.numpy()
            for path, of_variable, of_shard in stretches(state.bucket, state.shard):
                if values[of_shard].any():
                    vector = found.setdefault(path, np.zeros(sizes[path], np.float32))
                    vector[of_variable] = values[of_shard]
        return found

    def load(self, state: GradientState) -> GradientState:
        """Add a state, its sums over the ranks conserved; return the part without a place here.

        **Ranks:** all, outside of traced code. **Cost:** one exchange on the host, and at most
        three collectives for each bucket of which any rank has a state.
        """
        plan, comm = self._plan, self._comm
        mine = state.of(plan.paths)
        everyone = comm.gather_objects(
            [
                max(mine.steps.values(), default=0),
                sorted(set(mine.rates.values())),
                list(mine.residuals),
                list(mine.velocities),
                {path: part.size for path, part in mine.compressions.items()},
            ]
        )
        steps, exponents, residuals, velocities, compressions = zip(*everyone, strict=True)
        self.steps.assign(max(int(self.steps.numpy()), *steps))
        self._highest_rate.continue_from(set().union(*exponents))
        with_residual, moving = set().union(*residuals), set().union(*velocities)
        sizes = {path: size for one in compressions for path, size in one.items()}
        for one in self.states.values():
            paths = {stretch.path for stretch in stretches(one.bucket, slice(0, one.bucket.padded))}
            if paths & with_residual:
                one.expect_residual()
                _add(one.residual, self._redistributed(mine.residuals, one, "residuals"))
            if one.velocity is not None and paths & moving:
                _add(one.velocity, self._redistributed(mine.velocities, one, "velocities"))
            if one.compression is not None and paths & sizes.keys():
                self._load_compression(mine.compressions, sizes, one)
        return GradientState(
            without(state.residuals, plan.paths),
            without(state.velocities, plan.paths_with_momentum),
            without(state.compressions, plan.paths_with_compression),
            without(state.steps, plan.paths),
            without(state.rates, plan.paths),
        )

    def _redistributed(self, kept: Vectors, state: BucketState, what: str) -> np.ndarray:
        """Return the sum of what the ranks have, for this rank's shard of a bucket."""
        bucket, comm = state.bucket, self._comm
        whole = np.zeros(bucket.padded, np.float32)
        for path, of_variable, of_bucket in stretches(bucket, slice(0, bucket.padded)):
            if path in kept:
                whole[of_bucket] = kept[path][of_variable]
        mine = tf.constant(whole)
        # My shard of what the ranks of my node have
        if state.shard.stop - state.shard.start < bucket.padded:
            mine = comm.reduce_scatter(mine, "node", f"{bucket.name}/import_{what}")
        if not bucket.keeps_residual:
            mine = comm.allreduce(mine, "world", f"{bucket.name}/import_{what}_sum")
        return np.asarray(mine)

    def _load_compression(
        self, kept: Vectors, sizes: Mapping[str, int], state: BucketState
    ) -> None:
        """Set the state of a compression; a variable without one, or of another length, keeps its.

        Args:
            kept: of this rank: parts of a sum.
            sizes: variable path -> entries of its state on any rank.
            state: of the bucket.
        """
        before = _cut_compression(state.bucket, state.compression.numpy())
        fits = [sizes.get(path) == own.size for path, own in before]
        part = [
            kept[path] if path in kept and fit else np.zeros_like(own)
            for (path, own), fit in zip(before, fits, strict=True)
        ]
        name = f"{state.bucket.name}/import_compression"
        total = self._comm.allreduce(tf.constant(np.concatenate(part)), "world", name).numpy()
        rows = zip(_cut_compression(state.bucket, total), before, fits, strict=True)
        state.compression.assign(
            np.concatenate([new if fit else own for (_, new), (_, own), fit in rows])
        )

    def clear(self, variables: Set[str]) -> None:
        """Set the residuals and velocities of these variables to zero.

        The state of a compression stays: it is no part of a gradient.
        """
        for state in self.states.values():
            for variable in (state.residual, state.velocity):
                if variable is not None:
                    values = np.array(variable.numpy())
                    for path, _, of_shard in stretches(state.bucket, state.shard):
                        if path in variables:
                            values[of_shard] = 0
                    variable.assign(values)

    def release(self) -> None:
        """Free the memory of all buckets, which nobody reads any more.

        A traced step holds the variables themselves, so each gets an empty value.
        """
        for state in self.states.values():
            for variable in (state.residual, state.velocity, state.compression):
                if variable is not None:
                    with tf.device(variable.device):
                        # Not `assign`, which keeps to the shape
                        tf.raw_ops.AssignVariableOp(resource=variable.handle, value=tf.zeros([0]))


def _add(variable: tf.Variable, vector: np.ndarray) -> None:
    """Add to a residual or velocity on the host: TensorFlow may flush denormal numbers."""
    variable.assign(variable.numpy() + vector)


def _cut_compression(bucket: Bucket, state: np.ndarray) -> list[tuple[str, np.ndarray]]:
    """Return the variables of a bucket with the parts of its compression's state."""
    sizes = compression.get(bucket.compression).state_sizes(bucket.shapes)
    return list(zip(bucket.variables, np.split(state, np.cumsum(sizes)[:-1]), strict=True))

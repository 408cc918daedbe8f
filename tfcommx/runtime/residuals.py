"""What each rank keeps between steps: by bucket in a plan, by variable between plans.

Between steps a rank keeps, of each bucket, its shard of

    residual    gradients that were not sent, and what 16-bit formats round off; on other dense
                routes what plans before had not sent
    velocity    the momentum of a scheme with `momentum`
    compression the state of a compression, equal on all ranks

Checkpoints, changes of scheme and changes of the number of ranks move them by variable, so that
their sums over the ranks are conserved. The state of a compression goes along with rank 0.

The state of compressions on its way from plan to plan: by variable, as parts of sums.

It is equal on all ranks; rank 0 carries it, so that the sum of the parts is the state, to the bit.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import tensorflow as tf

from tfcommx import compression, routes
from tfcommx.collectives.comm import Comm
from tfcommx.core import Bucket, Piece, Plan, Topology
from tfcommx.kernels.device import residual_device
from tfcommx.runtime import rates


def first_compression(bucket: Bucket) -> np.ndarray:
    """Return the state before the first step of a bucket that compresses; equal on all ranks."""
    return compression.get(bucket.compression).first_state(bucket.shapes)


def compressions_by_variable(
    plan: Plan, kept: Mapping[str, np.ndarray], rank: int
) -> dict[str, np.ndarray]:
    """Return a rank's part of the states of all variables.

    Args:
        plan: under which they were kept.
        kept: bucket name -> float32 [its state]: equal on all ranks.
        rank: whose they are.

    Returns:
        Variable path -> float32: the state on rank 0, nothing on the others. Variables without a
        state are left out.
    """
    buckets = [bucket for bucket in plan.buckets if bucket.name in kept and rank == 0]
    parts = [pair for bucket in buckets for pair in _cut_compression(bucket, kept[bucket.name])]
    return {path: part for path, part in parts if part.size}


def compression_of_bucket(bucket: Bucket, parts: Mapping[str, np.ndarray]) -> np.ndarray:
    """Return this rank's part of a bucket's state: float32 [state entries].

    Zeros for a variable that has none, or one of another length, of another compression.
    """
    empty = np.zeros(sum(_compression_sizes(bucket)), np.float32)
    fitting = [
        parts[path] if path in parts and parts[path].size == zeros.size else zeros
        for path, zeros in _cut_compression(bucket, empty)
    ]
    return np.concatenate(fitting)


def chosen_compression(bucket: Bucket, total: np.ndarray, before: np.ndarray) -> np.ndarray:
    """Return the sum of the ranks' parts; for a variable of which nobody had one, what it was."""
    pairs = zip(_cut_compression(bucket, total), _cut_compression(bucket, before), strict=True)
    return np.concatenate([new if new.any() else old for (_, new), (_, old) in pairs])


def _cut_compression(bucket: Bucket, state: np.ndarray) -> list[tuple[str, np.ndarray]]:
    """Return the variables of a bucket with the parts of its state."""
    parts = np.split(state, np.cumsum(_compression_sizes(bucket))[:-1])
    return list(zip(bucket.variables, parts, strict=True))


def _compression_sizes(bucket: Bucket) -> tuple[int, ...]:
    return compression.get(bucket.compression).state_sizes(bucket.shapes)


# Variable path -> float32 [its size]: what this rank has not sent yet
Residuals = dict[str, np.ndarray]
# What a bucket keeps between steps: attributes of BucketState
KINDS = ("residual", "velocity", "compression")


class VariableState(NamedTuple):
    """What one rank keeps, by variable, without zeros: the form that goes from plan to plan.

    A kind of state is one of KINDS, and a field here and in `PlanState`.
    """

    # Not sent yet
    residuals: Residuals = {}  # noqa: RUF012 - never changed
    # The momentum of a scheme
    velocities: Residuals = {}  # noqa: RUF012 - never changed
    # Of a compression: this rank's part of a sum, of as many entries as the compression counts
    compressions: Residuals = {}  # noqa: RUF012 - never changed

    def of(self, paths: set[str]) -> VariableState:
        """Return what is kept of these variables."""
        return VariableState(*({path: one[path] for path in paths & one.keys()} for one in self))


class PlanState(NamedTuple):
    """What one rank keeps of one plan, as a checkpoint stores it."""

    plan: Plan
    # Taken so far, >= 0
    steps: int
    # Whose state it is
    rank: int
    # Bucket name -> float32 [the rank's shard]
    residuals: dict[str, np.ndarray]
    # Likewise, of buckets with momentum
    velocities: dict[str, np.ndarray]
    # Of the highest learning rate so far: the floor of its log2
    rate_exponent: int = rates.UNKNOWN
    # Bucket name -> float32 [state entries], of buckets that compress; equal on all ranks
    compressions: dict[str, np.ndarray] = {}  # noqa: RUF012 - never changed

    def by_variable(self) -> VariableState:
        """Return the same by variable."""
        kinds = (self.residuals, self.velocities)
        return VariableState(
            *(residuals_by_variable(self.plan, one, self.rank) for one in kinds),
            compressions_by_variable(self.plan, self.compressions, self.rank),
        )


def shard_of(bucket: Bucket, topology: Topology, rank: int) -> slice:
    """Return the part of the bucket's flat vector of which a rank keeps residual and velocity."""
    return slice(*routes.get(bucket.route).shard(bucket, topology, rank))


def residuals_by_variable(plan: Plan, kept: Mapping[str, np.ndarray], rank: int) -> Residuals:
    """Return a rank's part of the residuals, or velocities, by variable, without zeros.

    Args:
        plan: under which they were kept.
        kept: bucket name -> float32 [its shard]; of a dense bucket every rank keeps the sum over
            the ranks.
        rank: whose they are.
    """
    found: Residuals = {}
    lengths = _lengths_of_cut_variables(plan)
    for bucket in plan.buckets:
        if bucket.name not in kept:
            continue
        ranks = 1 if bucket.keeps_residual else plan.topology.size
        whole = np.zeros(bucket.padded, np.float32)
        whole[shard_of(bucket, plan.topology, rank)] = kept[bucket.name] / np.float32(ranks)
        # What follows the last cut is padding, always zero.
        parts = np.split(whole, np.cumsum(bucket.sizes))
        for piece, part in zip(map(Piece.of, bucket.variables), parts, strict=False):
            if not part.any():
                continue
            if piece.stop is None:
                found[piece.path] = part
            else:
                empty = np.zeros(lengths[piece.path], np.float32)
                found.setdefault(piece.path, empty)[piece.start : piece.stop] = part
    return found


def _lengths_of_cut_variables(plan: Plan) -> dict[str, int]:
    lengths: dict[str, int] = {}
    for bucket in plan.buckets:
        for piece in map(Piece.of, bucket.variables):
            lengths[piece.path] = max(lengths.get(piece.path, 0), piece.stop or 0)
    return lengths


def sum_residuals(parts: Sequence[Residuals], factor: float = 1.0) -> Residuals:
    """Add residuals of several plans or ranks, variable by variable, times a factor.

    >>> one, other = np.float32([1, 2]), np.float32([3, 4])
    >>> sum_residuals([{"w": one}, {"w": other}], 0.5)["w"].tolist()
    [2.0, 3.0]
    """
    total: Residuals = {}
    for part in parts:
        for path, values in part.items():
            total[path] = total.get(path, np.float32(0)) + values * np.float32(factor)
    return total


def sum_states(parts: Sequence[VariableState], factor: float = 1.0) -> VariableState:
    """Add what is kept, kind by kind, as `sum_residuals` does; the factor is of gradients alone.

    Of the states of compressions, which are whole, the last one counts. A rank that was not there
    when a checkpoint was saved has no parts:

    >>> sum_states([]) == VariableState()
    True
    """
    *of_gradients, compressions = zip(VariableState(), *parts, strict=True)
    latest = {path: state for part in compressions for path, state in part.items()}
    return VariableState(*(sum_residuals(kind, factor) for kind in of_gradients), latest)


def without(kept: Residuals, paths: set[str]) -> Residuals:
    """Return what is kept of other variables.

    >>> sorted(without({"w": np.ones(1), "b": np.ones(2)}, {"w"}))
    ['b']
    """
    return {path: part for path, part in kept.items() if path not in paths}


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
        self.bucket, self.shard = bucket, shard_of(bucket, topology, rank)
        self.residual = self._zeros("residual") if bucket.keeps_residual else None
        self.velocity = self._zeros("velocity") if bucket.momentum else None
        self.compression = self._first_compression() if bucket.compresses else None
        # Of a bucket that keeps none, but got one from another plan: does any of it remain?
        self.pending: tf.Variable | None = None

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
                first_compression(self.bucket),
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


class ResidualStore:
    """Residuals, velocities and pending flags of all buckets of a plan on this rank."""

    def __init__(self, plan: Plan, comm: Comm) -> None:
        self._plan, self._comm = plan, comm
        self.states = {
            bucket.name: BucketState(bucket, plan.topology, comm.rank) for bucket in plan.buckets
        }
        self.highest_rate = rates.HighestRate()

    def follow_rate(self, rate: tf.Tensor) -> None:
        """Shrink the residuals as the learning rate grows, a float scalar: that of this step."""
        if residuals := self._kept("residual"):
            self.highest_rate.follow(rate, list(residuals.values()))

    def plan_state(self, steps: int) -> PlanState:
        """Return a copy of everything, for a checkpoint; `steps` were taken so far."""
        residuals, velocities, compressions = (
            {name: variable.numpy() for name, variable in self._kept(kind).items()}
            for kind in KINDS
        )
        rate = self.highest_rate.exponent
        return PlanState(
            self._plan, steps, self._comm.rank, residuals, velocities, rate, compressions
        )

    def assign(self, kept: PlanState) -> None:
        """Set what was kept under an equal plan; buckets that it does not name stay."""
        for name, state in self.states.items():
            if name in kept.residuals:
                state.expect_residual()
                state.residual.assign(kept.residuals[name])
            if name in kept.velocities:
                state.velocity.assign(kept.velocities[name])
            if name in kept.compressions:
                state.compression.assign(kept.compressions[name])

    def import_by_variable(self, state: VariableState) -> None:
        """Add what other plans kept; its sums over the ranks are conserved.

        **Ranks:** all, outside of traced code. **Cost:** at most three collectives a bucket.
        """
        for bucket, mine in self._redistributed(state.residuals, self._plan.buckets, "residuals"):
            self.states[bucket.name].expect_residual()
            self.states[bucket.name].residual.assign_add(mine)
        moving = [bucket for bucket in self._plan.buckets if bucket.momentum]
        for bucket, mine in self._redistributed(state.velocities, moving, "velocities"):
            self.states[bucket.name].velocity.assign_add(mine)
        for bucket in (bucket for bucket in self._plan.buckets if bucket.compresses):
            variable = self.states[bucket.name].compression
            part = compression_of_bucket(bucket, state.compressions)
            if any(self._comm.gather_objects(bool(part.any()))):
                name = f"{bucket.name}/import_compression"
                total = self._comm.allreduce(tf.constant(part), "world", name).numpy()
                variable.assign(chosen_compression(bucket, total, variable.numpy()))

    def export_by_variable(self, paths: set[str]) -> VariableState:
        """Return what this rank keeps of these variables, and set it to zero.

        The state of a compression stays, too: it is no part of a gradient.
        """
        state = self.plan_state(0).by_variable().of(paths)
        for kind in ("residual", "velocity"):
            for name, variable in self._kept(kind).items():
                mine = self._entries_of(self.states[name], paths)
                variable.assign(tf.where(mine, 0.0, variable))
        return state

    def release(self) -> None:
        """Free the memory of all residuals and velocities, which nobody reads any more.

        A traced step holds the variables themselves, so each gets an empty value.
        """
        for kind in KINDS:
            for variable in self._kept(kind).values():
                with tf.device(variable.device):
                    # Not `assign`, which keeps to the shape
                    tf.raw_ops.AssignVariableOp(resource=variable.handle, value=tf.zeros([0]))

    def _kept(self, kind: str) -> dict[str, tf.Variable]:
        """Return bucket name -> its variable of a kind, for buckets that have one."""
        found = {name: getattr(state, kind) for name, state in self.states.items()}
        return {name: variable for name, variable in found.items() if variable is not None}

    def _entries_of(self, state: BucketState, paths: set[str]) -> np.ndarray:
        """Return which entries of this rank's shard belong to the variables: bool [its shard]."""
        bucket = state.bucket
        chosen = [Piece.of(name).path in paths for name in bucket.variables]
        whole = np.concatenate([np.repeat(chosen, bucket.sizes), np.zeros(bucket.padding, bool)])
        return whole[state.shard]

    def _redistributed(
        self, kept: Residuals, buckets: Sequence[Bucket], what: str
    ) -> Iterator[tuple[Bucket, tf.Tensor]]:
        """Yield the buckets of which any rank has entries, with the sum for this rank's shard."""
        for bucket in buckets:
            whole = _flat_of(kept, bucket)
            if not any(self._comm.gather_objects(bool(whole.any()))):
                continue
            shard, mine = self.states[bucket.name].shard, tf.constant(whole)
            # My shard of what the ranks of my node have
            if shard.stop - shard.start < bucket.padded:
                mine = self._comm.reduce_scatter(mine, "node", f"{bucket.name}/import_{what}")
            if not bucket.keeps_residual:
                mine = self._comm.allreduce(mine, "world", f"{bucket.name}/import_{what}_sum")
            yield bucket, mine


def _flat_of(kept: Residuals, bucket: Bucket) -> np.ndarray:
    """Return the bucket's flat vector of what is kept by variable; zeros for the others."""
    parts = [
        kept[piece.path][piece.start : piece.stop]
        if piece.path in kept
        else np.zeros(size, np.float32)
        for piece, size in zip(map(Piece.of, bucket.variables), bucket.sizes, strict=True)
    ]
    return np.concatenate([*parts, np.zeros(bucket.padding, np.float32)])

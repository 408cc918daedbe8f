"""Carries out a Plan: gradients in, exchanged gradients out, and what stayed behind kept for the
next step.

    gradients -> per bucket: flat vector -> route (+ residual -> select -> wire -> exchange ->
    merge) -> average -> unflatten

Each bucket is a chain of its own in the TensorFlow graph, so one whose gradients are ready travels
while others are computed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np
import tensorflow as tf

from tfcommx import routes, selection
from tfcommx.comm.base import Comm
from tfcommx.kernels.device import residual_device
from tfcommx.runtime.agreement import agree
from tfcommx.runtime.clipping import clip_before_accumulation
from tfcommx.runtime.flat import cut, flatten, join, unflatten
from tfcommx.runtime.residuals import Residuals, residuals_by_variable
from tfcommx.terms import Bucket, Piece, Plan, Sparse
from tfcommx.wire import codec


class PlanExecutor:
    """A plan with its residuals and velocities on this rank."""

    def __init__(self, plan: Plan, comm: Comm) -> None:
        agree(plan, comm)
        if any(routes.get(bucket.route).needs_messages(bucket) for bucket in plan.buckets):
            comm.open_point_to_point()
        self.plan, self.comm, self._scope = plan, comm, comm.own_scope()
        with tf.device("/cpu:0"):  # seeds and conditions are read on the host
            self.steps = tf.Variable(0, dtype=tf.int64, trainable=False, name="tfcommx/steps")
        self.residuals: dict[str, tf.Variable] = {}
        self.velocities: dict[str, tf.Variable] = {}  # of buckets with momentum
        self._seen: tf.Variable | None = None  # on ranks that do not apply the gradients
        # of dense buckets: is there something left to flush?
        self.pending: dict[str, tf.Variable] = {}
        self._steps_before = 0  # taken by the process that wrote the checkpoint
        for bucket in plan.buckets:
            if bucket.k is not None:
                self._make_residual(bucket)
            if bucket.momentum:
                self.velocities[bucket.name] = self._state(bucket, "velocity")

    # what follows is a graph already, also in a caller's loop
    @tf.autograph.experimental.do_not_convert
    def __call__(self, gradients: Mapping[str, tf.Tensor]) -> dict[str, tf.Tensor]:
        """Return the average (or sum) over all ranks of each gradient.

        Args:
            gradients: variable path -> dense tensor, for exactly the variables of the plan.

        Returns:
            The same paths, shapes and dtypes; bit-identical on every rank that applies them
            (`updates_here`).

        **Ranks:** all, with the same plan; in traced code, or eagerly in the same order.
        **Cost:** per bucket one copy into and one out of the flat vector, and the route.
        """
        with self.comm.scope(self._scope):
            return self._carry_out(gradients)

    def _carry_out(self, gradients: Mapping[str, tf.Tensor]) -> dict[str, tf.Tensor]:
        step = self.steps.assign_add(1)
        whole, gradients = gradients, self._clip(cut(gradients, self.plan))
        result: dict[str, tf.Tensor] = {}
        for index, bucket in enumerate(self.plan.buckets):
            parts = [gradients[path] for path in bucket.variables]
            if (
                routes.get(bucket.route).takes_list
                and bucket.name not in self.pending
                and not bucket.momentum
            ):
                cast = [tf.cast(part, bucket.dtype) for part in parts]
                sums = routes.get(bucket.route).run_list(
                    cast, bucket, self.comm, self.plan.operation == "average"
                )
                result |= {
                    path: tf.cast(total, part.dtype)
                    for path, total, part in zip(bucket.variables, sums, parts, strict=True)
                }
                continue
            flat = flatten(parts, bucket)
            flat = routes.get(bucket.route).run(
                flat, bucket, self.comm, codec, self._selector(bucket, index, step)
            )
            if bucket.momentum and bucket.k is None:
                flat = self._move(bucket, flat)
            flat = self._flush(bucket, flat)
            if self.plan.operation == "average" and self.plan.topology.size > 1:
                flat = flat * tf.constant(1 / self.plan.topology.size, flat.dtype)
            result |= zip(bucket.variables, unflatten(flat, parts, bucket), strict=True)
        return join(result, whole)

    @property
    def updates_here(self) -> bool:
        """Does this rank apply the gradients?"""
        return self.plan.update == "all" or self.comm.rank == 0

    def force_execution(self, results: Sequence[tf.Tensor]) -> tf.Operation | None:
        """On a rank that does not apply the results: see to it that it takes part in their exchange
        all the same.

        TensorFlow drops what nobody uses, and Horovod's ops do not say that others wait for them; a
        control dependency on their results does not keep them either. Assigning an entry of each to
        a variable does.
        """
        seen = tf.stack(
            [
                tf.cast(tf.reshape(result, [-1])[0], tf.float32)
                for result in results
                if result.shape.num_elements()
            ]
        )
        if self._seen is None:
            with tf.init_scope(), tf.device("/cpu:0"):
                self._seen = tf.Variable(tf.zeros(seen.shape), trainable=False, name="tfcommx/seen")
        return self._seen.assign(seen, read_value=False)

    @tf.autograph.experimental.do_not_convert
    def share(self, weights: Mapping[str, tf.Variable]) -> None:
        """After an update, set the weights to rank 0's, where the plan says so at this step.

        Args:
            weights: variable path -> variable, for exactly the variables of the plan.

        **Ranks:** all. **Cost:** per bucket one broadcast, every step with `update="root"`, else
        every `broadcast_every` steps.
        **Source:** Wang et al., "Efficient Communications in Training Large Scale Neural Networks"
        (2016), Algorithms 2 and 3.
        """
        every = 1 if self.plan.update == "root" else self.plan.broadcast_every
        with self.comm.scope(self._scope):
            if every == 1:
                self._broadcast(weights)
            elif every:
                tf.cond(self.steps % every == 0, lambda: self._broadcast(weights), lambda: None)

    def _broadcast(self, weights: Mapping[str, tf.Variable]) -> None:
        whole = {path: tf.convert_to_tensor(variable) for path, variable in weights.items()}
        pieces, result = cut(whole, self.plan), {}
        for bucket in self.plan.buckets:
            parts = [pieces[path] for path in bucket.variables]
            flat = flatten(parts, bucket)
            flat = routes.get(bucket.route).broadcast(flat, bucket, self.comm)
            result |= zip(bucket.variables, unflatten(flat, parts, bucket), strict=True)
        for path, value in join(result, whole).items():
            weights[path].assign(value)

    def dense_bytes_between_nodes(self) -> float:
        """Return what plain Horovod would have sent between nodes for the steps of this process so
        far, per rank (mean).
        """
        topology, steps = self.plan.topology, int(self.steps.numpy()) - self._steps_before
        return float(steps) * sum(
            routes.get("allreduce").wire_bytes(bucket, topology).between
            for bucket in self.plan.buckets
        )

    def import_residuals(self, owed: Residuals, velocity: Residuals | None = None) -> None:
        """Add what ranks owed, and their velocities, under another plan, so that the sums over the
        ranks are conserved.

        On a sparse route it goes into the residual (the velocity) of the rank that selects from its
        place; on a dense one every rank gets the sum of what is owed, to add it to the next
        gradients' sum, and the sum of the velocities.
        **Ranks:** all, outside of traced code.
        """
        for bucket, mine in self._shares(owed, self.plan.buckets, "import_residuals"):
            self._for_leftovers(bucket)
            self.residuals[bucket.name].assign_add(mine)
        moving = [bucket for bucket in self.plan.buckets if bucket.momentum]
        for bucket, mine in self._shares(velocity or {}, moving, "take_over_velocity"):
            self.velocities[bucket.name].assign_add(mine)

    def export_residuals(self, paths: set[str]) -> tuple[Residuals, Residuals]:
        """Return, and forget here, this rank's part of what it owes these variables, and of their
        velocities.

        **Ranks:** all, outside of traced code.
        """
        handed: list[Residuals] = []
        for kept in (self.residuals, self.velocities):
            owed = residuals_by_variable(
                self.plan, {name: state.numpy() for name, state in kept.items()}, self.comm.rank
            )
            handed.append({path: owed[path] for path in paths & set(owed)})
            for bucket in self.plan.buckets:
                if bucket.name in kept:
                    theirs = np.repeat(
                        [Piece.of(name).path in paths for name in bucket.variables], bucket.sizes
                    )
                    start, stop = routes.get(bucket.route).shard(
                        bucket, self.plan.topology, self.comm.rank
                    )
                    mine = np.concatenate([theirs, np.zeros(bucket.padding, bool)])[start:stop]
                    kept[bucket.name].assign(tf.where(mine, 0.0, kept[bucket.name]))
        return handed[0], handed[1]

    def _shares(
        self, owed: Residuals, buckets: Sequence[Bucket], what: str
    ) -> Iterator[tuple[Bucket, tf.Tensor]]:
        """Yield the buckets of which any rank owes something, with this rank's shard of it."""
        for bucket in buckets:
            parts = [
                owed[piece.path][piece.start : piece.stop]
                if piece.path in owed
                else np.zeros(size, np.float32)
                for piece, size in zip(map(Piece.of, bucket.variables), bucket.sizes, strict=True)
            ]
            whole = np.concatenate([*parts, np.zeros(bucket.padding, np.float32)])
            if not any(self.comm.gather_objects(bool(whole.any()))):
                continue
            start, stop = routes.get(bucket.route).shard(bucket, self.plan.topology, self.comm.rank)
            mine = tf.constant(whole)
            if stop - start < bucket.padded:  # my part of what the ranks of my node owe
                mine = self.comm.reduce_scatter(mine, "node", f"{bucket.name}/{what}")
            if bucket.k is None:
                mine = self.comm.allreduce(mine, "world", f"{bucket.name}/{what}_sum")
            yield bucket, mine

    def continue_from(
        self, steps: int, residuals: Mapping[str, np.ndarray], velocities: Mapping[str, np.ndarray]
    ) -> None:
        """Set the step count, residuals and velocities (bucket name -> float32 [its shard]) of this
        rank under an equal plan.
        """
        self.steps.assign(steps)
        self._steps_before = steps
        for bucket in self.plan.buckets:
            if bucket.name in residuals:
                self._for_leftovers(bucket)
                self.residuals[bucket.name].assign(residuals[bucket.name])
            if bucket.name in velocities:
                self.velocities[bucket.name].assign(velocities[bucket.name])

    def _for_leftovers(self, bucket: Bucket) -> None:
        if bucket.name not in self.residuals:
            self._make_residual(bucket)
            with tf.device("/cpu:0"):
                self.pending[bucket.name] = tf.Variable(True, trainable=False)
        if bucket.name in self.pending:
            self.pending[bucket.name].assign(True)

    def _make_residual(self, bucket: Bucket) -> None:
        self.residuals[bucket.name] = self._state(bucket, "residual")

    def _state(self, bucket: Bucket, what: str) -> tf.Variable:
        start, stop = routes.get(bucket.route).shard(bucket, self.plan.topology, self.comm.rank)
        with tf.device(residual_device()):
            return tf.Variable(
                tf.zeros(stop - start), trainable=False, name=f"{bucket.name}/{what}"
            )

    def _clip(self, gradients: Mapping[str, tf.Tensor]) -> dict[str, tf.Tensor]:
        """Clip, together, what all buckets with the same clip_norm hold."""
        clipped = dict(gradients)
        for norm in {
            bucket.clip_norm for bucket in self.plan.buckets if bucket.clip_norm is not None
        }:
            paths = [
                path
                for bucket in self.plan.buckets
                if bucket.clip_norm == norm
                for path in bucket.variables
            ]
            parts = [gradients[path] for path in paths]
            parts = clip_before_accumulation(
                parts, norm, self.plan.topology.size, self.plan.operation
            )
            clipped |= zip(paths, parts, strict=True)
        return clipped

    def _move(self, bucket: Bucket, flat: tf.Tensor) -> tf.Tensor:
        """On a dense route: momentum of the sum over the ranks, equal on all. What is NaN or
        infinite does not stay.
        """
        velocity = self.velocities[bucket.name]
        moved = bucket.momentum * velocity + tf.cast(flat, tf.float32)
        velocity.assign(tf.where(tf.math.is_finite(moved), moved, velocity))
        return tf.cast(moved, flat.dtype)

    def _selector(
        self, bucket: Bucket, index: int, step: tf.Tensor
    ) -> Callable[[tf.Tensor], Sparse] | None:
        if bucket.k is None:
            return None
        rule, kept, velocity = (
            selection.rule(bucket.selection),
            self.residuals[bucket.name],
            self.velocities.get(bucket.name),
        )
        place = (
            (bucket.seed * len(self.plan.buckets) + index) * self.plan.topology.size
            + self.comm.rank
        ) % 2**63
        with tf.device("/cpu:0"):
            seed = step * 2**20 + place  # each step, bucket and rank draws its own numbers

        def select(part: tf.Tensor) -> Sparse:
            sparse, left = codec.rounded(
                rule.select_with_residual(part, kept, bucket.k, seed, velocity, bucket.momentum),
                bucket.wire,
            )
            if left is not None:  # the selection has set the residual to zero at these indices
                kept.scatter_add(tf.IndexedSlices(left, sparse.indices))
            return sparse

        return select

    def _flush(self, bucket: Bucket, flat: tf.Tensor) -> tf.Tensor:
        """On a dense route: add what sparse ones left, after momentum, which it has had; what its
        dtype cannot carry stays.

        Equal on all ranks, as the sum that it is added to.
        """
        if bucket.name not in self.pending:
            return flat
        kept, pending = self.residuals[bucket.name], self.pending[bucket.name]

        def add() -> tf.Tensor:
            owed, wide = kept.value(), tf.float64 if flat.dtype == tf.float64 else tf.float32
            whole = tf.cast(flat, wide) + tf.cast(owed, wide)
            sent = tf.cast(whole, flat.dtype)
            left = tf.where(
                tf.math.is_finite(sent), tf.cast(whole - tf.cast(sent, wide), tf.float32), owed
            )
            with tf.control_dependencies([left]):
                kept.assign(left)
                pending.assign(tf.reduce_any(left != 0))
            return tf.identity(sent)

        return tf.cond(pending, add, lambda: tf.identity(flat))

"""BucketRunner: the exchange of one bucket in a step.

    gradients -> clip -> flat vector -> select, or compress -> route -> average -> gradients
                                        the rest is the residual

Other files of this package use the table of routes only for shards, prices and `needs_messages`.
"""

import functools
import itertools
import math
from collections.abc import Mapping, Sequence

import tensorflow as tf

from tfcommx import compression, routes, selection
from tfcommx.collectives.comm import Comm
from tfcommx.core import DENSE_CODES, Bucket, Piece, Plan, Sparse
from tfcommx.kernels.sparse import keep
from tfcommx.routes.compressed import vectors
from tfcommx.routes.route import DenseRoute, ListRoute, SparseRoute
from tfcommx.runtime.residuals import BucketState
from tfcommx.wire import codec


def cut(gradients: Mapping[str, tf.Tensor], plan: Plan) -> dict[str, tf.Tensor]:
    """Return the gradients by the plan's names, with some variables cut in pieces.

    Args:
        gradients: variable path -> tensor, any shape.

    Returns:
        Name in the plan -> the tensor itself, or a flat stretch of it.
    """
    pieces: dict[str, tf.Tensor] = {}
    for piece in [Piece.of(name) for bucket in plan.buckets for name in bucket.variables]:
        tensor = gradients[piece.path]
        # A plan cuts variables on sparse routes that are too long for int32 indices
        if piece.stop is not None:
            size = piece.stop - piece.start
            tensor = tf.slice(tf.reshape(tensor, [-1]), [piece.start], [size])
        pieces[piece.name] = tensor
    return pieces


def join(pieces: Mapping[str, tf.Tensor], like: Mapping[str, tf.Tensor]) -> dict[str, tf.Tensor]:
    """Undo `cut`: paths and shapes as in `like`."""
    parts: dict[str, list[tuple[int, tf.Tensor]]] = {}
    for name, tensor in pieces.items():
        piece = Piece.of(name)
        parts.setdefault(piece.path, []).append((piece.start, tensor))
    joined: dict[str, tf.Tensor] = {}
    for path, numbered in parts.items():
        # Sorted by the start alone, because tensors have no order
        tensors = [tensor for _, tensor in sorted(numbered, key=lambda part: part[0])]
        joined[path] = tensors[0]
        if len(tensors) > 1:
            joined[path] = tf.reshape(tf.concat(tensors, axis=0), like[path].shape)
    return joined


def flatten(parts: Sequence[tf.Tensor], bucket: Bucket) -> tf.Tensor:
    """Return a bucket's tensors as one vector in its dtype, with padding at the end.

    **Cost:** one copy; none if the bucket holds one variable of its dtype, without padding.
    """
    flat = [tf.cast(tf.reshape(part, [-1]), bucket.dtype) for part in parts]
    if bucket.padding:
        flat.append(tf.zeros([bucket.padding], bucket.dtype))
    return tf.concat(flat, axis=0)


def unflatten(flat: tf.Tensor, parts: Sequence[tf.Tensor], bucket: Bucket) -> list[tf.Tensor]:
    """Undo `flatten`: shapes and dtypes as in `parts`; the padding is dropped.

    **Cost:** one copy of each stretch, except those whose ends are multiples of 64 bytes.
    """
    ends = itertools.accumulate(bucket.sizes)
    # Not by tf.split, because it copies every stretch
    return [
        tf.cast(tf.reshape(tf.slice(flat, [end - size], [size]), part.shape), part.dtype)
        for size, end, part in zip(bucket.sizes, ends, parts, strict=True)
    ]


def clip_before_accumulation(
    gradients: Sequence[tf.Tensor], norm: float, ranks: int, operation: str = "sum"
) -> list[tf.Tensor]:
    """Scale a rank's gradients together so that their result over the ranks has about this norm.

    The limit of one rank is norm / sqrt(ranks) for "sum", because squared norms of independent
    gradients add up, and norm * sqrt(ranks) for "average", which divides by the number of ranks
    afterwards. If the joint norm is NaN or infinite, the gradients stay unchanged.

    >>> (clipped,) = clip_before_accumulation([tf.constant([3.0, 4.0])], norm=1.0, ranks=4)
    >>> print(clipped.numpy().round(3))
    [0.3 0.4]

    Args:
        gradients: float, any shapes.
        norm: the largest norm of the sum (or average) over the ranks, > 0.
        ranks: number of ranks, >= 1.
        operation: "sum" or "average" over the ranks.

    Returns:
        The gradients, scaled by one factor in (0, 1], with their shapes and dtypes.

    **Ranks:** local. **Cost:** two passes; no gradient is returned before the last one exists.
    **Source:** Lin et al., "Deep Gradient Compression" (2018), section 3.3, which sums gradients
    divided by the number of ranks.
    """
    # Squared norms of independent gradients add up; an average divides by their number after that
    limit = norm * ranks ** (0.5 if operation == "average" else -0.5)
    # In float32, because the square of a float16 above 255 is infinite
    length = tf.linalg.global_norm([tf.cast(gradient, tf.float32) for gradient in gradients])
    # Unchanged if NaN or Inf is among them, which must reach every rank
    scale = tf.where(tf.math.is_finite(length) & (length > limit), limit / length, 1.0)

    def scaled(gradient: tf.Tensor) -> tf.Tensor:
        # Because float16 may be unable to hold the scale
        wide = tf.float32 if gradient.dtype.size < 4 else gradient.dtype
        return tf.cast(tf.cast(gradient, wide) * tf.cast(scale, wide), gradient.dtype)

    return [scaled(gradient) for gradient in gradients]


def clip_buckets(gradients: Mapping[str, tf.Tensor], plan: Plan) -> dict[str, tf.Tensor]:
    """Clip the gradients of all buckets with the same `clip_norm` together.

    Args:
        gradients: name in the plan -> tensor, of all variables and pieces of the plan.
    """
    clipped = dict(gradients)
    norms = {bucket.clip_norm for bucket in plan.buckets if bucket.clip_norm is not None}
    # Buckets share one factor, because with a factor for each of them the direction of the update
    # would depend on the merging
    for norm in norms:
        names = [
            name for bucket in plan.buckets if bucket.clip_norm == norm for name in bucket.variables
        ]
        parts = clip_before_accumulation(
            [gradients[name] for name in names], norm, plan.topology.size, plan.operation
        )
        clipped |= zip(names, parts, strict=True)
    return clipped


class BucketSelector:
    """The selection of one bucket on this rank: its rule, residual, velocity and seeds."""

    def __init__(self, plan: Plan, index: int, state: BucketState, comm: Comm) -> None:
        self.bucket, self.state = plan.buckets[index], state
        assert self.bucket.k is not None
        self._rule, self._k = selection.rule(self.bucket.selection), self.bucket.k
        # Consecutive numbers for all pairs of bucket and rank. A step is 2^20 apart in `seed`, so
        # no two steps share a seed while there are fewer pairs than that
        stream = (self.bucket.seed * len(plan.buckets) + index) * plan.topology.size + comm.rank
        self._stream = stream % 2**63

    def seed(self, step: tf.Tensor) -> tf.Tensor:
        """Return the int64 seed of a step, which differs between steps, buckets and ranks."""
        with tf.device("/cpu:0"):
            return step * 2**20 + self._stream

    def select(self, part: tf.Tensor, seed: tf.Tensor) -> Sparse:
        """Choose k entries of this rank's shard + residual, rounded; the rest is the residual."""
        bucket, state = self.bucket, self.state
        chosen = self._rule.select_with_residual(
            part, state.residual, self._k, seed, state.velocity, bucket.momentum
        )
        sparse, rounding_error = codec.rounded(chosen, bucket.wire)
        if rounding_error is not None:
            # The selection has set these entries to 0. One native op writes their errors, in 1.8 ms
            # for 800,000 where six ops of TensorFlow took 4.7
            keep(state.residual, chosen, rounding_error)
        return sparse


class Compressor:
    """The compression of one bucket on this rank, with error feedback around it.

    A rank whose gradients are not finite sends NaN or Inf, so that all ranks see it with any
    compression.
    """

    def __init__(self, bucket: Bucket, state: BucketState, comm: Comm) -> None:
        self.bucket, self.state, self._comm = bucket, state, comm
        self._compression = compression.get(bucket.compression)
        self._route = routes.get(bucket.route)
        self._vectors = vectors(bucket, self._route, comm.topology)

    def exchange(self, flat: tf.Tensor) -> tf.Tensor:
        """Return the sum over the ranks of the sent part of gradient + residual.

        The unsent part stays in the residual, to float32 rounding.

        Args:
            flat: float32 [bucket.padded].

        **Ranks:** all; the result has the same bits on each.
        **Cost:** the compression's, its sums, and some 9 passes over the vector: four of them are
        copies between the vector and its variables, two look for NaN.
        """
        state = self.state
        full = flat + state.residual
        shapes = [tf.TensorSpec(shape) for shape in self.bucket.shapes]
        parts = unflatten(full, shapes, self.bucket)
        waiting = iter(self._vectors)
        # 0, or a NaN or Inf. Added to each vector, because that must reach all ranks even if the
        # compression leaves it out of its vectors. Not a constant NaN, because
        # `tf.debugging.enable_check_numerics` would raise at it
        total = tf.reduce_sum(full)
        poison = tf.where(tf.math.is_finite(total), 0.0, total)
        sums = []

        def add(vector: tf.Tensor) -> tf.Tensor:
            sums.append(self._add(vector + poison, next(waiting, None)))
            return sums[-1]

        done = self._compression.run(parts, state.compression.value(), add)
        if next(waiting, None) is not None:
            raise self._miscounted()
        unsent = full - flatten(done.sent, self.bucket)
        # Neither may ever hold NaN or Inf. `usable` is equal on all ranks, because a compression's
        # state must be kept or replaced on all of them alike; `unsent` is this rank's own
        usable = tf.reduce_all([_is_finite(value) for value in (*sums, done.state)])
        _assign_if(usable, state.compression, done.state)
        _assign_if(usable & _is_finite(unsent), state.residual, unsent)
        return flatten(done.totals, self.bucket)

    def _add(self, vector: tf.Tensor, described: Bucket | None) -> tf.Tensor:
        """Return the sum of one of the compression's vectors over the ranks."""
        if described is None or vector.shape != [described.size]:
            raise self._miscounted()
        padded = flatten([vector], described)
        assert isinstance(self._route, DenseRoute), "plans let no other compress"
        total = self._route.run(padded, described, self._comm, codec.Codec())
        return total[: described.size]

    def _miscounted(self) -> ValueError:
        return ValueError(
            f"The compression {self.bucket.compression!r} must add the vectors that its `sums` "
            f"counts: of {[vector.size for vector in self._vectors]} entries for the shapes "
            f"{list(self.bucket.shapes)}. It added others."
        )


def _assign_if(wanted: tf.Tensor, variable: tf.Variable, value: tf.Tensor) -> None:
    """Assign if `wanted`; not by tf.where, because it would make a copy."""
    variable.assign(tf.cond(wanted, lambda: value, variable.value))


def _is_finite(vector: tf.Tensor) -> tf.Tensor:
    """Return True if the sum of all entries is finite, a check for NaN and Inf in one pass."""
    # By a sum, because `reduce_all(is_finite)` writes a vector of flags: with one copy less, the
    # error feedback of ResNet-50 took 24 ms in place of 38. A sum that overflows counts as infinite
    return tf.math.is_finite(tf.reduce_sum(vector))


class BucketRunner:
    """Exchanges one bucket of a plan on this rank, with its route, selection and state."""

    def __init__(self, plan: Plan, index: int, state: BucketState, comm: Comm) -> None:
        """Decide how the plan's bucket number `index` is exchanged; `state` is this rank's."""
        bucket = plan.buckets[index]
        self.bucket, self.state, self._comm = bucket, state, comm
        self._route = routes.get(bucket.route)
        # True if this bucket is a plain allreduce: no residual, momentum or pending state, which
        # need it as a flat vector
        changed = bucket.keeps_residual or bucket.momentum or state.pending is not None
        # A list of tensors needs no flat vector, whose copies had made plain allreduces 1.13 times
        # as slow as Horovod's
        self.is_plain = isinstance(self._route, ListRoute) and not changed
        self._average = plan.operation == "average"
        # The result is the sum over the ranks times this factor
        self.factor = 1 / plan.topology.size if self._average else 1.0
        # A power of two may multiply the received entries instead of the whole vector, because the
        # bits are the same, except for numbers too small or large for float32
        exact = bucket.k is not None and math.frexp(self.factor)[0] == 0.5
        self.codec = codec.Codec(self.factor if exact else 1.0)
        if bucket.wire in DENSE_CODES:
            # Both routes that write codes cut the vector into a shard for each rank
            shard, real = bucket.padded // plan.topology.size, bucket.size - state.shard.start
            self.codec = codec.CodesCodec(state.residual, shard, real, self.factor)
        elif bucket.rounds:
            self.codec = codec.RoundingCodec(state.residual, self.factor)
        self._factor_after = 1.0 if exact or bucket.rounds else self.factor
        self.selector = None if bucket.k is None else BucketSelector(plan, index, state, comm)
        self.compressor = Compressor(bucket, state, comm) if bucket.compresses else None

    def exchange(self, parts: Sequence[tf.Tensor], step: tf.Tensor) -> list[tf.Tensor]:
        """Return the average (or sum) over the ranks of each of the bucket's tensors.

        Args:
            parts: this rank's gradients, in the order of the bucket's variables.
            step: int64, the number of this step, from 1.

        **Ranks:** all. **Cost:** one copy into and one out of the flat vector, and the route.
        """
        # TensorFlow would prune this exchange on a rank whose graph reads no entry of the result,
        # as with strategy="root", and the others would wait for it
        if not self.bucket.size:
            return list(parts)
        if self.is_plain:
            assert isinstance(self._route, ListRoute), "is_plain says so"
            cast = [tf.cast(part, self.bucket.dtype) for part in parts]
            totals = self._route.run_list(cast, self.bucket, self._comm, self._average)
            return [tf.cast(total, part.dtype) for total, part in zip(totals, parts, strict=True)]
        total = self._sum(flatten(parts, self.bucket), step)
        if self._factor_after != 1:
            total = total * tf.constant(self._factor_after, total.dtype)
        return unflatten(total, parts, self.bucket)

    def broadcast(self, parts: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Return rank 0's tensors, such as the weights of the bucket's variables, on every rank.

        **Ranks:** all. **Cost:** one broadcast, by the route's own messages if it has any.
        """
        if not self.bucket.size:
            return list(parts)
        flat = self._route.broadcast(flatten(parts, self.bucket), self.bucket, self._comm)
        return unflatten(flat, parts, self.bucket)

    def _sum(self, flat: tf.Tensor, step: tf.Tensor) -> tf.Tensor:
        """Return the sum over the ranks of the sent part of the flat vector."""
        if self.compressor is not None:
            return self.compressor.exchange(flat)
        route = self._route
        if self.selector is not None and isinstance(route, SparseRoute):
            # The route calls it, because some routes add the gradients of a node first
            select = functools.partial(self.selector.select, seed=self.selector.seed(step))
            return route.run(flat, self.bucket, self._comm, self.codec, select)
        assert isinstance(route, DenseRoute), "a sparse route has a selector"
        total = route.run(flat, self.bucket, self._comm, self.codec)
        # Earlier residuals are added after momentum, because it was applied to them already
        return self.state.add_residual(self.state.add_velocity(total))

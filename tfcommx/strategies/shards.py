"""Shards: which entries of the weights each rank updates, and in which batches they are pulled.

    bucket of the plan    |      b0       |  b1  |     reduce-scatter of its gradients
    batch of layers       |   1   |     0        |     all-gather of its weights
    segment               |  s2   |  s1   |  s0  |     one flat shard on each rank

A segment holds whole variables of one batch, one bucket, one dtype, that all decay or all do not.
It is padded so that each of p ranks owns an equal part: rank r entries [r n, (r + 1) n).
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import keras
import numpy as np
import tensorflow as tf

from tfcommx.terms import Piece, Plan, PlanError

# What Horovod carries
DTYPES = ("float16", "float32", "float64")


@dataclass(frozen=True)
class Segment:
    """Variables that lie one after another in a flat vector, of which each rank owns a part."""

    # Unique
    name: str
    # Paths of whole variables, in the order of the plan
    paths: tuple[str, ...]
    # Entries of each
    sizes: tuple[int, ...]
    # Of the weights
    dtype: str
    # Whether the optimizer's weight decay applies
    decays: bool
    # Which batch of layers they are pulled with, from 0
    batch: int
    # Name of the bucket of their gradients
    bucket: str
    # Number of ranks, >= 1
    ranks: int

    @property
    def length(self) -> int:
        """Entries of one rank's shard."""
        return -(-sum(self.sizes) // self.ranks)

    def flatten(self, tensors: Mapping[str, tf.Tensor], dtype: str) -> tf.Tensor:
        """Return all variables as one flat vector of a dtype, with its padding."""
        parts = [tf.cast(tf.reshape(tensors[path], [-1]), dtype) for path in self.paths]
        if padding := self.length * self.ranks - sum(self.sizes):
            parts.append(tf.zeros([padding], dtype))
        return tf.concat(parts, axis=0) if len(parts) > 1 else parts[0]

    def unflatten(self, flat: tf.Tensor, shapes: Mapping[str, tf.TensorShape]) -> dict:
        """Return path -> tensor from a flat vector with padding."""
        padding = self.length * self.ranks - sum(self.sizes)
        pieces = tf.split(flat, [*self.sizes, padding])
        return {
            path: tf.reshape(piece, shapes[path])
            for path, piece in zip(self.paths, pieces, strict=False)
        }

    def parts_of(self, rank: int) -> Iterator[tuple[str, int, int]]:
        """Yield (path, start, stop): the stretches of variables that are a rank's shard."""
        first, last = rank * self.length, (rank + 1) * self.length
        ends = itertools.accumulate(self.sizes, initial=0)
        for path, size, begin in zip(self.paths, self.sizes, ends, strict=False):
            start, stop = max(first - begin, 0), min(last - begin, size)
            if start < stop:
                yield path, start, stop

    def shard_of(self, tensors: Mapping[str, tf.Tensor], rank: int) -> tf.Tensor:
        """Return a rank's shard of these variables. **Cost:** one copy of the shard."""
        parts = [
            tf.reshape(tensors[path], [-1])[start:stop] for path, start, stop in self.parts_of(rank)
        ]
        if padding := self.length - sum(part.shape[0] for part in parts):
            parts.append(tf.zeros([padding], self.dtype))
        return tf.concat(parts, axis=0) if len(parts) > 1 else parts[0]


def lay_out(
    plan: Plan,
    paths: Sequence[str],
    dtypes: Sequence[str],
    decays: Sequence[bool],
    batches: Sequence[tuple[int, int]],
) -> list[Segment]:
    """Return the segments in the order of the plan's buckets.

    Args:
        plan: covers exactly these variables.
        paths, dtypes, decays: of the variables in forward order.
        batches: [start, stop) of the variables that are pulled together, in forward order.

    Returns:
        Segments, each variable in exactly one.

    **Raises:** PlanError for a dtype that cannot be gathered.
    """
    position = {path: number for number, path in enumerate(paths)}
    batch_of = [n for n, (start, stop) in enumerate(batches) for _ in range(start, stop)]
    sizes: dict[str, int] = {}
    members: dict[tuple[str, int, str, bool], list[str]] = {}
    for bucket in plan.buckets:
        for name, size in zip(bucket.variables, bucket.sizes, strict=True):
            path = Piece.of(name).path
            sizes[path] = sizes.get(path, 0) + size
            if sizes[path] > size:
                continue  # A further piece: the variable has its place
            at = position[path]
            if dtypes[at] not in DTYPES:
                raise PlanError(
                    f"Shards have one of the dtypes {', '.join(DTYPES)}. Received {dtypes[at]} of "
                    f'{path!r}. Take another dtype, or strategy="synchronous".'
                )
            key = (bucket.name, batch_of[at], dtypes[at], decays[at])
            members.setdefault(key, []).append(path)
    return [
        Segment(
            name=f"shard{number}",
            paths=tuple(found),
            sizes=tuple(sizes[path] for path in found),
            dtype=dtype,
            decays=decaying,
            batch=batch,
            bucket=bucket,
            ranks=plan.topology.size,
        )
        for number, ((bucket, batch, dtype, decaying), found) in enumerate(members.items())
    ]


class Shards:
    """This rank's shards of a model's weights, and whether the weights themselves are current."""

    def __init__(
        self, segments: Sequence[Segment], weights: Mapping[str, tf.Variable], rank: int
    ) -> None:
        """Make the shards. `weights` are those of all segments, by path, in forward order."""
        self.segments, self.weights, self.rank = list(segments), dict(weights), rank
        # Whether a step function has said that it pulls at its beginning; while it is traced
        self.pulls_first = False
        with tf.init_scope():
            self.variables = [
                keras.Variable(
                    np.zeros(segment.length, segment.dtype), segment.dtype, name=segment.name
                )
                for segment in segments
            ]
            with tf.device("/cpu:0"):
                # The weights are as new as the shards, or somebody has set them
                self.current = tf.Variable(True, trainable=False, name="tfcommx/current")

    def rename(self, paths: Sequence[str]) -> None:
        """Call the variables by other paths, given in forward order."""
        new = dict(zip(self.weights, paths, strict=True))
        self.segments = [
            dataclasses.replace(one, paths=tuple(new[path] for path in one.paths))
            for one in self.segments
        ]
        self.weights = {new[path]: variable for path, variable in self.weights.items()}

    @property
    def shapes(self) -> dict[str, tf.TensorShape]:
        """Path -> shape of the whole variable."""
        return {path: variable.shape for path, variable in self.weights.items()}

    def batches(self) -> list[list[int]]:
        """Return the positions of the segments of each batch and dtype, in the order of pulls."""
        keys = sorted({(one.batch, one.dtype) for one in self.segments})
        return [
            [i for i, one in enumerate(self.segments) if (one.batch, one.dtype) == key]
            for key in keys
        ]

    def take_from_weights(self) -> None:
        """Set the shards to their entries of the weights, if those are current."""
        current = self.current.read_value()
        for segment, shard in zip(self.segments, self.variables, strict=True):
            value = tf.cond(
                current,
                lambda segment=segment: segment.shard_of(self.weights, self.rank),
                shard.value.read_value,
            )
            shard.assign(value)

    def squares(self, gradients: Sequence[tf.Tensor]) -> dict[str, tf.Tensor]:
        """Return path -> sum of squares of this rank's part of a gradient, float32."""
        found = {path: tf.zeros([]) for path in self.weights}
        for segment, gradient in zip(self.segments, gradients, strict=True):
            at = 0
            for path, start, stop in segment.parts_of(self.rank):
                part = tf.cast(gradient[at : at + stop - start], tf.float32)
                found[path] += tf.reduce_sum(part * part)
                at += stop - start
        return found

    def scale(
        self, gradients: Sequence[tf.Tensor], factors: Mapping[str, tf.Tensor]
    ) -> list[tf.Tensor]:
        """Return the gradients of shards, each variable's part times its factor."""
        scaled = []
        for segment, gradient in zip(self.segments, gradients, strict=True):
            parts, at = [], 0
            for path, start, stop in segment.parts_of(self.rank):
                part = gradient[at : at + stop - start]
                parts.append(part * tf.cast(factors[path], part.dtype))
                at += stop - start
            scaled.append(tf.concat([*parts, gradient[at:]], axis=0))
        return scaled

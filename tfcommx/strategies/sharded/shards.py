"""Shards: the entries of the weights that each rank updates.

    bucket of the plan    |      b0       |  b1  |     reduce-scatter of its gradients
    batch of layers       |   1   |     0        |     all-gather of its weights
    segment               |  s2   |  s1   |  s0  |     one flat shard on each rank

A segment holds whole variables of one batch, one bucket, one dtype, that all decay or all do not.
It is padded so that each of p ranks owns an equal part: rank r entries [r n, (r + 1) n). The p
ranks are those of a group: of the world, of a node, or the peers.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import keras
import numpy as np
import tensorflow as tf

from tfcommx.collectives.comm import Comm
from tfcommx.core import Piece, Plan, PlanError

# What Horovod carries
DTYPES = ("float16", "float32", "float64")
# What an optimizer keeps of each variable that it updates: attribute -> one for each, or None
Slots = Mapping[str, Sequence[keras.Variable | None]]
# The same of whole variables: attribute -> path -> array
WholeSlots = dict[str, dict[str, np.ndarray]]


@dataclass(frozen=True)
class Segment:
    """Variables that lie one after another in a flat vector, of which each rank owns a part."""

    # Unique
    name: str
    # Paths of whole variables, in the order of the vector
    paths: tuple[str, ...]
    # Entries of each
    sizes: tuple[int, ...]
    # Where each begins in the vector; what lies between them is padding
    starts: tuple[int, ...]
    # Entries of one rank's shard
    length: int
    # Of the weights
    dtype: str
    # Whether the optimizer's weight decay applies to each
    decays: tuple[bool, ...]
    # Which batch of layers they are pulled with, from 0
    batch: int
    # Name of the bucket of their gradients; "" if they are of several
    bucket: str
    # Number of ranks, >= 1
    ranks: int

    def _stretches(self) -> list[tuple[str | None, int]]:
        """Return what the vector is made of: (path, entries), and (None, entries) of padding."""
        found: list[tuple[str | None, int]] = []
        at = 0
        for path, size, start in zip(self.paths, self.sizes, self.starts, strict=True):
            found += [(None, start - at), (path, size)]
            at = start + size
        found.append((None, self.length * self.ranks - at))
        return [one for one in found if one != (None, 0)]

    def flatten(self, tensors: Mapping[str, tf.Tensor], dtype: str) -> tf.Tensor:
        """Return all variables as one flat vector of a dtype, with its padding."""
        parts = [
            tf.zeros([size], dtype)
            if path is None
            else tf.cast(tf.reshape(tensors[path], [-1]), dtype)
            for path, size in self._stretches()
        ]
        return tf.concat(parts, axis=0) if len(parts) > 1 else parts[0]

    def unflatten(
        self, flat: tf.Tensor, shapes: Mapping[str, tf.TensorShape]
    ) -> dict[str, tf.Tensor]:
        """Return path -> tensor from a flat vector with padding."""
        stretches = self._stretches()
        pieces = tf.split(flat, [size for _, size in stretches])
        return {
            path: tf.reshape(piece, shapes[path])
            for (path, _), piece in zip(stretches, pieces, strict=True)
            if path is not None
        }

    def parts_of(self, rank: int) -> Iterator[tuple[str, int, int]]:
        """Yield (path, start, stop): the stretches of variables that are a rank's shard."""
        first, last = rank * self.length, (rank + 1) * self.length
        for path, size, begin in zip(self.paths, self.sizes, self.starts, strict=True):
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


def sizes_of(plan: Plan) -> dict[str, tuple[str, int]]:
    """Return path -> (the bucket where it begins, its entries) of each variable of a plan."""
    found: dict[str, tuple[str, int]] = {}
    for bucket in plan.buckets:
        for name, size in zip(bucket.variables, bucket.sizes, strict=True):
            path = Piece.of(name).path
            first, before = found.get(path, (bucket.name, 0))
            found[path] = first, before + size
    return found


def require_carried(dtypes: Mapping[str, str]) -> None:
    """Refuse variables of dtypes that cannot be gathered. **Raises:** PlanError."""
    for path, dtype in dtypes.items():
        if dtype not in DTYPES:
            raise PlanError(
                f"Shards have one of the dtypes {', '.join(DTYPES)}. Received {dtype} of "
                f'{path!r}. Take another dtype, or strategy="synchronous".'
            )


def lay_out(
    plan: Plan,
    paths: Sequence[str],
    dtypes: Sequence[str],
    decays: Sequence[bool],
    batches: Sequence[tuple[int, int]],
    ranks: int,
) -> list[Segment]:
    """Cut a model's weights into segments: by bucket, batch, dtype and decay, in order of buckets.

    Args:
        plan: covers exactly these variables.
        paths, dtypes, decays: of the variables in forward order.
        batches: [start, stop) of the variables that are pulled together, in forward order.
        ranks: of the group that shares them.

    Returns:
        Segments, each variable in exactly one.

    **Raises:** PlanError for a dtype that cannot be gathered.
    """
    require_carried(dict(zip(paths, dtypes, strict=True)))
    position = {path: number for number, path in enumerate(paths)}
    batch_of = [n for n, (start, stop) in enumerate(batches) for _ in range(start, stop)]
    members: dict[tuple[str, int, str, bool], list[tuple[str, int]]] = {}
    for path, (bucket, size) in sizes_of(plan).items():
        at = position[path]
        members.setdefault((bucket, batch_of[at], dtypes[at], decays[at]), []).append((path, size))
    segments = []
    for number, ((bucket, batch, dtype, decaying), found) in enumerate(members.items()):
        *starts, total = itertools.accumulate((size for _, size in found), initial=0)
        segments.append(
            Segment(
                name=f"shard{number}",
                paths=tuple(path for path, _ in found),
                sizes=tuple(size for _, size in found),
                starts=tuple(starts),
                length=-(-total // ranks),
                dtype=dtype,
                decays=(decaying,) * len(found),
                batch=batch,
                bucket=bucket,
                ranks=ranks,
            )
        )
    return segments


class Shards:
    """This rank's shards of a model's weights, and whether the weights themselves are current.

    Args:
        segments: in which the weights are gathered; each weight is in one.
        weights: of all segments, by path, in forward order.
        rank: this rank's position in the group that shares the weights.
    """

    def __init__(
        self, segments: Sequence[Segment], weights: Mapping[str, tf.Variable], rank: int
    ) -> None:
        """Make the shards, as zeros."""
        self.segments, self.weights, self.rank = list(segments), dict(weights), rank
        # Whether a step function has said that it pulls at its beginning; while it is traced
        self.pulls_first = False
        with tf.init_scope():
            # What the optimizer updates, and keeps state of
            self.variables = self._make_variables()
            with tf.device("/cpu:0"):
                # The weights are as new as the shards, or somebody has set them
                self.current = tf.Variable(True, trainable=False, name="tfcommx/current")

    # --- what a kind of shards decides: here one flat variable for each segment ------------

    def _make_variables(self) -> list[keras.Variable]:
        return [
            keras.Variable(np.zeros(one.length, one.dtype), one.dtype, name=one.name)
            for one in self.segments
        ]

    @property
    def names(self) -> list[str]:
        """A name for each of the variables."""
        return [one.name for one in self.segments]

    @property
    def decays(self) -> list[bool]:
        """Whether weight decay applies to each of the variables."""
        return [one.decays[0] for one in self.segments]

    @property
    def pushes(self) -> list[Segment]:
        """The segments in which gradients are reduce-scattered."""
        return self.segments

    def parts(self, place: int) -> list[tuple[str, int, int]]:
        """Return (path, start, stop) of what the variable at a place has of weights, flat."""
        return list(self.segments[place].parts_of(self.rank))

    def entries(self, place: int, tensors: Mapping[str, tf.Tensor]) -> tf.Tensor:
        """Return what the variable at a place has of whole tensors."""
        return self.segments[place].shard_of(tensors, self.rank)

    def pushed(self, segment: Segment, flat: tf.Tensor) -> dict[str, tf.Tensor]:
        """Return name of a variable -> gradient, from this rank's shard of a pushed segment."""
        return {segment.name: flat}

    def flat(self, place: int) -> tf.Tensor:
        """Return this rank's shard of the segment at a place, to be gathered."""
        return self.variables[place].value

    def gather(self, slots: Slots, comm: Comm, group: str) -> WholeSlots:
        """Return what the optimizers of all ranks keep, of whole variables, on rank 0.

        **Ranks:** all, outside of traced code. **Cost:** an all-gather.
        """
        whole: WholeSlots = {}
        for name in sorted(slots):
            whole[name] = {}
            for segment, shard in zip(self.segments, slots[name], strict=True):
                assert shard is not None, "every flat shard has each slot"
                label = f"state/{name}/{segment.name}"
                flat = comm.all_gather(shard.value.read_value(), group, label, counted=False)
                if comm.rank == 0:
                    parts = segment.unflatten(flat, self.shapes)
                    whole[name] |= {path: part.numpy() for path, part in parts.items()}
        return whole

    def set_slots(self, slots: Slots, whole: WholeSlots) -> None:
        """Set what this rank's optimizer keeps to its part of what is kept of whole variables."""
        for name, slot in slots.items():
            tensors = {path: tf.constant(array) for path, array in whole[name].items()}
            for place, shard in enumerate(slot):
                assert shard is not None, "every flat shard has each slot"
                shard.assign(self.entries(place, tensors))

    # --- the same for all kinds ------------------------------------------------------------

    def rename(self, paths: Sequence[str]) -> None:
        """Call the variables by other paths, given in forward order."""
        new = dict(zip(self.weights, paths, strict=True))
        self.segments = renamed(self.segments, new)
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
        for place, shard in enumerate(self.variables):
            value = tf.cond(
                current,
                lambda place=place: tf.identity(self.entries(place, self.weights)),
                shard.value.read_value,
            )
            shard.assign(value)

    def squares(self, gradients: Sequence[tf.Tensor]) -> dict[str, tf.Tensor]:
        """Return path -> sum of squares of this rank's part of a gradient, float32."""
        found = {path: tf.zeros([]) for path in self.weights}
        for place, gradient in enumerate(gradients):
            flat, at = tf.reshape(gradient, [-1]), 0
            for path, start, stop in self.parts(place):
                part = tf.cast(flat[at : at + stop - start], tf.float32)
                found[path] += tf.reduce_sum(part * part)
                at += stop - start
        return found

    def scale(
        self, gradients: Sequence[tf.Tensor], factors: Mapping[str, tf.Tensor]
    ) -> list[tf.Tensor]:
        """Return the gradients of shards, each variable's part times its factor."""
        scaled = []
        for place, gradient in enumerate(gradients):
            flat, parts, at = tf.reshape(gradient, [-1]), [], 0
            for path, start, stop in self.parts(place):
                part = flat[at : at + stop - start]
                parts.append(part * tf.cast(factors[path], part.dtype))
                at += stop - start
            scaled.append(tf.reshape(tf.concat([*parts, flat[at:]], axis=0), gradient.shape))
        return scaled


def renamed(segments: Sequence[Segment], new: Mapping[str, str]) -> list[Segment]:
    """Return segments whose variables have other paths: old path -> new one."""
    return [
        dataclasses.replace(one, paths=tuple(new[path] for path in one.paths)) for one in segments
    ]

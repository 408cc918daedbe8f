"""Shards: the entries of the weights that each rank updates.

    bucket of the plan    |      b0       |  b1  |     reduce-scatter of its gradients
    batch of layers       |   1   |     0        |     all-gather of its weights
    segment               |  s2   |  s1   |  s0  |     one flat shard on each rank

A segment holds whole variables of one batch, one bucket and one dtype, with weight decay for all or
for none. It is padded to p equal parts, one for each rank: rank r owns entries [r n, (r + 1) n).
The p ranks are those of a group: the world, a node, or the peers.
"""

import dataclasses
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import keras
import numpy as np
import tensorflow as tf

from tfcommx.collectives.comm import Comm, largest_part
from tfcommx.core import DENSE_DTYPES, Piece, Plan, PlanError

# An optimizer's state: attribute -> for each variable that it updates a state variable, or None
Slots = Mapping[str, Sequence[keras.Variable | None]]
# State of whole variables: attribute -> path -> array
WholeSlots = dict[str, dict[str, np.ndarray]]


@dataclass(frozen=True)
class Segment:
    """Variables that lie one after another in a flat vector, of which each rank owns a part."""

    # Unique
    name: str
    # Paths of whole variables, in the order of the vector
    paths: tuple[str, ...]
    # Entries of each variable
    sizes: tuple[int, ...]
    # Position of each variable's first entry in the vector; gaps between variables are padding
    starts: tuple[int, ...]
    # Entries of one rank's shard
    length: int
    # Dtype of the weights
    dtype: str
    # For each variable, True if the optimizer's weight decay applies to it
    decays: tuple[bool, ...]
    # Number of the batch of layers that is pulled together, from 0
    batch: int
    # Name of the bucket of their gradients; "" if they belong to several buckets
    bucket: str
    # Number of ranks, >= 1
    ranks: int

    def _stretches(self) -> list[tuple[str | None, int]]:
        """Return the vector's parts in order: (path, entries), and (None, entries) for padding."""
        stretches: list[tuple[str | None, int]] = []
        at = 0
        for path, size, start in zip(self.paths, self.sizes, self.starts, strict=True):
            stretches += [(None, start - at), (path, size)]
            at = start + size
        stretches.append((None, self.length * self.ranks - at))
        return [stretch for stretch in stretches if stretch != (None, 0)]

    def flatten(self, tensors: Mapping[str, tf.Tensor], dtype: str) -> tf.Tensor:
        """Return all variables as one flat vector of the given dtype, with padding."""
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
        """Yield (path, start, stop): the ranges of variables in a rank's shard."""
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
        padding = self.length - sum(part.shape[0] for part in parts)
        # Without parts, too, if no variable has entries
        if padding or not parts:
            parts.append(tf.zeros([padding], self.dtype))
        return tf.concat(parts, axis=0) if len(parts) > 1 else parts[0]


def sizes_of(plan: Plan) -> dict[str, tuple[str, int]]:
    """Return path -> (its first bucket, its number of entries) of each variable of a plan."""
    first: dict[str, str] = {}
    for bucket in plan.buckets:
        for name in bucket.variables:
            first.setdefault(Piece.of(name).path, bucket.name)
    return {path: (first[path], entries) for path, entries in plan.entries.items()}


def require_carried(dtypes: Mapping[str, str]) -> None:
    """Refuse variables of dtypes that cannot be gathered. **Raises:** PlanError."""
    for path, dtype in dtypes.items():
        if dtype not in DENSE_DTYPES:
            raise PlanError(
                f"Shards have one of the dtypes {', '.join(DENSE_DTYPES)}. Received {dtype} of "
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
        ranks: number of ranks in the group that shares the weights.

    Returns:
        Segments, with each variable in exactly one.

    **Raises:** PlanError for a dtype that cannot be gathered.
    """
    require_carried(dict(zip(paths, dtypes, strict=True)))
    position = {path: number for number, path in enumerate(paths)}
    batch_of = [n for n, (start, stop) in enumerate(batches) for _ in range(start, stop)]
    # Also apart by dtype and decay, because the optimizer treats a segment as one variable, which
    # has one dtype and decays as a whole
    members: dict[tuple[str, int, str, bool], list[tuple[str, int]]] = {}
    for path, (bucket, size) in sizes_of(plan).items():
        at = position[path]
        members.setdefault((bucket, batch_of[at], dtypes[at], decays[at]), []).append((path, size))
    segments = []
    for number, ((bucket, batch, dtype, decaying), variables) in enumerate(members.items()):
        names, sizes = zip(*variables, strict=True)
        *starts, total = itertools.accumulate(sizes, initial=0)
        segments.append(
            Segment(
                name=f"shard{number}",
                paths=names,
                sizes=sizes,
                starts=tuple(starts),
                # Rounded up, because reduce-scatter needs equally long shards on all ranks
                length=-(-total // ranks),
                dtype=dtype,
                decays=(decaying,) * len(variables),
                batch=batch,
                bucket=bucket,
                ranks=ranks,
            )
        )
    return segments


class Shards:
    """This rank's shards of a model's weights, and a flag that the weights are current."""

    def __init__(
        self, segments: Sequence[Segment], weights: Mapping[str, tf.Variable], rank: int
    ) -> None:
        # In which the weights are gathered; each weight is in exactly one
        self.segments = list(segments)
        # By path, in forward order; this rank's position in the group that shares them
        self.weights, self.rank = dict(weights), rank
        # True if the step function pulls at its beginning; set while it is traced
        self.pulls_first = False
        with tf.init_scope():
            # The variables that the optimizer updates, and for which it keeps state
            self.variables = self._make_variables()
            with tf.device("/cpu:0"):
                # True if the weights are as recent as the shards, or were assigned since
                self.current = tf.Variable(True, trainable=False, name="tfcommx/current")

    # --- methods that a subclass overrides: here one flat variable for each segment --------

    def _make_variables(self) -> list[keras.Variable]:
        return [
            # Zeros, because the first step takes the shards from the weights
            keras.Variable(
                np.zeros(segment.length, segment.dtype), segment.dtype, name=segment.name
            )
            for segment in self.segments
        ]

    @property
    def names(self) -> list[str]:
        return [segment.name for segment in self.segments]

    @property
    def decays(self) -> list[bool]:
        """For each variable, True if weight decay applies to it."""
        return [segment.decays[0] for segment in self.segments]

    @property
    def pushes(self) -> list[Segment]:
        """The segments in which gradients are reduce-scattered."""
        return self.segments

    def parts(self, position: int) -> list[tuple[str, int, int]]:
        """Return (path, start, stop): the flat ranges of weights in the variable at a position."""
        return list(self.segments[position].parts_of(self.rank))

    def entries(self, position: int, tensors: Mapping[str, tf.Tensor]) -> tf.Tensor:
        """Return the entries of whole tensors that belong to the variable at a position."""
        return self.segments[position].shard_of(tensors, self.rank)

    def pushed(self, segment: Segment, flat: tf.Tensor) -> dict[str, tf.Tensor]:
        """Return variable name -> gradient, from this rank's shard of a pushed segment."""
        return {segment.name: flat}

    def flat(self, position: int) -> tf.Tensor:
        """Return this rank's shard of the segment at a position, to be gathered."""
        return self.variables[position].value

    def gather(self, slots: Slots, comm: Comm, group: str) -> WholeSlots:
        """Return all ranks' state, by whole variable, on rank 0, by all-gathers. **Ranks:** all."""
        whole: WholeSlots = {}
        # Sorted, because all ranks must gather in one order
        for name in sorted(slots):
            whole[name] = {}
            for segment, shard in zip(self.segments, slots[name], strict=True):
                assert shard is not None, "every flat shard has each slot"
                label = f"state/{name}/{segment.name}"
                flat = comm.all_gather(shard.value.read_value(), group, label, counted=False)
                # Rank 0 alone writes files, and the memory of the others is spared
                if comm.rank == 0:
                    parts = segment.unflatten(flat, self.shapes)
                    whole[name] |= {path: part.numpy() for path, part in parts.items()}
        return whole

    def set_slots(self, slots: Slots, whole: WholeSlots) -> None:
        """Set this rank's optimizer state to its part of the state of whole variables."""
        for name, slot in slots.items():
            tensors = {path: tf.constant(array) for path, array in whole[name].items()}
            for position, shard in enumerate(slot):
                assert shard is not None, "every flat shard has each slot"
                shard.assign(self.entries(position, tensors))

    # --- methods common to all kinds of shards ----------------------------------------------

    def rename(self, paths: Sequence[str]) -> None:
        """Rename the variables to these paths, in forward order."""
        new = dict(zip(self.weights, paths, strict=True))
        self.segments = renamed(self.segments, new)
        self.weights = {new[path]: variable for path, variable in self.weights.items()}

    @property
    def shapes(self) -> dict[str, tf.TensorShape]:
        """Path -> shape of the whole variable."""
        return {path: variable.shape for path, variable in self.weights.items()}

    def batches(self) -> list[list[int]]:
        """Return the positions of the segments that one all-gather pulls, in pull order.

        They have one batch and dtype, and no more entries than an all-gather takes.
        """
        batches: list[list[int]] = []
        last, length = None, 0

        def key_of(position: int) -> tuple[int, str]:
            return self.segments[position].batch, self.segments[position].dtype

        for position in sorted(range(len(self.segments)), key=key_of):
            segment, key = self.segments[position], key_of(position)
            length += segment.length
            if key != last or length > largest_part(segment.ranks, tf.as_dtype(segment.dtype).size):
                batches.append([])
                last, length = key, segment.length
            batches[-1].append(position)
        return batches

    def take_from_weights(self) -> None:
        """Set the shards to their entries of the weights, if the weights are current."""
        # Otherwise the next pull would undo weights that were restored or assigned since the last
        # one
        current = self.current.read_value()
        for position, shard in enumerate(self.variables):
            value = tf.cond(
                current,
                lambda position=position: tf.identity(self.entries(position, self.weights)),
                shard.value.read_value,
            )
            shard.assign(value)

    def squares(self, gradients: Sequence[tf.Tensor]) -> dict[str, tf.Tensor]:
        """Return path -> sum of squares of this rank's part of a gradient, float32."""
        # All variables, because the ranks add up these sums, and each owns parts of some only
        sums = {path: tf.zeros([]) for path in self.weights}
        for position, gradient in enumerate(gradients):
            flat, at = tf.reshape(gradient, [-1]), 0
            for path, start, stop in self.parts(position):
                # In float32, because squares of 16-bit floats overflow or vanish
                part = tf.cast(flat[at : at + stop - start], tf.float32)
                sums[path] += tf.reduce_sum(part * part)
                at += stop - start
        return sums

    def scale(
        self, gradients: Sequence[tf.Tensor], factors: Mapping[str, tf.Tensor]
    ) -> list[tf.Tensor]:
        """Return the gradients of shards, with each variable's part scaled by its factor."""
        scaled = []
        for position, gradient in enumerate(gradients):
            flat, parts, at = tf.reshape(gradient, [-1]), [], 0
            for path, start, stop in self.parts(position):
                part = flat[at : at + stop - start]
                parts.append(part * tf.cast(factors[path], part.dtype))
                at += stop - start
            # The rest of the shard is padding
            scaled.append(tf.reshape(tf.concat([*parts, flat[at:]], axis=0), gradient.shape))
        return scaled


def renamed(segments: Sequence[Segment], new: Mapping[str, str]) -> list[Segment]:
    """Return the segments with other variable paths, given as old path -> new path."""
    return [
        dataclasses.replace(segment, paths=tuple(new[path] for path in segment.paths))
        for segment in segments
    ]

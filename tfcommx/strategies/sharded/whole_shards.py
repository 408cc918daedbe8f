"""Shards of whole variables, for LARS, LAMB, Adafactor and Muon.

    variables      aaaaaa bbbb ccc d          longest first, each to the rank that has least
    rank 0         aaaaaa d                   its optimizer knows a and d alone
    rank 1         bbbb ccc
    flat vector    |aaaaaad|bbbbccc|          padded to the rank that has most

The pull gathers one such vector of each dtype. The push reduce-scatters one of each bucket and
dtype, with the same owners, where its padding leaves it no longer than an allreduce.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfcommx.collectives.comm import Comm
from tfcommx.core import Plan, PlanError
from tfcommx.planner.plan import balance
from tfcommx.strategies.sharded.shards import (
    Segment,
    Shards,
    Slots,
    WholeSlots,
    renamed,
    require_carried,
    sizes_of,
)


def lay_out_whole(
    plan: Plan, weights: Mapping[str, Any], decays: Sequence[bool], ranks: int
) -> tuple[list[Segment], list[Segment]]:
    """Give each variable to a rank, by bytes; lay the ranks' variables side by side.

    Arguments are as of `lay_out`.

    Returns:
        The segments that are gathered, one of each dtype, and those that are reduce-scattered, one
        of each bucket and dtype.

    **Raises:** PlanError for fewer variables than ranks, and a dtype that cannot be gathered.
    """
    if len(weights) < ranks:
        raise PlanError(
            "An optimizer that needs whole variables leaves each rank at least one. Received "
            f'{len(weights)} variables for {ranks} ranks. Take strategy="synchronous", or '
            "tfcommx.strategies.Sharded with a smaller group."
        )
    dtypes = {path: variable.dtype.name for path, variable in weights.items()}
    require_carried(dtypes)
    found = sizes_of(plan)
    amounts = [found[path][1] * one.dtype.size for path, one in weights.items()]
    owners = dict(zip(weights, balance(amounts, ranks), strict=True))
    decaying = dict(zip(weights, decays, strict=True))

    def segment(name: str, dtype: str, bucket: str, paths: list[str]) -> Segment:
        paths = sorted(paths, key=owners.__getitem__)  # Those of a rank stay in their order
        sizes = {path: found[path][1] for path in paths}
        loads = [sum(sizes[path] for path in paths if owners[path] == r) for r in range(ranks)]
        starts: list[int] = []
        for rank, members in itertools.groupby(paths, key=owners.__getitem__):
            ends = itertools.accumulate((sizes[path] for path in members), initial=0)
            starts += [rank * max(loads) + end for end in list(ends)[:-1]]
        return Segment(
            name=name,
            paths=tuple(paths),
            sizes=tuple(sizes.values()),
            starts=tuple(starts),
            length=max(loads),
            dtype=dtype,
            decays=tuple(decaying[path] for path in paths),
            batch=0,
            bucket=bucket,
            ranks=ranks,
        )

    pulls = [
        segment(f"whole/{dtype}", dtype, "", [path for path in weights if dtypes[path] == dtype])
        for dtype in sorted(set(dtypes.values()))
    ]
    keys = sorted({(found[path][0], dtypes[path]) for path in weights})
    pushes = [
        segment(
            f"{bucket}/{dtype}",
            dtype,
            bucket,
            [path for path in weights if (found[path][0], dtypes[path]) == (bucket, dtype)],
        )
        for bucket, dtype in keys
    ]
    return pulls, pushes


class WholeShards(Shards):
    """This rank's variables: copies with the shapes and paths of the weights.

    Args:
        pulls, pushes: as `lay_out_whole` returns them.
        weights: by path, in forward order.
        rank: this rank's position in the group that shares them.
        known_as: the paths by which the optimizer knows the weights, which may be equal.
    """

    def __init__(
        self,
        pulls: Sequence[Segment],
        pushes: Sequence[Segment],
        weights: Mapping[str, tf.Variable],
        rank: int,
        known_as: Sequence[str],
    ) -> None:
        """Make the copies, as zeros."""
        self._known_as = dict(zip(weights, known_as, strict=True))
        mine = {path for one in pulls for path, _, _ in one.parts_of(rank)}
        self._pushes, self._names = list(pushes), [path for path in weights if path in mine]
        super().__init__(pulls, weights, rank)

    def _make_variables(self) -> list[keras.Variable]:
        made = []
        for path in self._names:
            whole = self.weights[path]
            parents, _, name = self._known_as[path].rpartition("/")
            above, _, parent = parents.rpartition("/")
            # Optimizers exclude variables by their paths; "" is the scope of one without a parent
            with keras.name_scope(parent, override_parent=above):
                zeros = np.zeros(whole.shape, whole.dtype.as_numpy_dtype)
                made.append(keras.Variable(zeros, whole.dtype.name, name=name))
        return made

    @property
    def names(self) -> list[str]:
        """The paths of this rank's variables."""
        return self._names

    @property
    def decays(self) -> list[bool]:
        """Whether weight decay applies to each of the variables."""
        of_path = {
            path: decays
            for one in self.segments
            for path, decays in zip(one.paths, one.decays, strict=True)
        }
        return [of_path[path] for path in self._names]

    @property
    def pushes(self) -> list[Segment]:
        """The segments in which gradients are reduce-scattered."""
        return self._pushes

    def parts(self, place: int) -> list[tuple[str, int, int]]:
        """Return that the variable at a place has all of one weight."""
        path = self._names[place]
        return [(path, 0, self.weights[path].shape.num_elements())]

    def entries(self, place: int, tensors: Mapping[str, tf.Tensor]) -> tf.Tensor:
        """Return the whole tensor of the variable at a place."""
        return tf.convert_to_tensor(tensors[self._names[place]])

    def pushed(self, segment: Segment, flat: tf.Tensor) -> dict[str, tf.Tensor]:
        """Return path -> gradient, from this rank's shard of a pushed segment."""
        found, at = {}, 0
        for path, _, size in segment.parts_of(self.rank):
            found[path] = tf.reshape(flat[at : at + size], self.weights[path].shape)
            at += size
        return found

    def flat(self, place: int) -> tf.Tensor:
        """Return this rank's variables of the segment at a place, to be gathered."""
        tensors = {path: one.value for path, one in zip(self._names, self.variables, strict=True)}
        return self.segments[place].shard_of(tensors, self.rank)

    def gather(self, slots: Slots, comm: Comm, group: str) -> WholeSlots:
        """Return what the optimizers of all ranks keep, of whole variables, on rank 0.

        **Ranks:** all, outside of traced code. **Cost:** a broadcast of each, which may have
        another shape than the variable.
        """
        mine = {
            (name, path): one.numpy()
            for name, slot in slots.items()
            for path, one in zip(self._names, slot, strict=True)
            if one is not None
        }
        forms = comm.gather_objects({key: (one.shape, one.dtype.name) for key, one in mine.items()})
        whole: WholeSlots = {}
        for root in comm.topology.group(group, 0):  # Other groups have the same
            for (name, path), (shape, dtype) in sorted(forms[root].items()):
                value = mine[name, path] if comm.rank == root else np.zeros(shape, dtype)
                found = comm.broadcast(tf.constant(value), root, f"state/{name}/{path}")
                if comm.rank == 0:
                    whole.setdefault(name, {})[path] = found.numpy()
        return whole

    def set_slots(self, slots: Slots, whole: WholeSlots) -> None:
        """Set what this rank's optimizer keeps to what is kept of its variables."""
        for name, slot in slots.items():
            for path, one in zip(self._names, slot, strict=True):
                if one is not None:
                    one.assign(whole[name][path])

    def rename(self, paths: Sequence[str]) -> None:
        """Call the variables by other paths, given in forward order."""
        new = dict(zip(self.weights, paths, strict=True))
        super().rename(paths)
        self._pushes = renamed(self._pushes, new)
        self._names = [new[path] for path in self._names]

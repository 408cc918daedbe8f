"""Shards of whole variables, for LARS, LAMB, Adafactor and Muon.

    variables      aaaaaa bbbb ccc d          longest first, each to the rank with the least load
    rank 0         aaaaaa d                   its optimizer has only a and d
    rank 1         bbbb ccc
    flat vector    |aaaaaad|bbbbccc|          padded to the rank with the most

The pull gathers one such vector of each dtype. The push reduce-scatters one of each bucket and
dtype, with the same owners, unless padding makes it longer than an allreduce.
"""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfcommx.collectives.comm import Comm, largest_part
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
    """Assign each variable to a rank, by bytes; lay the ranks' variables side by side.

    Arguments are as for `lay_out`.

    Returns:
        The segments that are gathered, one for each dtype, and the segments that are
        reduce-scattered, one for each bucket and dtype.

    **Raises:** PlanError for fewer variables than ranks, a dtype that cannot be gathered, and more
    weights than an all-gather takes.
    """
    if len(weights) < ranks:
        raise PlanError(
            "An optimizer that needs whole variables leaves each rank at least one. Received "
            f'{len(weights)} variables for {ranks} ranks. Take strategy="synchronous", or '
            "tfcommx.strategies.Sharded with a smaller group."
        )
    dtypes = {path: variable.dtype.name for path, variable in weights.items()}
    require_carried(dtypes)
    sizes_by_path = sizes_of(plan)
    amounts = [sizes_by_path[path][1] * variable.dtype.size for path, variable in weights.items()]
    owners = dict(zip(weights, balance(amounts, ranks), strict=True))
    decaying = dict(zip(weights, decays, strict=True))

    def segment(name: str, dtype: str, bucket: str, paths: list[str]) -> Segment:
        # Side by side by rank, because a reduce-scatter and an all-gather cut the vector into
        # consecutive parts
        paths = sorted(paths, key=owners.__getitem__)  # Stable: a rank's keep their order
        sizes = {path: sizes_by_path[path][1] for path in paths}
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

    # Sorted, because a set of text has another order in each process
    pulls = [
        segment(f"whole/{dtype}", dtype, "", [path for path in weights if dtypes[path] == dtype])
        for dtype in sorted(set(dtypes.values()))
    ]
    for pull in pulls:
        largest = largest_part(ranks, tf.as_dtype(pull.dtype).size)
        if ranks > 1 and pull.length > largest:
            raise PlanError(
                "An optimizer that needs whole variables has all weights of a dtype pulled by one "
                f"all-gather, which takes at most {largest} from each of {ranks} ranks. Received "
                f"{pull.length} of {pull.dtype}. Take an optimizer that updates each entry by "
                'itself, or strategy="synchronous".'
            )
    keys = {path: (sizes_by_path[path][0], dtypes[path]) for path in weights}
    pushes = [
        segment("/".join(key), key[1], key[0], [path for path in weights if keys[path] == key])
        for key in sorted(set(keys.values()))
    ]
    return pulls, pushes


class WholeShards(Shards):
    """This rank's variables: copies with the shapes and paths of the weights."""

    def __init__(
        self,
        pulls: Sequence[Segment],
        pushes: Sequence[Segment],
        weights: Mapping[str, tf.Variable],
        rank: int,
        known_as: Sequence[str],
    ) -> None:
        # The optimizer's paths of the weights, which need not be unique
        self._known_as = dict(zip(weights, known_as, strict=True))
        paths = {path for segment in pulls for path, _, _ in segment.parts_of(rank)}
        self._pushes, self._names = list(pushes), [path for path in weights if path in paths]
        super().__init__(pulls, weights, rank)

    def _make_variables(self) -> list[keras.Variable]:
        made = []
        for path in self._names:
            weight = self.weights[path]
            parents, _, name = self._known_as[path].rpartition("/")
            above, _, parent = parents.rpartition("/")
            # The paths must match, because optimizers exclude variables by path; "" is the scope of
            # a variable without a parent
            with keras.name_scope(parent, override_parent=above):
                zeros = np.zeros(weight.shape, weight.dtype.as_numpy_dtype)
                made.append(keras.Variable(zeros, weight.dtype.name, name=name))
        return made

    @property
    def names(self) -> list[str]:
        return self._names

    @property
    def decays(self) -> list[bool]:
        of_path: dict[str, bool] = {}
        for segment in self.segments:
            of_path |= zip(segment.paths, segment.decays, strict=True)
        return [of_path[path] for path in self._names]

    @property
    def pushes(self) -> list[Segment]:
        return self._pushes

    def parts(self, position: int) -> list[tuple[str, int, int]]:
        path = self._names[position]
        return [(path, 0, self.weights[path].shape.num_elements())]

    def entries(self, position: int, tensors: Mapping[str, tf.Tensor]) -> tf.Tensor:
        return tf.convert_to_tensor(tensors[self._names[position]])

    def pushed(self, segment: Segment, flat: tf.Tensor) -> dict[str, tf.Tensor]:
        gradients, at = {}, 0
        for path, _, size in segment.parts_of(self.rank):
            gradients[path] = tf.reshape(flat[at : at + size], self.weights[path].shape)
            at += size
        return gradients

    def flat(self, position: int) -> tf.Tensor:
        tensors = {
            path: variable.value for path, variable in zip(self._names, self.variables, strict=True)
        }
        return self.segments[position].shard_of(tensors, self.rank)

    def gather(self, slots: Slots, comm: Comm, group: str) -> WholeSlots:
        # By broadcasts, because a state's shape may differ from its variable's
        states = {
            (name, path): variable.numpy()
            for name, slot in slots.items()
            for path, variable in zip(self._names, slot, strict=True)
            if variable is not None
        }
        forms = comm.gather_objects(
            {key: (state.shape, state.dtype.name) for key, state in states.items()}
        )
        whole: WholeSlots = {}
        for root in comm.topology.group(group, 0):  # Other groups have the same
            for (name, path), (shape, dtype) in sorted(forms[root].items()):
                value = states[name, path] if comm.rank == root else np.zeros(shape, dtype)
                received = comm.broadcast(tf.constant(value), root, f"state/{name}/{path}")
                if comm.rank == 0:
                    whole.setdefault(name, {})[path] = received.numpy()
        return whole

    def set_slots(self, slots: Slots, whole: WholeSlots) -> None:
        for name, slot in slots.items():
            for path, variable in zip(self._names, slot, strict=True):
                if variable is not None:
                    variable.assign(whole[name][path])

    def rename(self, paths: Sequence[str]) -> None:
        new = dict(zip(self.weights, paths, strict=True))
        super().rename(paths)
        self._pushes = renamed(self._pushes, new)
        self._names = [new[path] for path in self._names]

"""Sharded: each rank updates 1/p of the weights and keeps 1/p of the state.

    gradients -> reduce-scatter -> each rank updates its shard -> all-gather -> weights on all ranks
                 [push]            [1/p of the optimizer's state]  [pull]

With the group "node" (or "peers") each node (or slot) has all weights, and the push adds an
allreduce of the shard over the peers (or the node): the collectives of the torus, with the update
between them.

A pull gathers batches of consecutive layers, one after another. If the step function calls `begin`
at its start, the pull is deferred to the beginning of the next step, where the pull of later layers
overlaps the forward pass of earlier ones:

    engine    | pull a |   pull b   |  pull c  |
    compute            | forward a  | forward b | forward c | backward ... | update of the shard |

`shards` and `whole_shards` hold the parts. `pull_times` returns the times by which the batches of a
pull are planned.

**Source:** Wang, Pi, Zhou, "Scalable Distributed DL Training: Batching Communication and
Computation" (2019), on the parameter servers of BigDL. There a server is a separate thread next to
each worker; here ranks exchange by collectives.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import tensorflow as tf

from tfcommx import engines
from tfcommx.core import GROUPS, Links, Plan, PlanError, Profile, Topology, check_name, log
from tfcommx.planner.merging import pulls
from tfcommx.planner.merging.pulls import PullTimes
from tfcommx.runtime.bucket_runner import BucketRunner, join
from tfcommx.runtime.executor import PlanExecutor, only_plan
from tfcommx.runtime.gradient_state import Executor
from tfcommx.strategies.sharded.shards import Segment, Shards, lay_out
from tfcommx.strategies.sharded.whole_shards import WholeShards, lay_out_whole
from tfcommx.strategies.strategy import Strategy, StrategyRun, Update

PULLS = ("at_once", "layers", "batched")
# Group that shares the weights -> group over which a shard is also summed, or None
OTHERS = {"world": None, "node": "peers", "peers": "node"}


def layers_of(paths: Sequence[str]) -> list[tuple[int, int]]:
    """Return [start, stop) of consecutive variables of the same layer.

    >>> layers_of(["net/first/kernel", "net/first/bias", "net/last/kernel"])
    [(0, 2), (2, 3)]
    """
    lengths = [
        len(list(members))
        for _, members in itertools.groupby(paths, key=lambda path: path.rpartition("/")[0])
    ]
    return list(itertools.pairwise(itertools.accumulate(lengths, initial=0)))


def pull_times(
    profile: Profile,
    layers: Sequence[tuple[int, int]],
    weights: Sequence[Any],
    topology: Topology,
    links: Links,
    group: str = "world",
) -> PullTimes:
    """Return the times of pulls and of the forward pass, by layer.

    Args:
        profile: of this model, with times; matched by order and shape, because names may differ.
        layers: [start, stop) of the variables of each layer, in forward order.
        weights: in forward order, each with `shape` and `dtype`.
        topology, links: for the price of an all-gather, by the engine of the links.
        group: of the ranks that gather. The slots of a node share its port.

    **Raises:** PlanError for a profile of other variables, or without times.
    """
    rows = profile.variables[::-1]  # Gradients are ready in backward order
    pairs = itertools.zip_longest([tuple(w.shape) for w in weights], [row.shape for row in rows])
    differs = next((pair for pair in pairs if pair[0] != pair[1]), None)
    if differs or not profile.timed:
        raise PlanError(
            'pull="batched" needs a profile of this model with times. Received one of '
            f"{profile.model!r} "
            + (f"with {differs[1]} where the model has {differs[0]}." if differs else "of sizes.")
            + " Measure the model with `tfcommx profile` or cx.profile."
        )
    ranks = len(topology.group(group, 0))
    sizes = [row.size * tf.as_dtype(w.dtype).size for row, w in zip(rows, weights, strict=True)]
    shard_bytes = [sum(sizes[slice(*layer)]) / ranks for layer in layers]
    startup_s, per_byte = _line(sum(shard_bytes), group, topology, links)
    return PullTimes(
        startup_s,
        tuple(per_byte * size for size in shard_bytes),
        tuple(sum(rows[i].forward_s for i in range(*layer)) for layer in layers),
    )


def _line(own_bytes: float, group: str, topology: Topology, links: Links) -> tuple[float, float]:
    """Return start-up time and seconds per byte of gathers of half of `own_bytes` up to all."""
    # The paper's methods need a linear price, and an engine's is linear only in sections, because
    # it uses another algorithm for short vectors
    half, full = (
        engines.gather_seconds(share * own_bytes, group, topology, links) for share in (0.5, 1.0)
    )
    startup_s = max(2 * half - full, 0.0)
    return startup_s, (full - startup_s) / own_bytes if own_bytes else 0.0


@dataclass(frozen=True)
class Sharded(Strategy):
    """Let every rank update 1/p of the weights, with 1/p of the optimizer's state.

    Buckets on a plain allreduce are reduce-scattered; others, such as sparse ones, take their
    route, and each rank keeps its part of the sum.

    For an optimizer with statistics of whole variables (LARS, LAMB, Adafactor, Muon) the shards are
    whole variables, balanced by size and pulled at once.
    """

    # "at_once": one all-gather; "layers": one for each layer; "batched": by times of the layers.
    # The default leaves whole weights after each step; at 200 Mbit/s it took 1.17 times a
    # synchronous step, the others .98 to 1.05 times
    pull: str = "at_once"
    # The model's profile or its file, made by `tfcommx profile` or cx.profile; for "batched" only
    profile: Profile | str | Path | None = None
    # Solver for "batched": one of tfcommx.planner.merging.pulls; "best" simulates all
    solver: str = "best"
    # Group that shares the weights: the "world"; or the "node" or the "peers", so that each such
    # group has all weights, and its ranks 1/n or 1/m of them. The bytes are then those of a torus.
    group: str = "world"

    shards_weights: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_name("pull", self.pull, PULLS)
        check_name("solver", self.solver, ("best", *pulls.PULLS))
        check_name("group", self.group, GROUPS)
        if (self.pull == "batched") != (self.profile is not None):
            raise PlanError(
                'pull="batched" needs a `profile`, whose times say which layers are pulled '
                f"together, and no other pull does. Received pull={self.pull!r} and "
                f"profile={'None' if self.profile is None else '...'}. Make one with `tfcommx "
                "profile` or cx.profile."
            )

    def start(self, executor: Executor) -> ShardedRun:
        """Prepare the steps of one plan; `attach` sets the shards."""
        return ShardedRun(only_plan(executor), self.group)

    def batches(
        self, paths: Sequence[str], weights: Sequence[Any], topology: Topology, links: Links
    ) -> list[tuple[int, int]]:
        """Return [start, stop) of the variables that are pulled together, in forward order.

        **Raises:** PlanError for a profile of another model, or without times.
        """
        layers = layers_of(paths)
        if self.pull == "at_once":
            return [(0, len(paths))]
        if self.pull == "layers":
            return layers
        assert self.profile is not None, 'pull="batched" has one'
        profile = self.profile if isinstance(self.profile, Profile) else Profile.read(self.profile)
        times = pull_times(profile, layers, weights, topology, links, self.group)
        solvers = tuple(pulls.PULLS) if self.solver == "best" else (self.solver,)
        chosen = pulls.choose(times, solvers)
        log.info(
            "Weights are pulled in %d batches (%s): the forward pass ends after %.4g s. The "
            "paper's own choice of batches: %.4g s.",
            len(chosen.batches),
            chosen.solver,
            chosen.finish_s,
            chosen.ibatch_finish_s,
        )
        return [(layers[start][0], layers[stop - 1][1]) for start, stop in chosen.batches]

    def make_shards(
        self,
        plan: Plan,
        weights: Mapping[str, tf.Variable],
        decays: Sequence[bool],
        rank: int,
        links: Links,
        whole: Sequence[str] | None = None,
    ) -> Shards:
        """Create this rank's shards. Local: depends on the arguments only, and allocates memory.

        Args:
            plan: covers exactly these variables.
            weights: path -> variable, in forward order.
            decays: for each variable, True if the optimizer's weight decay applies to it.
            links: for the price of a gather.
            whole: the optimizer's paths of the variables, if it needs whole variables.

        **Raises:** PlanError for whole variables with pulls in batches, and for unequal nodes with
        a group that needs equal ones.
        """
        members = plan.topology.group(self.group, rank)
        position = members.index(rank)
        if whole is None:
            batches = self.batches(list(weights), list(weights.values()), plan.topology, links)
            dtypes = [variable.dtype.name for variable in weights.values()]
            segments = lay_out(plan, list(weights), dtypes, decays, batches, len(members))
            return Shards(segments, weights, position)
        if self.pull != "at_once":
            raise PlanError(
                "An optimizer that needs whole variables has them pulled at once: a layer is on "
                f"one rank, and a gather of it would be padded for all. Received pull="
                f'{self.pull!r}. Take pull="at_once", or an optimizer that updates each entry by '
                "itself."
            )
        laid = lay_out_whole(plan, weights, decays, len(members))
        return WholeShards(*laid, weights, position, whole)


class ShardedRun(StrategyRun):
    """The run of `Sharded` on one plan."""

    executor: PlanExecutor
    shards: Shards

    def __init__(self, executor: PlanExecutor, group: str) -> None:
        super().__init__(executor)
        self.group = group

    def attach(self, shards: Shards) -> None:
        """Set the shards that the optimizer was built for.

        **Ranks:** all. **Raises:** PlanError if those of two ranks differ.
        """
        segments = [dataclasses.astuple(segment) for segment in shards.segments]
        layouts = self.executor.comm.gather_objects(segments)
        for rank, layout in enumerate(layouts):
            if layout != layouts[0]:
                raise PlanError(
                    "All ranks must cut the weights into the same shards. Rank 0 has "
                    f"{len(layouts[0])} segments and rank {rank} {len(layout)}, or others. Give "
                    "all ranks the same model, profile and weight decay."
                )
        self.shards = shards
        # Segments of each reduce-scattered bucket: one whose variables are exactly those of its
        # segments
        self._segments: dict[str, list[Segment]] = {}
        for bucket in self.executor.plan.buckets:
            pushes = [segment for segment in shards.pushes if segment.bucket == bucket.name]
            # If padding makes it longer than twice the bucket, an allreduce sends less
            short = sum(push.length * push.ranks for push in pushes) <= 2 * sum(bucket.sizes)
            paths = sorted(path for push in pushes for path in push.paths)
            if short and paths == sorted(bucket.variables):
                self._segments[bucket.name] = pushes
        # For the stall watch, which names the batch that a rank waits for
        gathers = [f"the pull of batch {number}" for number in range(len(shards.batches()))]
        # Not counted, because the executor counts the steps
        self._waits = self.executor.comm.progress.of_exchange(gathers, counted=False)

    def exchange(self, gradients: Mapping[str, tf.Tensor]) -> dict[str, tf.Tensor]:
        """Push gradients: return the average (or sum) over all ranks of this rank's shards.

        **Raises:** PlanError unless there is exactly one gradient for every variable.
        """
        if odd := sorted(gradients.keys() ^ self.shards.weights.keys()):
            raise PlanError(
                'strategy="sharded" needs a gradient for every variable that the optimizer was '
                f"built for, and no other. Received {odd[0]!r} on one side only. Freeze it before "
                'the optimizer is built, or take strategy="synchronous".'
            )
        if not self.shards.pulls_first:
            # Not in a call without data, as in PlanExecutor.exchange_buckets
            with tf.control_dependencies(list(gradients.values())[-1:]):
                self.shards.take_from_weights()
        done = self.executor.exchange_buckets(gradients, self._push)
        gradients_of_shards: dict[str, tf.Tensor] = {}
        pieces: dict[str, tf.Tensor] = {}
        for runner, tensors in zip(self.executor.runners, done, strict=True):
            if self._scatters(runner):
                for segment, flat in zip(self._segments[runner.bucket.name], tensors, strict=True):
                    gradients_of_shards |= self.shards.pushed(segment, flat)
            else:
                pieces |= zip(runner.bucket.variables, tensors, strict=True)
        full = join(pieces, gradients)
        return {
            name: gradients_of_shards[name]
            if name in gradients_of_shards
            else self.shards.entries(position, full)
            for position, name in enumerate(self.shards.names)
        }

    def _scatters(self, runner: BucketRunner) -> bool:
        return runner.is_plain and runner.bucket.name in self._segments

    def _push(
        self, runner: BucketRunner, parts: Sequence[tf.Tensor], step: tf.Tensor
    ) -> list[tf.Tensor]:
        """Return this rank's shards of a bucket, or whole tensors if a route exchanges it."""
        if not self._scatters(runner):
            return runner.exchange(parts, step)
        bucket, segments = runner.bucket, self._segments[runner.bucket.name]
        tensors = dict(zip(bucket.variables, parts, strict=True))
        # Rank r's part of the vector holds the r-th part of each segment.
        rows = [
            tf.reshape(segment.flatten(tensors, bucket.dtype), [segment.ranks, segment.length])
            for segment in segments
        ]
        flat = tf.reshape(tf.concat(rows, axis=1) if len(rows) > 1 else rows[0], [-1])
        shard = self.executor.comm.reduce_scatter(flat, self.group, bucket.name)
        if other_group := OTHERS[self.group]:
            shard = self.executor.comm.allreduce(shard, other_group, f"{bucket.name}/{other_group}")
        if runner.factor != 1:
            shard = shard * tf.constant(runner.factor, shard.dtype)
        shards = tf.split(shard, [segment.length for segment in segments])
        return [
            tf.cast(shard, segment.dtype) for shard, segment in zip(shards, segments, strict=True)
        ]

    def update(self, step: Update) -> None:
        """Update this rank's shards; pull, unless the next step begins with the pull."""
        step.apply()
        if self.shards.pulls_first:
            # Not in a call without data, as in PlanExecutor.exchange_buckets
            with tf.control_dependencies(list(step.gradients)[-1:]):
                self.shards.current.assign(False)
        else:
            self.pull("pull", list(step.gradients)[-1:])

    def begin(self, inputs: Sequence[tf.Tensor]) -> None:
        """Pull at the beginning of a step's function, and defer the pull that would end the step.

        **Ranks:** all. **Cost:** the all-gathers; the forward pass of each layer waits only for
        the one with its weights and those before it.
        """
        self.shards.pulls_first = True
        # In the last call of an iterator, which has no data, nothing may be pulled
        with tf.control_dependencies(list(inputs)):
            self.shards.take_from_weights()
        self.pull("begin", inputs)

    def pull(self, label: str, after: Sequence[tf.Tensor] = ()) -> None:
        """Set the weights to the shards of all ranks, batch by batch, once `after` exists.

        `label` names the collectives, and must be unique among the pulls of a function.

        **Ranks:** all. **Cost:** (p - 1)/p of the weights received, one all-gather a batch.
        """
        shards, comm = self.shards, self.executor.comm
        before: Sequence[tf.Tensor] = list(after)
        number = self._waits.begin(before)
        for position, members in enumerate(shards.batches()):
            segments = [shards.segments[i] for i in members]
            with self.executor.scope():
                # In sequence, because the engine would otherwise fuse or reorder them. With 2 nodes
                # at 50 Mbit/s the pull and the forward pass of 6 equal layers took 636 ms,
                # unordered 1,140
                with tf.control_dependencies(before):
                    shard = tf.concat([shards.flat(i) for i in members], axis=0)
                gathered = comm.all_gather(shard, self.group, f"{label}{position}")
            self._waits.end(position, [gathered], number)
            before = [gathered]
            rows = tf.reshape(gathered, [segments[0].ranks, -1])
            columns = tf.split(rows, [segment.length for segment in segments], axis=1)
            for segment, column in zip(segments, columns, strict=True):
                tensors = segment.unflatten(tf.reshape(column, [-1]), shards.shapes)
                for path, value in tensors.items():
                    shards.weights[path].assign(value)
        with tf.control_dependencies(before):
            shards.current.assign(True)

    def consolidate(self) -> None:
        if not bool(self.shards.current.numpy()):
            self.pull("consolidate")

    def squares(self, gradients: Sequence[tf.Tensor]) -> dict[str, tf.Tensor]:
        """Return path -> sum of squares over the whole gradient, float32, equal on all ranks.

        **Ranks:** all. **Cost:** one allreduce of 4 bytes a variable.
        """
        partial = self.shards.squares(gradients)
        with self.executor.scope():
            stacked = tf.stack(list(partial.values()))
            # Over the group alone, because its ranks have all entries once
            totals = self.executor.comm.allreduce(stacked, self.group, "squares")
        return dict(zip(partial, tf.unstack(totals), strict=True))

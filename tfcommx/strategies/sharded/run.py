"""The steps of the strategy "sharded": push, update of the shard, pull.

The pull of a step goes in batches of consecutive layers, one after another. Where the step function
says when it begins (`begin`), it is put off to the beginning of the next step, so that the pull of
later layers overlaps the forward pass of earlier ones:

    engine    | pull a |   pull b   |  pull c  |
    compute            | forward a  | forward b | forward c | backward ... | update of the shard |
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import tensorflow as tf

from tfcommx.core import PlanError
from tfcommx.runtime.bucket_runner import BucketRunner, join
from tfcommx.runtime.executor import PlanExecutor
from tfcommx.strategies.sharded.shards import Segment, Shards
from tfcommx.strategies.strategy import StrategyRun, Update

# Whose sums a rank's shard needs beside those of the group that shares the weights
OTHERS = {"world": None, "node": "peers", "peers": "node"}


class ShardedRun(StrategyRun):
    """The strategy at work on one plan."""

    executor: PlanExecutor

    shards: Shards

    def __init__(self, executor: PlanExecutor, group: str = "world") -> None:
        super().__init__(executor)
        self.group = group

    def attach(self, shards: Shards) -> None:
        """Take the shards that the optimizer was built for.

        **Ranks:** all. **Raises:** PlanError if those of two ranks differ.
        """
        segments = [dataclasses.astuple(one) for one in shards.segments]
        everyone = self.executor.comm.gather_objects(segments)
        for rank, other in enumerate(everyone):
            if other != everyone[0]:
                raise PlanError(
                    "All ranks must cut the weights into the same shards. Rank 0 has "
                    f"{len(everyone[0])} segments and rank {rank} {len(other)}, or others. Give "
                    "all ranks the same model, profile and weight decay."
                )
        self.shards = shards
        # Buckets whose variables are exactly those of some segments, in which they follow each
        # other: reduce-scattered.
        self._segments: dict[str, list[Segment]] = {}
        for bucket in self.executor.plan.buckets:
            mine = [one for one in shards.pushes if one.bucket == bucket.name]
            # More than twice the bucket is padding: its allreduce sends less
            short = sum(one.length * one.ranks for one in mine) <= 2 * sum(bucket.sizes)
            paths = sorted(path for one in mine for path in one.paths)
            if short and paths == sorted(bucket.variables):
                self._segments[bucket.name] = mine
        gathers = [f"the pull of batch {number}" for number in range(len(shards.batches()))]
        self._waits = self.executor.comm.progress.of_exchange(gathers, counted=False)

    @tf.autograph.experimental.do_not_convert
    def exchange(self, gradients: Mapping[str, tf.Tensor]) -> dict[str, tf.Tensor]:
        """Push: return the average (or sum) over all ranks of this rank's shards.

        **Raises:** PlanError for gradients of other variables than all.
        """
        if odd := sorted(gradients.keys() ^ self.shards.weights.keys()):
            raise PlanError(
                'strategy="sharded" needs a gradient for every variable that the optimizer was '
                f"built for, and no other. Received {odd[0]!r} on one side only. Freeze it before "
                'the optimizer is built, or take strategy="synchronous".'
            )
        if not self.shards.pulls_first:
            with tf.control_dependencies(list(gradients.values())[-1:]):
                self.shards.take_from_weights()
        done = self.executor.exchange_buckets(gradients, self._push)
        found: dict[str, tf.Tensor] = {}
        pieces: dict[str, tf.Tensor] = {}
        for runner, tensors in zip(self.executor.runners, done, strict=True):
            if self._scatters(runner):
                for segment, flat in zip(self._segments[runner.bucket.name], tensors, strict=True):
                    found |= self.shards.pushed(segment, flat)
            else:
                pieces |= zip(runner.bucket.variables, tensors, strict=True)
        whole = join(pieces, gradients)
        return {
            name: found[name] if name in found else self.shards.entries(place, whole)
            for place, name in enumerate(self.shards.names)
        }

    def _scatters(self, runner: BucketRunner) -> bool:
        return runner.is_plain and runner.bucket.name in self._segments

    def _push(
        self, runner: BucketRunner, parts: Sequence[tf.Tensor], step: tf.Tensor
    ) -> list[tf.Tensor]:
        """Return this rank's shards of a bucket, or its whole tensors if it goes by a route."""
        if not self._scatters(runner):
            return runner.exchange(parts, step)
        bucket, segments = runner.bucket, self._segments[runner.bucket.name]
        tensors = dict(zip(bucket.variables, parts, strict=True))
        # Rank r's part of the vector holds the r-th part of each segment.
        rows = [
            tf.reshape(one.flatten(tensors, bucket.dtype), [one.ranks, one.length])
            for one in segments
        ]
        flat = tf.reshape(tf.concat(rows, axis=1) if len(rows) > 1 else rows[0], [-1])
        mine = self.executor.comm.reduce_scatter(flat, self.group, bucket.name)
        if others := OTHERS[self.group]:
            mine = self.executor.comm.allreduce(mine, others, f"{bucket.name}/{others}")
        if runner.factor != 1:
            mine = mine * tf.constant(runner.factor, mine.dtype)
        shards = tf.split(mine, [one.length for one in segments])
        return [tf.cast(shard, one.dtype) for shard, one in zip(shards, segments, strict=True)]

    @tf.autograph.experimental.do_not_convert
    def update(self, step: Update) -> None:
        """Update this rank's shards; pull, unless the next step begins with it."""
        step.apply()
        if self.shards.pulls_first:
            with tf.control_dependencies(list(step.gradients)[-1:]):
                self.shards.current.assign(False)
        else:
            self.pull("pull", list(step.gradients)[-1:])

    @tf.autograph.experimental.do_not_convert
    def begin(self, inputs: Sequence[tf.Tensor]) -> None:
        """Begin a step, in its function: pull, and put off the pull that would end the step.

        Args:
            inputs: of the step; without them there is no step, and nothing is pulled.

        **Ranks:** all. **Cost:** the all-gathers, which the forward pass of each layer waits for as
        far as its own weights.
        """
        self.shards.pulls_first = True
        with tf.control_dependencies(list(inputs)):
            self.shards.take_from_weights()
        self.pull("begin", inputs)

    @tf.autograph.experimental.do_not_convert
    def pull(self, label: str, after: Sequence[tf.Tensor] = ()) -> None:
        """Set the weights to what the shards of all ranks are, batch by batch.

        Args:
            label: names the collectives; another one for each pull in a function.
            after: tensors that there must be before.

        **Ranks:** all. **Cost:** (p - 1)/p of the weights received, one all-gather a batch.
        """
        shards, comm = self.shards, self.executor.comm
        before: Sequence[tf.Tensor] = list(after)
        number = self._waits.begin(before)
        for place, members in enumerate(shards.batches()):
            segments = [shards.segments[i] for i in members]
            with self.executor.scope():
                # One after another: the engine would fuse them, or take them in any order.
                with tf.control_dependencies(before):
                    mine = tf.concat([shards.flat(i) for i in members], axis=0)
                whole = comm.all_gather(mine, self.group, f"{label}{place}")
            self._waits.end(place, [whole], number)
            before = [whole]
            rows = tf.reshape(whole, [segments[0].ranks, -1])
            columns = tf.split(rows, [one.length for one in segments], axis=1)
            for segment, column in zip(segments, columns, strict=True):
                found = segment.unflatten(tf.reshape(column, [-1]), shards.shapes)
                for path, value in found.items():
                    shards.weights[path].assign(value)
        with tf.control_dependencies(before):
            shards.current.assign(True)

    def consolidate(self) -> None:
        """Pull, if the weights are one update old."""
        if not bool(self.shards.current.numpy()):
            self.pull("consolidate")

    def squares(self, gradients: Sequence[tf.Tensor]) -> dict[str, tf.Tensor]:
        """Return path -> sum of squares of the whole gradient, float32, equal on all ranks.

        Args:
            gradients: of this rank's shards.

        **Ranks:** all. **Cost:** one allreduce of 4 bytes a variable.
        """
        mine = self.shards.squares(gradients)
        with self.executor.scope():
            stacked = tf.stack(list(mine.values()))
            both = self.executor.comm.allreduce(stacked, self.group, "squares")
        return dict(zip(mine, tf.unstack(both), strict=True))

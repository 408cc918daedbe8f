"""The steps of the strategy "sharded": push, update of the shard, pull.

A pull gathers batches of consecutive layers, one after another. If the step function calls `begin`
at its start, the pull is deferred to the beginning of the next step, where the pull of later layers
overlaps the forward pass of earlier ones:

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

# Group that shares the weights -> group over which a shard is also summed, or None
OTHERS = {"world": None, "node": "peers", "peers": "node"}


class ShardedRun(StrategyRun):
    """The run of `Sharded` on one plan."""

    executor: PlanExecutor

    shards: Shards

    def __init__(self, executor: PlanExecutor, group: str = "world") -> None:
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
        gathers = [f"the pull of batch {number}" for number in range(len(shards.batches()))]
        self._waits = self.executor.comm.progress.of_exchange(gathers, counted=False)

    @tf.autograph.experimental.do_not_convert
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

    @tf.autograph.experimental.do_not_convert
    def update(self, step: Update) -> None:
        """Update this rank's shards; pull, unless the next step begins with the pull."""
        step.apply()
        if self.shards.pulls_first:
            with tf.control_dependencies(list(step.gradients)[-1:]):
                self.shards.current.assign(False)
        else:
            self.pull("pull", list(step.gradients)[-1:])

    @tf.autograph.experimental.do_not_convert
    def begin(self, inputs: Sequence[tf.Tensor]) -> None:
        """Pull at the beginning of a step's function, and defer the pull that would end the step.

        Args:
            inputs: of the step; without inputs, in a call without data, nothing is pulled.

        **Ranks:** all. **Cost:** the all-gathers; the forward pass of each layer waits only for
        the one with its weights and those before it.
        """
        self.shards.pulls_first = True
        with tf.control_dependencies(list(inputs)):
            self.shards.take_from_weights()
        self.pull("begin", inputs)

    @tf.autograph.experimental.do_not_convert
    def pull(self, label: str, after: Sequence[tf.Tensor] = ()) -> None:
        """Set the weights to the shards of all ranks, batch by batch.

        Args:
            label: names the collectives; unique among the pulls of a function.
            after: tensors that must exist before the pull starts.

        **Ranks:** all. **Cost:** (p - 1)/p of the weights received, one all-gather a batch.
        """
        shards, comm = self.shards, self.executor.comm
        before: Sequence[tf.Tensor] = list(after)
        number = self._waits.begin(before)
        for position, members in enumerate(shards.batches()):
            segments = [shards.segments[i] for i in members]
            with self.executor.scope():
                # In sequence, because the engine would otherwise fuse or reorder them
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
        """Pull, if the weights lack the last update."""
        if not bool(self.shards.current.numpy()):
            self.pull("consolidate")

    def squares(self, gradients: Sequence[tf.Tensor]) -> dict[str, tf.Tensor]:
        """Return path -> sum of squares over the whole gradient, float32, equal on all ranks.

        **Ranks:** all. **Cost:** one allreduce of 4 bytes a variable.
        """
        partial = self.shards.squares(gradients)
        with self.executor.scope():
            stacked = tf.stack(list(partial.values()))
            totals = self.executor.comm.allreduce(stacked, self.group, "squares")
        return dict(zip(partial, tf.unstack(totals), strict=True))

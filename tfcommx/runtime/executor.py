"""PlanExecutor: exchanges gradients by a plan and keeps residuals for the next step.

    gradients -> per bucket: flat vector -> route (+ residual -> select -> wire -> exchange ->
    merge) -> average -> unflatten

Each bucket is a separate chain in the TensorFlow graph, so a bucket whose gradients are ready is
sent while others are computed. Before the first step all ranks check that they have the same plan.
"""

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import tensorflow as tf

from tfcommx import routes
from tfcommx.collectives.comm import Comm
from tfcommx.core import NO_COMPRESSION, PLAIN, Bucket, Plan, PlanError, first_difference
from tfcommx.routes import read_plan
from tfcommx.runtime.bucket_runner import BucketRunner, clip_buckets, cut, join
from tfcommx.runtime.gradient_state import Executor, GradientState
from tfcommx.runtime.residuals import GradientStore


def agree_on_plan(plan: Plan, comm: Comm) -> None:
    """Refuse plans that differ between ranks, on every rank.

    **Ranks:** all. **Cost:** one small exchange on the host, before training.
    **Raises:** PlanError that names the first difference and the rank.
    """
    texts = comm.gather_objects(plan.to_json())
    for rank, text in enumerate(texts):
        if text != texts[0]:
            difference = first_difference(read_plan(texts[0]), read_plan(text))
            raise PlanError(
                f"The plan must be the same on every rank. Rank 0 and rank {rank} differ first "
                f"in {difference}. "
                "Build the same model and scheme on every rank; load it on every rank, or none, "
                "or add BroadcastState. In a custom loop, give zeros for a gradient that is None "
                "on one rank only."
            )


def agree_on_settings(comm: Comm, **settings: object) -> None:
    """Refuse settings that differ between ranks, on every rank.

    **Ranks:** all. **Cost:** one small exchange on the host, before training.
    **Raises:** PlanError that names a setting, both values and the rank.
    """
    # By their repr, which shows all options, because ranks exchange plain data only
    everyone = comm.gather_objects({name: repr(value) for name, value in settings.items()})
    for rank, values in enumerate(everyone):
        for name, first in everyone[0].items():
            if values[name] != first:
                raise PlanError(
                    f"`{name}` must be the same on every rank. Rank 0 has {first[:200]} and rank "
                    f"{rank} has {values[name][:200]}. Pass the same on every rank."
                )


# (runner of a bucket, its tensors, number of the step) -> the exchanged tensors
ExchangeBucket = Callable[[BucketRunner, Sequence[tf.Tensor], tf.Tensor], list[tf.Tensor]]


class PlanExecutor(GradientStore):
    """A plan on this rank: a runner for each bucket, and the rank's state between steps."""

    def __init__(self, plan: Plan, comm: Comm, divided_by_rate: bool = False) -> None:
        """Agree on the plan and prepare its exchange.

        Args:
            divided_by_rate: True if momenta divided by the learning rate are exchanged, and not
                gradients.

        **Ranks:** all, outside of traced code. **Raises:** PlanError if the plans of two ranks
        differ, or for routes of messages without an MPI launch.
        """
        agree_on_plan(plan, comm)
        # Here and not in the first step, because opening duplicates a communicator, which all ranks
        # must do together and outside of a graph
        if any(routes.get(bucket.route).needs_messages(bucket) for bucket in plan.buckets):
            comm.messages.open()
        super().__init__(plan, comm, divided_by_rate)
        self._scope = comm.own_scope()
        # Steps of loaded states
        self._steps_before = 0
        self._make_runners()
        self._waits = comm.progress.of_exchange([_in_words(bucket) for bucket in plan.buckets])

    def _make_runners(self) -> None:
        """Create the runners; again after `load`, which may add residuals to buckets."""
        self.runners = [
            BucketRunner(self.plan, index, self.states[bucket.name], self.comm)
            for index, bucket in enumerate(self.plan.buckets)
        ]

    def scope(self) -> contextlib.AbstractContextManager[None]:
        """Name the collectives inside after this plan, equally on all ranks."""
        # The engine pairs collectives of the ranks by name
        return self.comm.scope(self._scope)

    # AutoGraph must not convert graph code, even inside a caller's loop
    @tf.autograph.experimental.do_not_convert
    def exchange(
        self,
        gradients: Mapping[str, tf.Tensor],
        part: Plan | None = None,
        work: ExchangeBucket = BucketRunner.exchange,
    ) -> dict[str, tf.Tensor]:
        """Return the average (or sum) over all ranks of each gradient.

        Args:
            gradients: variable path -> dense tensor, for exactly the variables of the plan.
            part: a plan of some of the buckets, with exactly these variables; None: all buckets.
            work: exchanges one bucket.

        Returns:
            The same paths, shapes and dtypes; bit-identical on every rank. With a plan that reduces
            to the root only rank 0 has the result.

        **Ranks:** all, with the same plan; in traced code, or eagerly in the same order.
        **Cost:** per bucket one copy into and one out of the flat vector, and the route.
        """
        part = part or self.plan
        done = self.exchange_buckets(gradients, work, part)
        pieces = {
            name: tensor
            for bucket, tensors in zip(part.buckets, done, strict=True)
            for name, tensor in zip(bucket.variables, tensors, strict=True)
        }
        return join(pieces, gradients)

    @tf.autograph.experimental.do_not_convert
    def exchange_buckets(
        self,
        gradients: Mapping[str, tf.Tensor],
        work: ExchangeBucket,
        part: Plan | None = None,
    ) -> list[list[tf.Tensor]]:
        """Take a step: call `work` for each bucket in the plan's order; return its results.

        If `part`, a plan of some of the buckets, is given, the step is limited to these.

        **Ranks:** all, with a `work` of the same collectives.
        """
        with self.scope():
            # Read before the assignment, which waits for the last gradient: a bucket that selects
            # needs the number as soon as its own gradients exist
            step = self.steps.read_value() + 1
            # In the last call of an iterator, which has no data, TensorFlow still runs ops without
            # a data dependency; the control dependency keeps it from counting a step
            with tf.control_dependencies(list(gradients.values())[-1:]):
                self.steps.assign_add(1)
            part = part or self.plan
            pieces = clip_buckets(cut(gradients, part), part)
            number = self._waits.begin(pieces.values())
            done: list[list[tf.Tensor]] = []
            for position, runner in enumerate(self.runners):
                if runner.bucket not in part.buckets:
                    # It counts as ended, or the stall watch would report a bucket that this step
                    # does not send
                    self._waits.end(position, [], number)
                    continue
                done.append(work(runner, [pieces[name] for name in runner.bucket.variables], step))
                self._waits.end(position, done[-1], number)
            return done

    @property
    def plans(self) -> list[Plan]:
        return [self.plan]

    def steps_taken(self) -> int:
        return int(self.steps.numpy())

    def dense_bytes_between_nodes(self) -> float:
        """Return plain Horovod's bytes between nodes for these steps, as the mean over ranks."""
        # A restored step count includes steps of the process that wrote the checkpoint, whose sent
        # bytes this process has not counted
        steps = int(self.steps.numpy()) - self._steps_before
        return float(steps) * self.dense_bytes_of_a_step()

    def dense_bytes_of_a_step(self) -> float:
        """Return the bytes plain Horovod sends between nodes in a step, as the mean over ranks."""
        topology = self.plan.topology
        # Plain Horovod sends all entries as they are, whatever this plan selects or rounds
        plain = (
            replace(bucket, wire=PLAIN, compression=NO_COMPRESSION) for bucket in self.plan.buckets
        )
        return sum(routes.get("allreduce").wire_bytes(bucket, topology).between for bucket in plain)

    def load(self, state: GradientState) -> GradientState:
        steps = int(self.steps.numpy())
        rest = super().load(state)
        self._steps_before += int(self.steps.numpy()) - steps
        self._make_runners()
        return rest


def only_plan(executor: Executor) -> PlanExecutor:
    """Narrow an executor to PlanExecutor: only Synchronous supports trials of plans."""
    assert isinstance(executor, PlanExecutor)
    return executor


def _in_words(bucket: Bucket) -> str:
    first, *more = bucket.variables
    return f"the exchange of {first!r}{f' and {len(more)} more' if more else ''} ({bucket.name})"

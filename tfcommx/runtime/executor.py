"""PlanExecutor: exchange gradients by a plan; keep residuals for the next step.

    gradients -> per bucket: flat vector -> route (+ residual -> select -> wire -> exchange ->
    merge) -> average -> unflatten

Each bucket is a chain of its own in the TensorFlow graph, so one whose gradients are ready travels
while others are computed.

Check that all ranks have the same plan.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

import tensorflow as tf

from tfcommx import routes
from tfcommx.collectives.comm import Comm
from tfcommx.core import NO_COMPRESSION, PLAIN, Bucket, Plan, PlanError, first_difference
from tfcommx.routes import read_plan
from tfcommx.runtime.bucket_runner import BucketRunner, clip_buckets, cut, join
from tfcommx.runtime.rates import UNKNOWN
from tfcommx.runtime.residuals import PlanState, ResidualStore, VariableState


def agree_on_plan(plan: Plan, comm: Comm) -> None:
    """Refuse, on every rank, plans that differ between ranks.

    **Ranks:** all. **Cost:** one small exchange on the host, before training.
    **Raises:** PlanError that names the first difference and the rank.
    """
    texts = comm.gather_objects(plan.to_json())
    for rank, text in enumerate(texts):
        if text != texts[0]:
            found = first_difference(read_plan(texts[0]), read_plan(text))
            raise PlanError(
                f"The plan must be the same on every rank. Rank 0 and rank {rank} differ first "
                f"in {found}. "
                "Build the same model and scheme on every rank; load it on every rank, or none, "
                "or add BroadcastState."
            )


# (runner of a bucket, its tensors, number of the step) -> what is made of them
ExchangeBucket = Callable[[BucketRunner, Sequence[tf.Tensor], tf.Tensor], list[tf.Tensor]]


class PlanExecutor:
    """A plan on this rank: a runner for each bucket, and what the rank keeps between steps."""

    def __init__(self, plan: Plan, comm: Comm) -> None:
        """Agree on the plan and get ready for it.

        **Ranks:** all, outside of traced code. **Raises:** PlanError if the plans of two ranks
        differ, or for routes of messages without an MPI launch.
        """
        agree_on_plan(plan, comm)
        if any(routes.get(bucket.route).needs_messages(bucket) for bucket in plan.buckets):
            comm.messages.open()
        self.plan, self.comm, self._scope = plan, comm, comm.own_scope()
        with tf.device("/cpu:0"):  # Seeds and conditions are read on the host.
            self.steps = tf.Variable(0, dtype=tf.int64, trainable=False, name="tfcommx/steps")
        # Steps of the process that wrote the checkpoint which this one continues from.
        self._steps_before = 0
        self._store = ResidualStore(plan, comm)
        self._make_runners()
        self._waits = comm.progress.of_exchange([_in_words(bucket) for bucket in plan.buckets])

    def _make_runners(self) -> None:
        """Decide what kind of bucket each one is; again after residuals came from elsewhere."""
        self.runners = [
            BucketRunner(self.plan, index, self._store.states[bucket.name], self.comm)
            for index, bucket in enumerate(self.plan.buckets)
        ]

    @contextlib.contextmanager
    def scope(self) -> Iterator[None]:
        """Name the collectives within after this plan, equally on all ranks."""
        with self.comm.scope(self._scope):
            yield

    # What follows is a graph already, also in a caller's loop.
    @tf.autograph.experimental.do_not_convert
    def exchange(
        self, gradients: Mapping[str, tf.Tensor], part: Plan | None = None
    ) -> dict[str, tf.Tensor]:
        """Return the average (or sum) over all ranks of each gradient.

        Args:
            gradients: variable path -> dense tensor, for exactly the variables of the plan.
            part: some of the plan's buckets, which have these variables alone; None: all.

        Returns:
            The same paths, shapes and dtypes; bit-identical on every rank. A plan that was made to
            reduce to the root gives the result to rank 0 alone.

        **Ranks:** all, with the same plan; in traced code, or eagerly in the same order.
        **Cost:** per bucket one copy into and one out of the flat vector, and the route.
        """
        part = part or self.plan
        done = self.exchange_buckets(gradients, BucketRunner.exchange, part)
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
        """Take a step: let `work` exchange each bucket in the plan's order; return its results.

        `part` has some of the plan's buckets, to which the step is limited.

        **Ranks:** all, with work that exchanges alike.
        """
        with self.scope():
            step = self.steps.read_value() + 1
            # The run that finds no more data carries out what does not wait for data: no step
            with tf.control_dependencies(list(gradients.values())[-1:]):
                self.steps.assign_add(1)
            part = part or self.plan
            pieces = clip_buckets(cut(gradients, part), part)
            number = self._waits.begin(pieces.values())
            done: list[list[tf.Tensor]] = []
            for place, runner in enumerate(self.runners):
                if runner.bucket not in part.buckets:
                    self._waits.end(place, [], number)
                    continue
                done.append(work(runner, [pieces[name] for name in runner.bucket.variables], step))
                self._waits.end(place, done[-1], number)
            return done

    def follow_rate(self, rate: tf.Tensor) -> None:
        """Take note of the step's learning rate, a float scalar, before `exchange`.

        While it rises residuals shrink as much, so that they stand for updates (`rates`).
        """
        self._store.follow_rate(rate)

    @property
    def rate_exponent(self) -> int:
        """Of the highest learning rate so far, as `rates` has it. Outside of traced code."""
        return self._store.highest_rate.exponent

    def continue_rate(self, exponent: int) -> None:
        """Go on from the highest rate of other plans, unless this one has met a rate already."""
        if self.rate_exponent == UNKNOWN:
            self._store.highest_rate.exponent = exponent

    def dense_bytes_between_nodes(self) -> float:
        """Return the bytes plain Horovod would have sent between nodes for this process's steps.

        Per rank, as the mean over the ranks.
        """
        steps = int(self.steps.numpy()) - self._steps_before
        return float(steps) * self.dense_bytes_of_a_step()

    def dense_bytes_of_a_step(self) -> float:
        """Return the bytes plain Horovod sends between nodes in a step: per rank, as the mean."""
        topology = self.plan.topology
        return sum(
            routes.get("allreduce").wire_bytes(as_it_is, topology).between
            for as_it_is in (
                replace(bucket, wire=PLAIN, compression=NO_COMPRESSION)
                for bucket in self.plan.buckets
            )
        )

    def state(self) -> PlanState:
        """Return a copy of what this rank keeps of the plan. Outside of traced code."""
        return self._store.plan_state(int(self.steps.numpy()))

    def states(self) -> list[PlanState]:
        """Return copies of what this rank keeps of all plans that take turns: of this one."""
        return [self.state()]

    def outside_plans(self) -> VariableState:
        """Return what this rank keeps outside of the plan: nothing."""
        return VariableState()

    def restore(self, state: PlanState) -> bool:
        """Continue from a state if it is one of an equal plan; tell whether it is."""
        if state.plan == self.plan:
            self.continue_from(state)
            self._store.highest_rate.exponent = state.rate_exponent
        return state.plan == self.plan

    def continue_from(self, state: PlanState) -> None:
        """Set what this rank kept under an equal plan; buckets that it does not name stay."""
        self.steps.assign(state.steps)
        self._steps_before = state.steps
        self._store.assign(state)
        self._make_runners()

    def import_by_variable(self, state: VariableState) -> None:
        """Add residuals and velocities of another plan; their sums over the ranks are conserved.

        On a sparse route they go to the rank that selects from that part of the vector. On a dense
        one every rank gets the sum of the residuals, which is added to the next gradients' sum, and
        the sum of the velocities.

        **Ranks:** all, outside of traced code.
        """
        self._store.import_by_variable(state)
        self._make_runners()

    def export_by_variable(self, paths: set[str]) -> VariableState:
        """Return, and forget here, this rank's residuals and velocities of these variables.

        **Ranks:** all, outside of traced code.
        """
        return self._store.export_by_variable(paths)

    def release(self) -> None:
        """Free the memory of residuals and velocities; no step may follow. Outside of graphs."""
        self._store.release()


def _in_words(bucket: Bucket) -> str:
    first, *more = bucket.variables
    return f"the exchange of {first!r}{f' and {len(more)} more' if more else ''} ({bucket.name})"

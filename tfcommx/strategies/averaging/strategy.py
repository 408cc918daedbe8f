"""Weight averaging: every rank updates by its own gradients, then the weights are averaged.

    every = 3    update | update | update | average || update | update | update | average || ...

    every = 4, fragments = 2     step    1     2     3     4     5     6     7     8
                                 sends         a           b           a           b
    overlap = 1                  arrives             a           b           a

Every step it is AWAGD; every few steps local SGD; with an outer optimizer it is DiLoCo, and with
fragments and an overlap Streaming DiLoCo. With an update that is linear in the gradient (SGD, also
with momentum) and `every` = 1 it equals synchronous training, to float32 rounding.

A fragment f of F has its round after the steps whose number, counted since all weights were equal,
leaves a remainder of (f + 1) every / F when divided by `every`; with F = 1 all variables every
`every` steps. A round that overlaps steps ends `overlap` steps later (`OverlappedRounds`):

    step         t                 t + 1   ...   t + overlap
    weights w    snapshot = w      w + u1        start + (w - snapshot)
    thread       [ exchange of the snapshot; start moves ]

A rank's updates during the overlap, w - snapshot, stay in its weights, and the next round sends
them, so each update is sent once. `outer_optimizer` moves the start weights.

**Source:** Ma, Mao, Taylor, "Theano-MPI: a Theano-based Distributed Training Framework" (2016),
section on AWAGD (average weights after gradient descent).
Douillard et al., "DiLoCo" (2023), and "Streaming DiLoCo with Overlapping Communication" (2025),
section 2. We choose a fragment by size, not by layer. They mix start weights and w, half and half,
which drops half of the updates of the steps that a round overlaps.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

import tensorflow as tf

from tfcommx import routes
from tfcommx.core import ConfigurationError, Plan, check_name, check_whole
from tfcommx.kernels.traced import untraced
from tfcommx.planner.plan import fragments_of_buckets
from tfcommx.runtime.executor import PlanExecutor, only_plan
from tfcommx.runtime.gradient_state import Executor
from tfcommx.strategies.averaging.outer_optimizer import OuterOptimizer, StartWeights
from tfcommx.strategies.background import BackgroundCalls
from tfcommx.strategies.strategy import CommonState, Strategy, StrategyRun, Update

SENDS = ("weights", "updates")
MOMENTUM = ("keep", "average", "reset")
# (fragment, its weights) -> returns when the fragment's start weights have moved
ExchangeRound = Callable[[Plan, Mapping[str, tf.Tensor]], object]
# A number of steps, in a graph or outside
Steps = TypeVar("Steps", int, tf.Tensor)


@dataclass(frozen=True)
class WeightAveraging(Strategy):
    """Update by each rank's own gradients; average the weights every few steps.

    Between averages the ranks' weights differ; at the end of an epoch, before an evaluation and
    before a checkpoint they are averaged (cx.consolidate).

    >>> import keras
    >>> WeightAveraging(32, outer=keras.optimizers.SGD(0.7, momentum=0.9, nesterov=True))
    WeightAveraging(every=32, sends='updates', momentum='keep', outer=SGD(learning_rate=0.7, \
momentum=0.9, nesterov=True), fragments=1, overlap=0)

    **Ranks:** all, with equal options. **Cost:** one exchange of all variables in `every` steps, by
    their schemes. sends="updates" keeps a copy of the weights at the last average, and `outer` its
    state with it: two copies with momentum. `overlap` keeps one copy more, or two with
    sends="weights"; the exchange uses the cores and the bandwidth that the steps leave free, and
    other Horovod collectives wait until it has ended.
    **Raises:** ConfigurationError for options out of range or that exclude each other.
    """

    # Steps, an integer >= 1, after which weights are averaged: tau
    every: int = 1
    # "weights", by dense schemes; or "updates", the sum of a rank's updates since the last average,
    # by any scheme, whose residuals hold the unsent entries. With `outer` always "updates"
    sends: str = "weights"
    # The optimizer's state at an average: each rank keeps its own, all average it, or all reset it
    # to 0
    momentum: str = "keep"
    # Keras optimizer that moves the weights of the last average by the averaged updates (DiLoCo:
    # SGD(0.7, momentum=0.9, nesterov=True)); None: they become the average
    outer: Any = None
    # Groups of variables with about equally many entries, in [1, every], whose averages are spread
    # evenly over the steps
    fragments: int = 1
    # Steps, in [0, every // fragments], for which training continues while a round is in transit;
    # 0: a step that sends waits for the average
    overlap: int = 0

    # Only in steps that begin with an average; `WeightAveragingRun.weights_are_equal` says which
    keeps_weights_equal: ClassVar[bool] = True
    updates_apart: ClassVar[bool] = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "every", check_whole("every", self.every, least=1))
        object.__setattr__(self, "fragments", check_whole("fragments", self.fragments, least=1))
        check_name("sends", self.sends, SENDS)
        check_name("momentum", self.momentum, MOMENTUM)
        if self.fragments > self.every:
            raise ConfigurationError(
                "At most one fragment is averaged a step. Received "
                f"fragments={self.fragments} with every={self.every}. Take at most `every`."
            )
        object.__setattr__(self, "overlap", check_whole("overlap", self.overlap, least=0))
        if self.overlap > self.every // self.fragments:
            raise ConfigurationError(
                "A round ends before the next one begins: `overlap` is at most every // fragments. "
                f"Received overlap={self.overlap} with every={self.every} and "
                f"fragments={self.fragments}. Take at most {self.every // self.fragments}."
            )
        if (self.fragments > 1 or self.overlap) and self.momentum != "keep":
            raise ConfigurationError(
                "Fragments, and rounds that overlap steps, are averaged at different steps, so "
                f'momentum must be "keep". Received momentum={self.momentum!r} with '
                f"fragments={self.fragments} and overlap={self.overlap}."
            )
        if self.outer is not None:
            object.__setattr__(self, "outer", OuterOptimizer.of(self.outer))
            # The outer optimizer takes averaged updates for its gradient, so weights are no input
            # for it
            object.__setattr__(self, "sends", "updates")

    @property
    def plan_fragments(self) -> int:
        return self.fragments

    def check(self, plan: Plan) -> None:
        """Refuse buckets that cannot carry weights or rounds, or that span two fragments."""
        super().check(plan)
        fragments_of_buckets(plan, self.fragments)
        for bucket in plan.buckets if self.overlap else ():
            if routes.get(bucket.route).needs_messages(bucket):
                raise ConfigurationError(
                    "Rounds that overlap steps need a route of collectives: messages of two "
                    "exchanges at a time could be mistaken for each other. Received "
                    f"overlap={self.overlap} with {bucket.name} on the route {bucket.route!r}. "
                    "Take another route, or overlap=0."
                )
        if self.sends == "updates":
            return
        unfit = next(
            (bucket for bucket in plan.buckets if bucket.keeps_residual or bucket.momentum), None
        )
        if plan.operation != "average" or unfit is not None:
            received = f"op={plan.operation!r}"
            if unfit:
                received = (
                    f"{unfit.name} on the route {unfit.route!r} with wire={unfit.wire!r} and "
                    f"compression={unfit.compression!r}"
                )
            raise ConfigurationError(
                'Weights travel whole, and are averaged: sends="weights" needs dense schemes '
                "without momentum, without a compression and without 16 or fewer bits on the wire, "
                f'which would round the weights, and op="average". Received {received}. Take '
                'sends="updates", or other schemes.'
            )

    def start(self, executor: Executor) -> StrategyRun:
        return WeightAveragingRun(only_plan(executor), self)


class OverlappedRounds:
    """One round after another, each of a fragment, in a thread.

    `exchange` exchanges a fragment and moves its start weights. **Cost:** memory for one copy of
    the weights.
    """

    def __init__(
        self,
        weights: Mapping[str, tf.Variable],
        starts: StartWeights,
        fragments: Sequence[Plan],
        exchange: ExchangeRound,
    ) -> None:
        self._weights, self._starts, self._fragments = weights, starts, fragments
        traced = not tf.executing_eagerly()
        with untraced():
            self._snapshots = {
                path: tf.Variable(tf.zeros_like(weight), trainable=False, name="tfcommx_snapshot")
                for path, weight in weights.items()
            }
            calls = [
                functools.partial(self._exchange, exchange, fragment) for fragment in fragments
            ]
            if traced:  # A graph like the steps, so that buckets overlap
                calls = [tf.function(call).get_concrete_function() for call in calls]
        self._background = BackgroundCalls(calls)

    @tf.autograph.experimental.do_not_convert
    def _exchange(self, exchange: ExchangeRound, fragment: Plan) -> None:
        exchange(fragment, {path: self._snapshots[path] for path in fragment.paths})

    def begin(self, number: int) -> None:
        """Start to exchange a snapshot of a fragment's weights; do not wait."""
        # The thread starts after these copies, because the next step changes the weights
        copies = [
            self._snapshots[path].assign(self._weights[path], read_value=False)
            for path in self._fragments[number].paths
        ]
        self._background.begin(number, copies)

    def finish(self, number: int) -> None:
        """Wait for the round of a fragment; continue from its start weights."""
        with tf.control_dependencies([self._background.wait()]):
            for path in self._fragments[number].paths:
                weight = self._weights[path]
                since = tf.convert_to_tensor(weight) - self._snapshots[path]
                weight.assign(self._starts[path] + since)

    def finish_now(self) -> None:
        """Finish the round that is under way, if any. Outside of traced code."""
        if self._background.under_way is not None:
            self.finish(self._background.under_way)

    def settle(self) -> None:
        """Let the round that is under way end; its average waits for its step."""
        self._background.settle()


class WeightAveragingRun(StrategyRun):
    executor: PlanExecutor

    def __init__(self, executor: PlanExecutor, options: WeightAveraging) -> None:
        super().__init__(executor)
        self._options, self.steps_per_exchange = options, options.every
        self.keeps_copies = options.sends == "updates" or bool(options.overlap)
        self._fragments = fragments_of_buckets(executor.plan, options.fragments)
        with tf.device("/cpu:0"):
            # Steps since `consolidate` made the weights equal
            self._steps = tf.Variable(0, dtype=tf.int64, trainable=False, name="tfcommx/since")
        # Steps of this run before that
        self._steps_before = 0
        # The weights at the last average, if updates are sent or rounds overlap steps
        self._starts: StartWeights | None = None
        # The rounds, if they overlap steps
        self._rounds: OverlappedRounds | None = None
        # Counts steps for the stall watch, because ranks that take steps while a round is in
        # transit do not wait for it
        self._stepping = executor.comm.progress.of_exchange([]) if options.overlap else None
        # State of earlier runs, until the start weights exist
        self._kept: CommonState = {}
        # Weights and optimizer state of the last step
        self._weights: Mapping[str, tf.Variable] = {}
        self._state: Sequence[tf.Variable] = ()

    def exchange(self, gradients: Mapping[str, tf.Tensor]) -> dict[str, tf.Tensor]:
        """Return this rank's own gradients."""
        return dict(gradients)

    def follow_rate(self, rate: tf.Tensor) -> None:
        """Do nothing: residuals hold updates, which include the rate already."""

    def weights_are_equal(self) -> tf.Tensor | bool:
        """Return True if the last step ended with an average of all variables."""
        if self._options.every == 1 and not self._options.overlap:
            return True
        return tf.equal(self._since_equal(self._steps.value()), 0)

    def _since_equal(self, steps: Steps) -> Steps:
        """Return the number of steps since all weights were equal."""
        apart = len(self._fragments) > 1 or self._options.overlap
        return steps if apart else steps % self._options.every

    def _since_round(self, fragment: int, steps: Steps) -> Steps:
        """Return the number of steps since a fragment's round; 0: a round is due."""
        every = self._options.every
        # The remainder is never negative, in Python as in TensorFlow, also before the first round
        return (steps - (fragment + 1) * every // len(self._fragments)) % every

    def update(self, step: Update) -> None:
        """Apply the update of this rank; average if a round is due."""
        self._weights, self._state = step.weights, step.state
        overlap = self._options.overlap
        # In the last call of an iterator, which has no data, TensorFlow still runs ops without a
        # data dependency; the control dependency keeps it from counting a step
        with tf.control_dependencies(list(step.gradients)[-1:]):
            before = self._steps.read_value()
        if self._options.sends == "updates" or overlap:
            starts = self._open(step.weights) if self._starts is None else self._starts
            # Before the update, because the weights are equal on all ranks only here, and the
            # updates of the round count from them
            self._when(self._since_equal(before) == 0, lambda: starts.set(step.weights))
        with tf.control_dependencies([before]):
            step.apply()
            after = self._steps.assign_add(1).read_value()
        if self._stepping is not None:
            self._stepping.begin([after])
        rounds, begin = self._rounds, self._average
        if rounds is not None:
            begin = rounds.begin
            for number in range(len(self._fragments)):
                # Rounds end before others begin, because the next one may begin in the same step,
                # and there is one thread for all
                due = (after > overlap) & (self._since_round(number, after - overlap) == 0)
                self._when(due, functools.partial(rounds.finish, number))
        for number in range(len(self._fragments)):
            due = self._since_round(number, after) == 0
            self._when(due, functools.partial(begin, number))

    def _open(self, weights: Mapping[str, tf.Variable]) -> StartWeights:
        self._starts = starts = StartWeights(weights, self._options.outer, self._kept)
        if self._options.overlap:
            self._rounds = OverlappedRounds(weights, starts, self._fragments, self._exchange_round)
        return starts

    def _when(self, due: tf.Tensor, work: Callable[[], None]) -> None:
        """Do some work if it is due, without a condition if each step averages."""
        if self._options.every == 1 and not self._options.overlap:
            with tf.control_dependencies([due]):
                work()
        else:
            tf.cond(due, work, lambda: None)

    def _average(self, number: int) -> None:
        """Average a fragment's weights or updates, by the plan. **Ranks:** all."""
        fragment = self._fragments[number]
        paths = fragment.paths
        weights = {path: weight for path, weight in self._weights.items() if path in paths}
        for path, value in self._exchange_round(fragment, weights).items():
            weights[path].assign(value)
        self._average_state()

    def _exchange_round(
        self, fragment: Plan, weights: Mapping[str, tf.Variable]
    ) -> dict[str, tf.Tensor]:
        """Exchange a fragment's weights or updates; return the start weights of its next round."""
        starts = self._starts
        sent = {path: tf.convert_to_tensor(weight) for path, weight in weights.items()}
        if starts is not None and self._options.sends == "updates":
            sent = {path: value - starts[path] for path, value in sent.items()}
            means: dict[str, tf.Tensor] = self.executor.exchange(sent, fragment)
            return {path: starts.move(path, value) for path, value in means.items()}
        averages: dict[str, tf.Tensor] = self.executor.exchange(sent, fragment)
        if starts is not None:
            starts.set(averages)
        return averages

    def _average_state(self) -> None:
        """Keep, average or reset the optimizer's state, by the option `momentum`."""
        comm = self.executor.comm
        for position, slot in enumerate(self._state):
            # Integers are counts of steps, which are equal on all ranks
            if not slot.dtype.is_floating or self._options.momentum == "keep":
                continue
            if self._options.momentum == "reset":
                slot.assign(tf.zeros_like(slot))
                continue
            with self.executor.scope():
                total = comm.allreduce(tf.convert_to_tensor(slot), "world", f"state{position}")
            slot.assign(total / tf.cast(comm.topology.size, total.dtype))

    def consolidate(self) -> None:
        steps = int(self._steps.numpy())
        if self._rounds is not None:
            # First, because its variables are averaged again below
            self._rounds.finish_now()
        if not self._since_equal(steps):
            return
        for number in range(len(self._fragments)):
            # A fragment whose round has just ended is equal already, and would be sent twice
            if self._since_round(number, steps):
                self._average(number)
        self._steps_before += steps
        self._steps.assign(0)

    def settle(self) -> None:
        if self._rounds is not None:
            self._rounds.settle()

    def dense_bytes_between_nodes(self) -> float:
        # By steps and not by rounds, because a round that ends early would count as a whole one
        steps = self._steps_before + int(self._steps.numpy())
        return steps * self.executor.dense_bytes_of_a_step()

    def common_state(self) -> CommonState:
        return self._kept if self._starts is None else self._starts.state()

    def continue_from(self, state: CommonState) -> None:
        self._kept = dict(state)

"""The steps of weight averaging.

A fragment f of F has its round after the steps whose number, counted since all weights were equal,
leaves a remainder of (f + 1) every / F when divided by `every`; with F = 1 all variables every
`every` steps. A round that overlaps steps ends `overlap` steps later.

`OverlappedRounds` are exchanged while training steps continue:

    step         t                 t + 1   ...   t + overlap
    weights w    snapshot = w      w + u1        start + (w - snapshot)
    thread       [ exchange of the snapshot; start moves ]

A rank's updates during the overlap, w - snapshot, stay in its weights, and the next round sends
them, so each update is sent once.

**Source:** Douillard et al., "Streaming DiLoCo with Overlapping Communication" (2025), section 2.2.
They mix start weights and w, half and half, which drops half of those updates.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol, TypeVar

import keras
import tensorflow as tf

from tfcommx.core import Plan
from tfcommx.kernels.traced import untraced
from tfcommx.planner.plan import fragments_of_buckets
from tfcommx.runtime.executor import PlanExecutor
from tfcommx.strategies.averaging.outer_optimizer import StartWeights
from tfcommx.strategies.background import BackgroundCalls
from tfcommx.strategies.strategy import CommonState, StrategyRun, Update

# (fragment, its weights) -> returns when the fragment's start weights have moved
ExchangeRound = Callable[[Plan, Mapping[str, tf.Tensor]], object]
# A number of steps, in a graph or outside
Steps = TypeVar("Steps", int, tf.Tensor)


class OverlappedRounds:
    """One round after another, each of a fragment, in a thread.

    Args:
        starts: start weights of the same variables.
        fragments: plans whose variables are parts of them.
        exchange: exchanges a fragment and moves its start weights. **Ranks:** all.

    **Cost:** memory for one copy of the weights.
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


class AveragingOptions(Protocol):
    """The options of `WeightAveraging`."""

    @property
    def every(self) -> int: ...
    @property
    def sends(self) -> str: ...
    @property
    def momentum(self) -> str: ...
    @property
    def outer(self) -> keras.optimizers.Optimizer | None: ...
    @property
    def fragments(self) -> int: ...
    @property
    def overlap(self) -> int: ...


class WeightAveragingRun(StrategyRun):
    """The run of `WeightAveraging` on one plan."""

    executor: PlanExecutor

    def __init__(self, executor: PlanExecutor, options: AveragingOptions) -> None:
        super().__init__(executor)
        self._options, self.steps_per_exchange = options, options.every
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
        return (steps - (fragment + 1) * every // len(self._fragments)) % every

    @tf.autograph.experimental.do_not_convert
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
                due = (after > overlap) & (self._since_round(number, after - overlap) == 0)
                self._when(due, functools.partial(rounds.finish, number))
        for number in range(len(self._fragments)):
            due = self._since_round(number, after) == 0
            self._when(due, functools.partial(begin, number))

    def _open(self, weights: Mapping[str, tf.Variable]) -> StartWeights:
        """Create the start weights, and the overlapped rounds if rounds overlap steps."""
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
        done: dict[str, tf.Tensor]
        if starts is not None and self._options.sends == "updates":
            sent = {path: value - starts[path] for path, value in sent.items()}
            done = self.executor.exchange(sent, fragment)
            return {path: starts.move(path, value) for path, value in done.items()}
        done = self.executor.exchange(sent, fragment)
        if starts is not None:
            starts.set(done)
        return done

    def _average_state(self) -> None:
        """Keep, average or reset the optimizer's state, by the option `momentum`."""
        comm = self.executor.comm
        for position, slot in enumerate(self._state):
            if not slot.dtype.is_floating or self._options.momentum == "keep":
                continue
            if self._options.momentum == "reset":
                slot.assign(tf.zeros_like(slot))
                continue
            with self.executor.scope():
                total = comm.allreduce(tf.convert_to_tensor(slot), "world", f"state{position}")
            slot.assign(total / tf.cast(comm.topology.size, total.dtype))

    def consolidate(self) -> None:
        """Average the fragments that were not averaged after the last step."""
        steps = int(self._steps.numpy())
        if self._rounds is not None:
            self._rounds.finish_now()
        if not self._since_equal(steps):
            return
        for number in range(len(self._fragments)):
            if self._since_round(number, steps):
                self._average(number)
        self._steps_before += steps
        self._steps.assign(0)

    def settle(self) -> None:
        """Let the round that is under way end; its average waits for its step."""
        if self._rounds is not None:
            self._rounds.settle()

    def dense_bytes_between_nodes(self) -> float:
        """Return the bytes that plain Horovod would have sent for as many steps."""
        steps = self._steps_before + int(self._steps.numpy())
        return steps * self.executor.dense_bytes_of_a_step()

    def common_state(self) -> CommonState:
        """Return the outer optimizer's state, by variable."""
        return self._kept if self._starts is None else self._starts.state()

    def continue_from(self, state: CommonState) -> None:
        """Load the outer optimizer's state."""
        self._kept = dict(state)

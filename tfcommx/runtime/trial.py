r"""TrialExecutor: plans for the same gradients take turns, and the fastest stays.

    gradients -> + unsent residuals -> switch_case(whose turn) -> plain | plan 1 | plan 2 -> result
                                                                                        \-> stamp
    at a round's end    stamps of all ranks -> the slowest rank's times -> rounds -> whose turn

All of it is in the graph of one step, so nothing is traced again when the turn changes. The times
are those between the ends of two exchanges: whole steps, including hidden parts of an exchange.

Several trials, as of the two optimizers of a GAN, follow each other: steps of one would
include the trial of the other. Those that wait for another one take plan 0's turn in each step.

`TrialRounds` has the order of plans in a trial, and makes the choice from their times:

    step    1 2 3 | 4 5 6 | 7 8 9 | 10 11 12 | ...  18
    plan    0 1 2 | 1 2 0 | 2 0 1 |  0  1  2 | ...
            first use     | a plan that is hopelessly slower takes no more turns
            does not count

Plan 0 is plain Horovod, or the plan in its place where a budget rules it out. In a round each plan
has one step, each time in another order, so that a machine that becomes slower, and the ranks'
work between two rounds, affect all plans alike.
"""

import math
import statistics
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import replace

import numpy as np
import tensorflow as tf

from tfcommx.collectives.comm import Comm
from tfcommx.core import Piece, Plan
from tfcommx.kernels.traced import stamp
from tfcommx.runtime.executor import PlanExecutor
from tfcommx.runtime.gradient_state import GradientState, Vectors, without
from tfcommx.runtime.residuals import send_with_residual

# Most steps of a trial, six rounds of three plans; a round that would go beyond is not begun
STEPS = 18
# Least number of rounds of a trial. The first does not count, the slowest step of each plan is left
# out, and a standard error needs two
LEAST_ROUNDS = 4
# A plan takes no more turns if its fastest step takes this many times the median of the best plan,
# after this number of rounds that count
HOPELESS, ROUNDS_BEFORE = 1.5, 2
# Plain Horovod stays unless the mean of another is at most this share of Horovod's, and smaller by
# more than the standard error. With 4 ranks on 2 cores, whose steps differ by a fifth, five rounds
# so find a plan that is a fifth faster in 97 of 100 trials, and take one that is 5 % slower in 12;
# by the median, and asking for a faster step in all rounds but one, it was 93 and 22. Of normal
# times that differ by a fifth, eight rounds take a plan that is 10 % slower in 4 of 100 trials;
# without the standard error in 10.
CLEARLY = 0.96


class TrialRounds:
    """The state of a trial: equal on all ranks that record equal times.

    >>> rounds = TrialRounds(2)
    >>> while rounds.chosen is None:
    ...     rounds.record([0.2 if plan == 0 else 0.1 for plan in rounds.order])
    >>> rounds.chosen, rounds.mean(0)
    (1, 0.2)
    """

    def __init__(self, plans: int, steps: int = STEPS) -> None:
        """Begin a trial of plans >= 2 in at most so many steps, >= LEAST_ROUNDS * plans."""
        self._most = steps
        # Plans that still take turns, ascending
        self.remaining = list(range(plans))
        # The plans of this round, in the order of their turns
        self.order = list(range(plans))
        # The plan that stays, once that is decided
        self.chosen: int | None = None
        # Steps taken
        self.steps = 0
        # Seconds of each plan's steps that count
        self._seconds: list[list[float]] = [[] for _ in range(plans)]
        self._rounds = 0

    def record(self, seconds: Sequence[float]) -> None:
        """Take the times of a round's steps, in the order of `order`; decide, or begin the next."""
        # The first use of a plan opens connections, which may take seconds
        if self._rounds:
            for plan, taken in zip(self.order, seconds, strict=True):
                self._seconds[plan].append(taken)
        self.steps += len(self.order)
        self._rounds += 1
        if self._rounds > ROUNDS_BEFORE:
            self._drop_hopeless()
        # A round that the limit would cut is not begun, because plans are compared by equally many
        # steps
        if len(self.remaining) == 1 or self.steps + len(self.remaining) > self._most:
            self.chosen = self._choose()
        else:
            shift = self._rounds % len(self.remaining)
            self.order = self.remaining[shift:] + self.remaining[:shift]

    def mean(self, plan: int) -> float | None:
        """Return the mean seconds of a plan's steps, without the slowest; None if none counts."""
        return self._mean(plan) if self._seconds[plan] else None

    def _mean(self, plan: int) -> float:
        return statistics.fmean(self._kept(plan))

    def _kept(self, plan: int) -> list[float]:
        # Without the slowest, because other work on the machine makes steps slower, never faster; a
        # plan that stalls more than once still shows it
        taken = sorted(self._seconds[plan])
        return taken[:-1] or taken

    def _drop_hopeless(self) -> None:
        best = min(statistics.median(self._seconds[plan]) for plan in self.remaining)
        self.remaining = [
            plan for plan in self.remaining if min(self._seconds[plan]) <= HOPELESS * best
        ]

    def _choose(self) -> int:
        best = min(self.remaining, key=self._mean)
        if best == 0 or 0 not in self.remaining:
            return best
        plain, candidate = self._mean(0), self._mean(best)
        error = math.hypot(*(self._standard_error(plan) for plan in (0, best)))
        return best if candidate <= CLEARLY * plain and plain - candidate > error else 0

    def _standard_error(self, plan: int) -> float:
        # Includes differences between rounds: a trial on a machine whose speed changes is
        # inconclusive, and plain Horovod stays. LEAST_ROUNDS leave at least two steps
        seconds = self._kept(plan)
        return statistics.stdev(seconds) / math.sqrt(len(seconds))


class TrialExecutor:
    """Plans that take turns; afterwards the one that stays, by the same graph."""

    def __init__(
        self,
        plans: Sequence[Plan],
        comm: Comm,
        decided: Callable[[TrialRounds], None] = lambda _: None,
        steps: int = STEPS,
    ) -> None:
        """Get ready for all plans.

        Args:
            plans: two or more for the same variables, without momentum; the first stays if no other
                is clearly faster.
            decided: is called on every rank, once, when it is clear which plan stays.
            steps: of the trial, at most, >= LEAST_ROUNDS * len(plans).

        **Ranks:** all, outside of traced code, with equal plans. **Raises:** as PlanExecutor.
        """
        self.executors = [PlanExecutor(plan, comm) for plan in plans]
        self.comm, self.rounds, self._decided = comm, TrialRounds(len(plans), steps), decided
        self._scope, count = comm.own_scope(), len(plans)
        # True if this round is one of the trial
        self._counts = all(comm.gather_objects(comm.trials.is_first(self)))
        with tf.device("/cpu:0"):
            order = tf.range(count) if self._counts else tf.zeros([count], tf.int32)
            self._order = tf.Variable(order, trainable=False, name="tfcommx/order")
            # Finished steps of this round, and their total number; the round after the last one has
            # no end
            self._place = tf.Variable(0, trainable=False, name="tfcommx/place")
            self._steps_of_round = tf.Variable(count, trainable=False, name="tfcommx/round")
            # End times of the last step before this round, and of each step of it
            self._ends = tf.Variable(tf.zeros([count + 1], tf.float64), trainable=False)
            # Written by each turn and read by the record, which therefore waits for the whole turn
            self._last = tf.Variable(-1, trainable=False, name="tfcommx/last")
            # True if any residual outside of the plans is unsent
            self._has_unsent = tf.Variable(False, trainable=False, name="tfcommx/unsent")
        # Variable path -> float32 [its size]: residuals of losing and earlier plans;
        # [0] if none is left
        self._unsent: dict[str, tf.Variable] = {}
        self._sizes: dict[str, int] = {}
        self._expect_unsent({})

    @property
    def chosen(self) -> PlanExecutor | None:
        """The executor of the plan that stays, once that is decided."""
        return None if self.rounds.chosen is None else self.executors[self.rounds.chosen]

    @property
    def plan(self) -> Plan:
        """The plan that stays; before that is decided, the first."""
        return (self.chosen or self.executors[0]).plan

    @tf.autograph.experimental.do_not_convert
    def exchange(self, gradients: Mapping[str, tf.Tensor]) -> dict[str, tf.Tensor]:
        """Return the average (or sum) of each gradient by the plan whose turn it is.

        **Ranks:** all. **Cost:** of the plan; during the trial a stamp a step, and at a round's end
        an all-gather of a few bytes; afterwards untaken branches.
        """
        names = list(gradients)
        with tf.device("/cpu:0"), tf.control_dependencies([gradients[names[-1]]]):
            position = self._place.read_value()
            active = tf.gather(self._order, position)
        inputs = self._plus_unsent(gradients)

        def turn(number: int, executor: PlanExecutor) -> Callable[[], list[tf.Tensor]]:
            def run() -> list[tf.Tensor]:
                result = executor.exchange(inputs)
                self._last.assign(number)
                return [result[name] for name in names]

            return run

        results = tf.switch_case(
            active, [turn(*numbered) for numbered in enumerate(self.executors)]
        )
        # The flag stays on the host, so that the condition does not wait for a copy from a GPU
        with tf.device("/cpu:0"):
            trying = self._steps_of_round > 0
        tf.cond(trying, lambda: self._record(results, position), lambda: None)
        return dict(zip(names, results, strict=True))

    def _record(self, results: Sequence[tf.Tensor], position: tf.Tensor) -> None:
        end = self._now(results)
        with tf.device("/cpu:0"):
            ends = tf.where(tf.range(len(self.executors) + 1) == position + 1, end, self._ends)
            self._ends.assign(ends)
            self._place.assign(position + 1)
            last = tf.equal(position + 1, self._steps_of_round)
            tf.cond(last, lambda: self._end_round(ends), lambda: None)

    def _now(self, results: Sequence[tf.Tensor]) -> tf.Tensor:
        """Return the time at which a turn ended: its results exist, and its state is written."""
        # The stamp reads an entry, because with Horovod's asynchronous completion an op ends before
        # its result exists
        entry = next(result for result in results if result.shape.num_elements())
        with tf.control_dependencies([self._last.read_value(), *results]):
            return stamp(tf.reshape(entry, [-1])[:1])

    def _end_round(self, ends: tf.Tensor) -> None:
        """Let all ranks draw the same conclusion from the slowest rank's times."""
        count = len(self.executors)
        waits = tf.py_function(lambda: not self.comm.trials.is_first(self), [], tf.bool)
        waits = tf.cast(tf.reshape(waits, [1]), tf.float64)
        local = tf.concat([ends[1:] - ends[:-1], waits], axis=0)
        with self.comm.scope(self._scope):
            # The flag `waits` travels along, because ranks may leave the queue of trials at
            # different times, and must still take the same turn
            gathered = self.comm.all_gather(local, "world", "trial", counted=False)
        # The slowest rank's times, because all wait for it, and ranks that measure differently must
        # decide alike
        slowest = tf.reduce_max(tf.reshape(gathered, [-1, count + 1]), axis=0)
        order, steps, waits = tf.py_function(
            self._conclude, [slowest[:-1], slowest[-1] > 0], [tf.int32, tf.int32, tf.bool]
        )
        last = tf.gather(ends, self._steps_of_round)
        self._ends.assign(tf.where(tf.range(count + 1) == 0, last, ends))
        # By operations of the graph, so that the next step's read follows them
        self._order.assign(tf.ensure_shape(order, [count]))
        self._steps_of_round.assign(tf.ensure_shape(steps, []))
        self._place.assign(0)
        self._has_unsent.assign(tf.logical_or(self._has_unsent, tf.ensure_shape(waits, [])))

    def _conclude(self, seconds: tf.Tensor, waits: tf.Tensor) -> tuple[np.ndarray, int, bool]:
        """Return the next round's order and steps, and True if any residual is unsent."""
        # `seconds`: float64 [plans], on the slowest rank; `waits`: another trial comes first, on
        # any rank
        rounds, count = self.rounds, len(self.executors)
        counts, self._counts = self._counts, not waits
        if waits:
            return np.zeros(count, np.int32), count, False
        if counts:
            rounds.record(seconds.numpy()[: len(rounds.order)].tolist())
        if rounds.chosen is None:
            # The variable keeps its length; a round of fewer plans reads its first entries only
            padded = np.resize(rounds.order, count)
            return padded.astype(np.int32), len(rounds.order), False
        losers = [executor for executor in self.executors if executor is not self.chosen]
        residuals = sum((executor.export() for executor in losers), GradientState()).residuals
        self._add_unsent(residuals)
        # A loser has no more turns, so its state would only occupy memory
        for executor in losers:
            executor.release()
        self.comm.trials.leave(self)
        self._decided(rounds)
        return np.full(count, rounds.chosen, np.int32), 0, bool(residuals)

    def _plus_unsent(self, gradients: Mapping[str, tf.Tensor]) -> dict[str, tf.Tensor]:
        """Return the gradients plus the unsent residuals of these variables on this rank."""
        if not self._unsent:
            return dict(gradients)
        paths = [path for path in gradients if path in self._unsent]
        parts = [gradients[path] for path in paths]
        # By a condition, because nothing is left to send after the first steps, and adding zeros
        # would cost each step a pass
        sent = tf.cond(
            self._has_unsent,
            lambda: self._send_unsent(paths, parts),
            lambda: list(map(tf.identity, parts)),
        )
        return {**gradients, **dict(zip(paths, sent, strict=True))}

    def _send_unsent(self, paths: Sequence[str], gradients: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        sent, remainders = [], []
        for path, gradient in zip(paths, gradients, strict=True):
            residual = tf.reshape(self._unsent[path], gradient.shape)
            total, remainder = send_with_residual(gradient, residual)
            remainders.append(tf.reshape(remainder, [-1]))
            sent.append(tf.identity(total))
        waits = tf.reduce_any([tf.reduce_any(remainder != 0) for remainder in remainders])
        for path, remainder in zip(paths, remainders, strict=True):
            # No residual is left: no memory is held
            self._unsent[path].assign(
                tf.cond(waits, lambda residual=remainder: residual, lambda: tf.zeros([0]))
            )
        with tf.device("/cpu:0"):
            self._has_unsent.assign(waits)
        return sent

    def _add_unsent(self, residuals: Vectors) -> None:
        if not any(part.any() for part in residuals.values()):
            return
        for path, variable in self._unsent.items():
            residual = variable.numpy() if variable.numpy().size else np.float32(0)
            total = np.zeros(self._sizes[path], np.float32) + residual
            variable.assign(total + residuals.get(path, np.float32(0)))

    def _expect_unsent(self, residuals: Vectors) -> None:
        """Get ready for unsent residuals of these variables, and of those of the plans."""
        sizes = {path: part.size for path, part in residuals.items()}
        for executor in self.executors:
            entries = executor.plan.entries
            for bucket in filter(lambda bucket: bucket.keeps_residual, executor.plan.buckets):
                paths = (Piece.of(name).path for name in bucket.variables)
                sizes |= {path: entries[path] for path in paths}
        self._sizes |= sizes
        with tf.device("/cpu:0"):  # The memory of a GPU is left to the model
            for path in sizes.keys() - self._unsent.keys():
                self._unsent[path] = tf.Variable(tf.zeros([0]), trainable=False, shape=[None])
        self._add_unsent(residuals)
        self._has_unsent.assign(bool(self.unsent()))

    def unsent(self) -> Vectors:
        """Return this rank's residuals that no plan keeps: the next step sends them."""
        residuals = {path: variable.numpy() for path, variable in self._unsent.items()}
        # Copies, because `numpy` may share the variable's memory
        return {path: np.array(part) for path, part in residuals.items() if part.any()}

    def follow_rate(self, rate: tf.Tensor) -> None:
        # Also for plans whose turn it is not, because they keep a residual
        for executor in self._active():
            executor.follow_rate(rate)

    def _active(self) -> list[PlanExecutor]:
        return [self.chosen] if self.chosen else self.executors

    @property
    def plans(self) -> list[Plan]:
        """The plans that take turns, or the one that stays."""
        return [executor.plan for executor in self._active()]

    def steps_taken(self) -> int:
        return sum(executor.steps_taken() for executor in self.executors)

    def dense_bytes_between_nodes(self) -> float:
        return sum(executor.dense_bytes_between_nodes() for executor in self.executors)

    def export(self, variables: Set[str] | None = None) -> GradientState:
        parts = [executor.export(variables) for executor in self._active()]
        unsent = GradientState(self.unsent())
        return sum(parts, unsent if variables is None else unsent.of(variables))

    def load(self, state: GradientState) -> GradientState:
        paths = self.plan.paths
        own_state = state.of(paths)
        # Added to the next gradients, because each plan has its turn in some steps only. Before the
        # first step is traced, which then contains the variables
        self._expect_unsent(own_state.residuals)
        for executor in self.executors:
            executor.load(GradientState(rates=own_state.rates))
        # No plan here takes velocities
        residuals, rates = without(state.residuals, paths), without(state.rates, paths)
        return replace(state, residuals=residuals, rates=rates)

    def clear(self, variables: Set[str]) -> None:
        for executor in self._active():
            executor.clear(variables)
        for path in variables & self._unsent.keys():
            self._unsent[path].assign(tf.zeros_like(self._unsent[path]))

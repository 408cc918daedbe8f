"""ReplicaGuard: compares the replicas of all ranks while they train.

    every `every` steps    learning rate, step count, a sum over the bits of each variable
                           -> one all-gather -> equal on all ranks: nothing; else an error

The check is needed because nothing else shows that replicas have drifted apart: by a learning rate
set from a rank's own metric, a model that only one rank has loaded, or different start weights.
"""

import itertools
import time
from collections.abc import Hashable, Mapping, Sequence

import numpy as np
import tensorflow as tf

from tfcommx.collectives.comm import Comm
from tfcommx.core import TfcommxError, check_whole

# Time between the error of rank 0 and those of the others, because users should read rank 0's
RANK_0_FIRST_SECONDS = 3.0
# An odd number with its bits well mixed (2^64 divided by the golden ratio), as int64
_MULTIPLIER = 0x9E3779B97F4A7C15 - 2**64
# Size up to which variables are stacked, in bytes: the copy of larger ones takes longer than ops
LARGEST_STACKED = 2**18
# First columns of a rank's row, before the sums of the variables
NUMBERS = ("learning rate", "step count")
_MOVED_AND_BACK = (
    " A step that adds to weights and subtracts again before the update, as sharpness-aware "
    "minimization does, rounds differently on each rank: let it assign a copy of the weights. An "
    "optimizer that adds random numbers needs a keras.random.SeedGenerator(seed) of equal seeds."
)
CAUSES = {
    "start": "They began with different weights: add cx.callbacks.BroadcastState() to `fit`, or "
    "in a custom loop call cx.broadcast_variables([*model.weights, *optimizer.variables]) "
    f"after building or loading the model, before the first step.{_MOVED_AND_BACK}",
    "learning rate": "Something sets the rate from a rank's own numbers, as ReduceLROnPlateau does "
    "with its own metric: put it on every rank, and cx.callbacks.AverageMetrics() before it.",
    "step count": "Something restored the optimizer on some ranks only: restore the same "
    "checkpoint on every rank, or add cx.callbacks.BroadcastState().",
    "weights": "Something changed them on some ranks only, such as a callback that assigns or "
    f"loads weights: do it on every rank.{_MOVED_AND_BACK} If the ranks' processors compute the "
    "update differently, take strategy=cx.strategies.Rebroadcast(every=5).",
    "state": "A layer assigns it from the samples of its rank, so ranks train with unequal values, "
    "and files have those of rank 0: let it assign the mean over the ranks, by hvd.allreduce in "
    "its `call`, or add cx.callbacks.AverageBatchNorm(), which averages once in an epoch.",
}


class ReplicaError(TfcommxError, RuntimeError):
    """Replicas that must be equal differ; the message names values, ranks and the usual cause."""


class ReplicaGuard:
    """Compares the replicas of one optimizer's model, at its first step and every few steps."""

    def __init__(self, comm: Comm, every: int | None, compares_weights: bool) -> None:
        """Prepare a check every `every` steps; None: never. **Raises:** ConfigurationError."""
        if every is not None:
            check_whole("check_replicas_every", every, least=1)
        # Some strategies let the weights differ for a while
        self._comm, self._every, self._compares_weights = comm, every, compares_weights
        self._scope = ""
        self._on = every is not None and comm.topology.size > 1
        if self._on:
            with tf.init_scope(), tf.device("/cpu:0"):
                # Steps until the next check; -1: disarmed
                self._remaining = tf.Variable(0, dtype=tf.int64, trainable=False)
                self._checks = tf.Variable(0, dtype=tf.int64, trainable=False)

    def arm(self, armed: bool) -> None:
        """Compare from now on, or stop while replicas are known to differ. **Ranks:** all."""
        if self._on and armed != (int(self._remaining) >= 0):
            self._remaining.assign(0 if armed else -1)

    def check(
        self,
        weights: Mapping[str, tf.Variable],
        learning_rate: tf.Tensor,
        steps: tf.Tensor,
        weights_are_equal: tf.Tensor | bool = True,
    ) -> None:
        """Compare with the other ranks, if a check is due.

        Args:
            weights: variable path -> variable, before this step's update.
            learning_rate: float scalar, of this step.
            steps: integer scalar, number of steps that the optimizer has taken.
            weights_are_equal: bool scalar, True if weights must be equal in this step; a check that
                is due waits for such a step.

        **Ranks:** all, in each step. **Cost:** in a step with a check three passes over the weights
        and an all-gather, 16 bytes and 8 for each variable from a rank, for which no update waits;
        in other steps one untaken branch, some 2 microseconds a variable.
        **Raises:** ReplicaError, on every rank; in traced code as a TensorFlow error with its text.
        """
        if not self._on:
            return
        # Numbered at the first check, which all ranks make in one order; a wrap may be one rank's
        # alone
        self._scope = self._scope or self._comm.own_scope()
        with tf.device("/cpu:0"):
            remaining = self._remaining.value()
            waits = tf.equal(remaining, 0)
            due = tf.logical_and(waits, weights_are_equal)
            after = tf.where(due, tf.cast(self._every, tf.int64) - 1, remaining - 1)
            self._remaining.assign(tf.where(waits & ~due, remaining, tf.maximum(after, -1)))
        # Separate from the comparison, because the update must wait only for reading the weights
        sums = tf.cond(
            due,
            lambda: _sums(list(weights.values())) if self._compares_weights else _zeros(weights),
            lambda: _zeros(weights),
        )
        with tf.device("/cpu:0"):
            tf.cond(
                due,
                lambda: self._compare(sums, learning_rate, steps, list(weights)),
                lambda: None,
            )

    def compare_now(
        self, weights: Mapping[str, tf.Variable], steps: int, cause: str = "weights"
    ) -> str:
        """Return the difference between the replicas after a step; empty if there is none.

        `cause` is "weights", or "state" for floats that layers assign: a key of CAUSES.

        **Ranks:** all, outside of traced code. **Cost:** three passes over the weights.
        """
        if not (self._on and self._compares_weights):
            return ""
        sums = _sums(list(weights.values())).numpy().tolist() if weights else []
        rows = self._comm.gather_objects([0, steps, *sums])
        if all(row == rows[0] for row in rows) or len({*map(len, rows)}) > 1:
            return ""
        return describe(np.array(rows), list(weights), equal_before=True, cause=cause)

    def _compare(
        self, sums: tf.Tensor, learning_rate: tf.Tensor, steps: tf.Tensor, names: Sequence[str]
    ) -> None:
        # By its bits, which one all-gather carries together with the integers
        rate = tf.bitcast(tf.cast(learning_rate, tf.float64), tf.int64)
        row = tf.concat([tf.stack([rate, tf.cast(steps, tf.int64)]), sums], 0)
        with self._comm.scope(self._scope):
            rows = self._comm.all_gather(row, "world", "replicas", counted=False)

        # In Python, because a branch with an error takes longer to trace than all checks of a short
        # run take; the rows are the same on all ranks, so all of them raise or none
        def require_equal(rows: np.ndarray, checks: np.ndarray) -> np.ndarray:
            rows = rows.reshape(self._comm.topology.size, -1)
            if (rows != rows[0]).any():
                if self._comm.rank:
                    time.sleep(RANK_0_FIRST_SECONDS)
                raise ReplicaError(describe(rows, names, equal_before=bool(checks)))
            return checks

        tf.numpy_function(require_equal, [rows, self._checks.value()], tf.int64)
        self._checks.assign_add(1)


def describe(
    rows: np.ndarray, names: Sequence[str], equal_before: bool, cause: str = "weights"
) -> str:
    """Describe the differences between ranks: values, ranks, since when, and the usual cause.

    >>> rows = np.array([[0, 3, 7, 1], [0, 3, 8, 1]])
    >>> print(describe(rows, ["dense/kernel", "dense/bias"], True))
    Replicas differ at step 3, and were equal at the last check. The weights differ in 1 of 2 \
variables, 'dense/kernel' for one: rank 0 against rank 1. Something changed them on some ranks \
only, such as a callback that assigns or loads weights: do it on every rank. A step that adds to \
weights and subtracts again before the update, as sharpness-aware minimization does, rounds \
differently on each rank: let it assign a copy of the weights. An optimizer that adds random \
numbers needs a keras.random.SeedGenerator(seed) of equal seeds. If the ranks' processors compute \
the update differently, take strategy=cx.strategies.Rebroadcast(every=5).

    Args:
        rows: int64 [ranks, 2 + variables], with the columns NUMBERS and a sum of each variable.
        equal_before: True if an earlier check found them equal; False: this is the first.
        cause: key of CAUSES if variables differ, and no number.
    """
    differ = (rows != rows[0]).any(0)
    numbers = [position for position in range(len(NUMBERS)) if differ[position]]
    variables = np.flatnonzero(differ[len(NUMBERS) :])
    sentences = []
    if variables.size:
        groups = _groups(rows[:, len(NUMBERS) + variables[0]]).values()
        sentences.append(
            f"The weights differ in {len(variables)} of {len(names)} variables, "
            f"{names[variables[0]]!r} for one: {' against '.join(map(_ranks, groups))}."
        )
    for position in numbers:
        column = rows[:, position].copy()
        values = column.view(np.float64) if position == 0 else column
        sentences.append(f"The {NUMBERS[position]} is {by_rank(values)}.")
    # Not the steps since then, because checks may have been off, or waited for equal weights
    since = (
        f"at step {int(rows[:, 1].max())}, and were equal at the last check"
        if equal_before
        else "at the first check"
    )
    causes = ["start"] if not equal_before and variables.size else []
    # `cause` only without another one, because a different rate or count changes weights, too
    causes += [NUMBERS[position] for position in numbers]
    causes = causes or [cause]
    return " ".join([f"Replicas differ {since}.", *sentences, *(CAUSES[name] for name in causes)])


def by_rank(values: np.ndarray) -> str:
    """Return each value with the ranks that have it.

    >>> by_rank(np.array([0.1, 0.2, 0.1]))
    '0.1 on ranks 0, 2, 0.2 on rank 1'
    """
    return ", ".join(f"{value:g} on {_ranks(ranks)}" for value, ranks in _groups(values).items())


def _groups(values: np.ndarray) -> dict[float, list[int]]:
    """Return value -> the ranks that have it."""
    groups: dict[float, list[int]] = {}
    for rank, value in enumerate(values.tolist()):
        groups.setdefault(value, []).append(rank)
    return groups


def _ranks(ranks: Sequence[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    if len(ranks) > 4:
        return f"ranks {', '.join(map(str, ranks[:3]))} and {len(ranks) - 3} more"
    return f"ranks {', '.join(map(str, ranks))}"


def _sums(weights: Sequence[tf.Variable]) -> tf.Tensor:
    """Return int64 [variables]: for each a sum over its entries' bits, exact in any order.

    It is the sum of w + 2 M w^2 over the variable's words w, modulo 2^64. In sums without squares,
    changes of two entries by 1 and -1 would cancel. The factor is even, because then no two values
    of w have the same term: a change of one word is always seen.
    """
    # Small variables of one shape share their ops, because those of 600 variables took two fifths
    # of the time to trace their step
    groups: dict[Hashable, list[int]] = {}
    for number, variable in enumerate(weights):
        small = variable.shape.num_elements() * variable.dtype.size <= LARGEST_STACKED
        groups.setdefault((variable.dtype, *variable.shape) if small else number, []).append(number)
    axis = tf.constant([1])

    def total(parts: Sequence[tf.Tensor]) -> tf.Tensor:
        # The op itself is called, because tracing tf.reduce_sum takes longer
        totals = [tf.raw_ops.Sum(input=part, axis=axis) for part in parts]
        return totals[0] if len(totals) == 1 else tf.add_n(totals)

    sums, squares = [], []
    for key, numbers in groups.items():
        group = [weights[number] for number in numbers]
        words = _stacked(group) if isinstance(key, tuple) else _words(group[0])
        sums.append(total(words))
        # Added up at once, because eager code would otherwise hold the squares of all variables
        squares.append(total([tf.raw_ops.Mul(x=part, y=part) for part in words]))
    factor = tf.constant(2 * _MULTIPLIER % 2**63, tf.int64)
    grouped = tf.concat(sums, 0) + factor * tf.concat(squares, 0)
    return tf.gather(grouped, np.argsort([*itertools.chain(*groups.values())]))


def _stacked(variables: Sequence[tf.Variable]) -> list[tf.Tensor]:
    """Return the words of 8 bytes of variables of one shape, int64 [variables, words]."""
    rows = tf.reshape(tf.stack(variables), [len(variables), -1])
    in_word = 8 // rows.dtype.size
    if rest := rows.shape[1] % in_word:
        rows = tf.pad(rows, [[0, 0], [0, in_word - rest]])
    if in_word > 1:
        rows = tf.reshape(rows, [len(variables), -1, in_word])
    return [tf.bitcast(rows, tf.int64)]


def _words(variable: tf.Variable) -> list[tf.Tensor]:
    """Return the words of a variable, int64 [1, words], and its last entries, without a copy."""
    integers = {1: tf.int8, 2: tf.int16, 4: tf.int32}
    entries = tf.reshape(variable, [-1])
    in_word = 8 // entries.dtype.size
    if in_word == 1:
        return [tf.bitcast(entries, tf.int64)[None]]
    rest = entries.shape[0] % in_word
    # A slice that begins at the first entry is not a copy
    words = tf.reshape(entries[:-rest] if rest else entries, [1, -1, in_word])
    parts = [tf.bitcast(words, tf.int64)]
    if rest:
        # Not summed in int32, because on a GPU TensorFlow does that on the host
        last = tf.bitcast(entries[-rest:], integers[entries.dtype.size])
        parts.append(tf.cast(last, tf.int64)[None])
    return parts


def _zeros(weights: Mapping[str, tf.Variable]) -> tf.Tensor:
    return tf.zeros([len(weights)], tf.int64)

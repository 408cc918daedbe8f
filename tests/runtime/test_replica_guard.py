"""How the replica guard finds and describes replicas that differ."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from tfcommx.collectives.comm import Comm
from tfcommx.collectives.threads import ThreadComm
from tfcommx.core import ConfigurationError, Topology
from tfcommx.runtime import replica_guard
from tfcommx.runtime.replica_guard import ReplicaGuard, _sums, describe

NAMES = ["dense/kernel", "dense/bias"]


def rows(rates: list[float], steps: list[int], sums: list[list[int]]) -> np.ndarray:
    numbers = np.stack([np.array(rates).view(np.int64), np.array(steps)], axis=1)
    return np.concatenate([numbers, np.array(sums)], axis=1).astype(np.int64)


def test_a_guard_compares_every_few_steps_unless_it_is_disarmed() -> None:
    def work(comm: Comm) -> None:
        guard = ReplicaGuard(comm, 3, True)

        def take_steps(count: int, weight: float) -> None:
            weights = {"w": tf.Variable(weight)}
            for step in range(count):
                guard.check(weights, tf.constant(0.1), tf.constant(step))

        guard.arm(False)
        take_steps(4, float(comm.rank))
        assert int(guard._checks) == 0
        guard.arm(True)
        take_steps(7, 1.0)
        assert int(guard._checks) == 3

    ThreadComm.run(Topology(2, 1), work)


@pytest.mark.parametrize("largest_stacked", [0, 2**18])
@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
def test_opposite_changes_within_one_variable_do_not_cancel(
    dtype: str, largest_stacked: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bits of one entry rose by 1 and those of another fell by 1: the sums of bits were equal."""
    monkeypatch.setattr(replica_guard, "LARGEST_STACKED", largest_stacked)
    integers = {2: tf.int16, 4: tf.int32, 8: tf.int64}[tf.as_dtype(dtype).size]
    numbers = tf.random.stateless_normal([11], [3, 4])
    bits = tf.bitcast(tf.cast(numbers, dtype), integers)
    sums = set()
    for first, second in [(0, 0), *((a, b) for a in range(11) for b in range(11) if a != b)]:
        change = tf.one_hot(first, 11, dtype=integers) - tf.one_hot(second, 11, dtype=integers)
        sums.add(int(_sums([tf.Variable(tf.bitcast(bits + change, dtype))])[0]))
    assert len(sums) == 1 + 11 * 10


@pytest.mark.parametrize("largest_stacked", [0, 12, 2**18])
@pytest.mark.parametrize("dtype", ["int8", "float16", "float32", "int64", "float64"])
def test_weights_of_every_width_have_fingerprints(
    dtype: str, largest_stacked: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each in its variable's place, of which another shape may lie between two of one shape."""
    monkeypatch.setattr(replica_guard, "LARGEST_STACKED", largest_stacked)
    shapes = [[3], [2, 2], [3], [1], [], [2, 2], [3]]
    ones = [tf.Variable(tf.ones(shape, dtype)) for shape in shapes]
    before = _sums(ones)
    assert before.dtype == tf.int64 and before.shape == [len(shapes)]
    for number, variable in enumerate(ones):
        variable.assign_add(tf.ones_like(variable))
        assert np.flatnonzero(_sums(ones) != before).tolist() == [number]
        variable.assign(tf.ones_like(variable))


def test_a_start_from_different_weights_is_told_with_its_remedy() -> None:
    said = describe(rows([0.1, 0.1], [0, 0], [[1, 5], [2, 5]]), NAMES, equal_before=False)
    assert "at the first check" in said and "1 of 2 variables, 'dense/kernel'" in said
    assert "rank 0 against rank 1" in said and "BroadcastState" in said
    assert "learning rate" not in said


def test_a_rate_of_one_rank_is_told_with_its_ranks_and_since_when() -> None:
    said = describe(
        rows([0.05, 0.05, 0.05, 5e-05], [200] * 4, [[1, 5], [1, 5], [1, 5], [2, 5]]),
        NAMES,
        equal_before=True,
    )
    assert "at step 200, and were equal at the last check" in said
    assert "0.05 on ranks 0, 1, 2, 5e-05 on rank 3" in said
    assert "AverageMetrics" in said and "BroadcastState" not in said


@pytest.mark.parametrize("equal_before", [False, True])
def test_a_step_that_moves_weights_and_back_is_told_its_remedy(equal_before: bool) -> None:
    """Sharpness-aware minimization in `fit` was told to add the BroadcastState that it had."""
    # The weights of two ranks with unequal gradients, after adding and subtracting
    one, other = (np.float32(0.3) + step - step for step in np.float32([0.1, 3.0]))
    assert one != other
    said = describe(rows([0.1, 0.1], [7, 7], [[1, 5], [2, 5]]), NAMES, equal_before)
    assert "assign a copy of the weights" in said


def test_many_ranks_are_not_listed_one_by_one() -> None:
    sums = [[number // 7, 5] for number in range(14)]
    said = describe(rows([0.1] * 14, [7] * 14, sums), NAMES, equal_before=True)
    assert "ranks 0, 1, 2 and 4 more against ranks 7, 8, 9 and 4 more" in said


@pytest.mark.parametrize("every", [0, -3, 2.5, "often"])
def test_an_interval_that_is_none_is_refused(every: object) -> None:
    with pytest.raises(ConfigurationError, match="check_replicas_every"):
        ThreadComm.run(Topology(1, 2), lambda comm: ReplicaGuard(comm, every, True))

"""Collectives inside conditionals, in a loop over a data set that is a part of a function."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from tfcommx.collectives.comm import Comm


@pytest.mark.extended
def test_collectives_of_a_branch_keep_their_names_in_a_loop_over_a_data_set(comm: Comm) -> None:
    """All collectives of a branch had one name, and in nested branches another on each rank.

    TensorFlow moves ops into a branch that alone uses them, and then appends the conditional's name
    to the names of all ops there. Horovod uses the part after the last slash, which was `cond_0`
    for each of them, and refused the second. In nested branches, such as the comparison of replicas
    inside of LossScaleOptimizer, it depended on the order of renaming, which differed between ranks
    in some trainings after `strategy="root"`: each waited for another name.
    """
    size, half = comm.topology.size, tf.constant(0.5)

    def sums(number: tf.Tensor) -> tf.Tensor:
        # Their lengths differ, and none needs another, so that all are in flight at once
        parts = [
            tf.reduce_sum(comm.allreduce(tf.fill([length], number), "world", f"sum{length}"))
            for length in (1, 2, 3)
        ]
        rows = comm.all_gather(tf.fill([4], number), "world", "rows")
        first = comm.broadcast(tf.fill([5], number), 0, "first")
        every = comm.allreduce_list([tf.fill([6], number), number[None]], "list", average=True)
        return tf.add_n([*parts, *map(tf.reduce_sum, [rows, first, *every])])

    @tf.function
    def total(data: tf.data.Dataset) -> tf.Tensor:
        result = tf.zeros([])
        for number in data:
            root = tf.sqrt(number)  # Used in one branch only, so TensorFlow moves it there
            with tf.name_scope("step"), comm.scope("tfcommx_loop/"):
                result += tf.cond(number > half, lambda: sums(root), lambda: half)  # noqa: B023
        return result

    data = tf.data.Dataset.from_tensor_slices(np.float32([4, 9, 0]))
    expected = (2 + 3) * ((1 + 2 + 3 + 4) * size + 5 + 6 + 1) + 0.5
    assert float(total(data)) == expected

"""Calls in the background of steps: where TensorFlow has one thread for its operations."""

from __future__ import annotations

import os
import subprocess
import sys

import warm_ranks
from launching import QUICK

PROGRAM = """
import tensorflow as tf

tf.config.threading.set_inter_op_parallelism_threads(1)
tf.config.threading.set_intra_op_parallelism_threads(1)

from tfcommx.strategies.background import BackgroundCalls

count = tf.Variable(0)
call = tf.function(lambda: count.assign_add(1)).get_concrete_function()
background = BackgroundCalls([call])


@tf.function
def step():
    begun = background.begin(0, [])
    with tf.control_dependencies([begun]):
        ended = background.wait()
    with tf.control_dependencies([ended]):
        return count.read_value()


print([int(step()) for _ in range(20)] == list(range(1, 21)), background.under_way)
"""


def test_a_wait_leaves_the_only_thread_to_the_call() -> None:
    """A wait inside an operation would hold the thread that the call needs, for ever."""
    environment = {**os.environ, "PYTHONPATH": QUICK, **warm_ranks.environment(alone=True)}
    words = [sys.executable, "-c", PROGRAM]
    ended = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=120)
    assert ended.stdout == "True None\n", ended.stderr[-3000:]

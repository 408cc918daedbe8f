"""How far an input pipeline runs ahead of its consumer: fixed, instead of tuned by tf.data.

tf.data tunes in a thread of each iterator, which sleeps between two looks, up to a minute in the
end. Who lets the iterator go, as `fit` and `evaluate` do when they end, waits for that thread; and
TensorFlow 2.21 wakes it before it sets the flag that tells it to end, so that it may look too early
and sleep on. All other ranks wait in their next exchange: 10 to 50 s at a change of phase.

Without it tf.data adds nothing by itself: a stage runs in the thread that trains, unless it has
`num_parallel_calls` or a `prefetch` behind it. Both need a number: AUTOTUNE's queue has no limit
then.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import tensorflow as tf

# Bytes of the batches that are made or ready, if more than three have room in it. Each batch more
# is fresh memory, which costs more than the pixels in it
READ_AHEAD = 64 << 20


def untuned(dataset: tf.data.Dataset) -> tf.data.Dataset:
    """Return the dataset without tf.data's tuning; its stages say themselves how far they go."""
    import tensorflow as tf

    options = tf.data.Options()
    options.autotune.enabled = False
    return dataset.with_options(options)


def in_flight(batch_bytes: int, threads: int) -> tuple[int, int]:
    """Return how many batches are made at once, and how many wait ready.

    Args:
        batch_bytes: of one batch; 0 if nobody knows, which is taken for large.
        threads: that this process may use, >= 1.

    >>> in_flight(1 << 20, 4), in_flight(16 << 20, 4), in_flight(38 << 20, 4), in_flight(0, 4)
    ((4, 4), (3, 1), (2, 1), (2, 1))
    """
    room = max(3, READ_AHEAD // (batch_bytes or READ_AHEAD))
    at_once = min(threads, room - 1)
    return at_once, min(max(2, threads), room - at_once)

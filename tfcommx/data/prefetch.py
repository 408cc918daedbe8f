"""Fixed prefetch depths for input pipelines, in place of tf.data's autotuning.

tf.data tunes in a thread of each iterator, which sleeps between two looks, for up to a minute.
Whoever releases the iterator, as `fit` and `evaluate` do at their end, waits for that thread; and
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

# Bytes of the batches that are being made or are ready; at least three batches in any case. More
# batches cost fresh memory, which takes longer than the pixels in it.
PREFETCH_BYTES = 64 << 20


def without_autotune(dataset: tf.data.Dataset) -> tf.data.Dataset:
    """Turn tf.data's autotuning off for a dataset; its stages need numbers of their own."""
    import tensorflow as tf

    options = tf.data.Options()
    options.autotune.enabled = False
    return dataset.with_options(options)


def prefetch_sizes(batch_bytes: int, threads: int) -> tuple[int, int]:
    """Return how many batches are made in parallel, and how many are kept ready.

    Args:
        batch_bytes: of one batch; 0 if nobody knows, which is taken for large.
        threads: that this process may use, >= 1.

    >>> [prefetch_sizes(mbytes << 20, threads=4) for mbytes in (1, 16, 38, 0)]
    [(4, 4), (3, 1), (2, 1), (2, 1)]
    """
    room = max(3, PREFETCH_BYTES // (batch_bytes or PREFETCH_BYTES))
    at_once = min(threads, room - 1)
    return at_once, min(max(2, threads), room - at_once)

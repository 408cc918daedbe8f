"""Input pipelines that end with their consumer: no autotuning, no calls after Python's end.

Without autotuning tf.data adds no parallelism: a stage runs in the training thread, unless it has
`num_parallel_calls` or is followed by a `prefetch`. Both need a number, because the queue of
AUTOTUNE then has no limit.
"""

import os
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfcommx.core import ConfigurationError

# Bytes of the batches that are being made or are ready, but at least three batches. Not more,
# because new memory for a batch takes longer than its pixels
PREFETCH_BYTES = 64 << 20


def without_autotune(dataset: tf.data.Dataset) -> tf.data.Dataset:
    """Disable tf.data's autotuning for a dataset, whose stages then need explicit numbers."""
    # tf.data tunes in a thread of each iterator, which sleeps for up to a minute between two
    # checks. A release of the iterator, as at the end of `fit` and `evaluate`, waits for that
    # thread. TensorFlow 2.21 wakes the thread before it sets the flag that ends it, so that the
    # thread may check too early and sleep again. All other ranks wait in their next exchange: 10 to
    # 50 s at a change of phase
    options = tf.data.Options()
    options.autotune.enabled = False
    return dataset.with_options(options)


def of_one_rank(dataset: tf.data.Dataset, ranks: int) -> tf.data.Dataset:
    """Disable autotuning, and refuse `shard(ranks, rank)`, by which scripts shard.

    Args:
        dataset: has the samples of one rank.
        ranks: number of ranks, >= 1.
    """

    def shard(num_shards: Any, index: Any, name: str | None = None) -> tf.data.Dataset:
        if tf.get_static_value(num_shards) == ranks > 1:
            raise ConfigurationError(
                "A dataset of DataCache has the samples of one rank already. Received "
                f"shard({ranks}, {index}), which leaves {ranks - 1} of {ranks} batches out on "
                "every rank. Leave `shard` out."
            )
        return without_autotune(dataset.shard(num_shards, index, name))

    result = without_autotune(dataset)
    result.shard = shard
    return result


def prefetch_sizes(batch_bytes: int, threads: int) -> tuple[int, int]:
    """Return the number of batches that are made in parallel, and the number that are kept ready.

    Args:
        batch_bytes: bytes of one batch; 0 if unknown, which is treated as large.
        threads: number of threads that this process may use, >= 1.

    >>> [prefetch_sizes(mbytes << 20, threads=4) for mbytes in (1, 16, 38, 0)]
    [(4, 4), (3, 1), (2, 1), (2, 1)]
    """
    room = max(3, PREFETCH_BYTES // (batch_bytes or PREFETCH_BYTES))
    at_once = min(threads, room - 1)
    return at_once, min(max(2, threads), room - at_once)


# Seconds that the end of a process waits for running calls
EXIT_SECONDS = 5

_calls = threading.Condition()
# Number of running calls from TensorFlow's threads
_inside = 0
_ended = False


def weak_method(owner: object, work: Callable[..., Any]) -> Callable[..., Any]:
    """Bind `work` to `owner` by a weak reference, for TensorFlow's threads.

    The end of the process waits for running calls; later ones raise RuntimeError.
    """
    # TensorFlow never drops the functions that it has received, and would keep `owner` alive
    reference = weakref.ref(owner)

    # A thread that called Python after Python's end would hang there. Its tf.data pipeline would
    # wait for it, and the process would never end
    def call(*args: Any) -> Any:
        global _inside
        with _calls:
            if _ended:
                raise RuntimeError("The process ends.")
            _inside += 1
        try:
            living = reference()
            if living is None:
                raise RuntimeError(
                    "The DataCache is gone. Keep it, or the dataset that it made, as long as "
                    "batches are asked for."
                )
            return work(living, *args)
        finally:
            with _calls:
                _inside -= 1
                _calls.notify_all()

    return call


def _end() -> None:
    global _ended
    with _calls:
        _ended = True
        _calls.wait_for(lambda: not _inside, EXIT_SECONDS)
    # Time for the calls to return through TensorFlow, where errors fill the pipeline's queue
    time.sleep(0.1)


def _forget_calls() -> None:
    """Reset the count in a forked child, because it has none of the calling threads."""
    global _calls, _inside
    _calls, _inside = threading.Condition(), 0


os.register_at_fork(after_in_child=_forget_calls)
# Not by `atexit`, because that runs after the end of the thread pools, which running calls need
threading._register_atexit(_end)  # type: ignore[attr-defined]

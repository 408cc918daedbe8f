"""Input pipelines that end with their consumer: no autotuning, no calls after Python's end.

Python functions that TensorFlow's threads call are wrapped (`joined_at_exit`). A thread that called
Python after Python's end would hang there; its tf.data pipeline would wait for it, and the process
would never end.

Prefetch depths are fixed (`without_autotune`). tf.data tunes in a thread of each iterator, which
sleeps between two looks, for up to a minute. Whoever releases the iterator, as `fit` and `evaluate`
do at their end, waits for that thread; and TensorFlow 2.21 wakes it before it sets the flag that
tells it to end, so that it may look too early and sleep on. All other ranks wait in their next
exchange: 10 to 50 s at a change of phase.

Without it tf.data adds nothing by itself: a stage runs in the thread that trains, unless it has
`num_parallel_calls` or a `prefetch` behind it. Both need a number: AUTOTUNE's queue has no limit
then.
"""

from __future__ import annotations

import functools
import os
import threading
import time
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

if TYPE_CHECKING:
    import tensorflow as tf

P = ParamSpec("P")
T = TypeVar("T")
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


# Seconds that the end of a process waits for calls that are under way.
EXIT_SECONDS = 5

_calls = threading.Condition()
# Calls of TensorFlow's threads that are under way.
_inside = 0
_ended = False


def joined_at_exit(work: Callable[P, T]) -> Callable[P, T]:
    """Wrap a function for TensorFlow's threads: the end of the process waits for calls under way.

    Later calls raise RuntimeError.
    """

    @functools.wraps(work)
    def call(*args: P.args, **options: P.kwargs) -> T:
        global _inside
        with _calls:
            if _ended:
                raise RuntimeError("The process ends.")
            _inside += 1
        try:
            return work(*args, **options)
        finally:
            with _calls:
                _inside -= 1
                _calls.notify_all()

    return call


def weak_method(owner: object, work: Callable[..., Any]) -> Callable[..., Any]:
    """Bind `work` to `owner` by a weak reference, and wrap it as `joined_at_exit` does.

    TensorFlow never drops the functions that it is given, and would keep `owner` with them.
    """
    here = weakref.ref(owner)

    def call(*args: Any) -> Any:
        living = here()
        if living is None:
            raise RuntimeError(
                "The DataCache is gone. Keep it, or the dataset that it made, as long as "
                "batches are asked for."
            )
        return work(living, *args)

    return joined_at_exit(call)


def _end() -> None:
    global _ended
    with _calls:
        _ended = True
        _calls.wait_for(lambda: not _inside, EXIT_SECONDS)
    # They return through TensorFlow, and those that raise fill the pipeline's queue.
    time.sleep(0.1)


def _forget_calls() -> None:
    """Reset the count in a forked child, which has none of the threads whose calls run."""
    global _calls, _inside
    _calls, _inside = threading.Condition(), 0


os.register_at_fork(after_in_child=_forget_calls)
# Before the thread pools end, which calls under way need; `atexit` would come after them.
threading._register_atexit(_end)  # type: ignore[attr-defined]

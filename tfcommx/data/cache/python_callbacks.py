"""Wraps Python functions that TensorFlow's threads call: none runs on after Python's end.

A thread that called Python after Python's end would hang there; its tf.data pipeline would wait for
it, and the process would never end.
"""

from __future__ import annotations

import functools
import os
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

# Seconds that the end of a process waits for calls that are under way.
EXIT_SECONDS = 5

_calls = threading.Condition()
# Calls of TensorFlow's threads that are under way.
_inside = 0
_ended = False


def joined_at_exit(work: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a function for TensorFlow's threads: the end of the process waits for calls under way.

    Later calls raise RuntimeError.
    """

    @functools.wraps(work)
    def call(*args: Any) -> Any:
        global _inside
        with _calls:
            if _ended:
                raise RuntimeError("The process ends.")
            _inside += 1
        try:
            return work(*args)
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
threading._register_atexit(_end)

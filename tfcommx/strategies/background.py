"""Calls in a separate thread, which run while training steps continue."""

import atexit
import functools
import threading
from collections.abc import Callable, Sequence
from concurrent import futures
from concurrent.futures import Future
from typing import TypeVar

import numpy as np
import tensorflow as tf

from tfcommx.kernels.traced import untraced

Result = TypeVar("Result")
# Seconds that a thread has to end when the process ends
END_SECONDS = 2.0


def in_thread(call: Callable[[], Result], name: str) -> Future[Result]:
    """Start a call in a daemon thread, for which the process does not wait when it ends."""
    future: Future[Result] = Future()

    def run() -> None:
        try:
            future.set_result(call())
        # Any exception, because whoever waits for the result would wait forever without one
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return future


class BackgroundCalls:
    """Background calls, at most one at a time, started in one step and awaited in a later one.

    `begin` and `wait` belong to a step's graph; each returns a tensor that exists once it has run.
    A wait occupies no TensorFlow thread, because the call needs one for its operations and the
    pool may have only one.
    """

    def __init__(self, calls: Sequence[Callable[[], object]]) -> None:
        self._calls = calls
        # Number and future of the call that was started and not yet awaited
        self._under_way: tuple[int, Future[object]] | None = None
        with untraced(), tf.device("/cpu:0"):
            self._ended = tf.queue.FIFOQueue(1, [tf.bool], [[]])

    @property
    def under_way(self) -> int | None:
        """The number of the call that was started and not yet awaited."""
        return None if self._under_way is None else self._under_way[0]

    def begin(self, number: int, after: Sequence[tf.Operation]) -> tf.Tensor:
        """Start a call after the given operations have run."""

        def start() -> np.bool_:
            # For this call alone, because atexit would keep a run that is replaced, and its copies
            # of the weights
            atexit.register(self._stop)
            call = functools.partial(self._carry_out, number)
            self._under_way = number, in_thread(call, "tfcommx-background")
            return np.bool_(True)

        with tf.device("/cpu:0"):
            # Reading the queue's size orders this after an earlier wait, because automatic control
            # dependencies keep the order of operations on one resource
            in_turn = self._ended.size()
            with tf.control_dependencies([*after, in_turn]):
                return tf.numpy_function(start, [], tf.bool)

    def wait(self) -> tf.Tensor:
        """Wait for the call that is under way. **Raises:** the call's exception."""
        with tf.device("/cpu:0"), tf.control_dependencies([self._ended.dequeue()]):
            return tf.numpy_function(self._take, [], tf.bool)

    def settle(self, seconds: float | None = None) -> None:
        """Let the call that is under way end; its `wait` is still due. Outside of traced code."""
        if self._under_way is not None:
            futures.wait([self._under_way[1]], seconds)

    def _carry_out(self, number: int) -> None:
        try:
            self._calls[number]()
        finally:
            # Also after an error, which `_take` raises in the step: without an entry it would wait
            # forever
            self._ended.enqueue(True)
            atexit.unregister(self._stop)

    def _take(self) -> np.bool_:
        assert self._under_way is not None, "a wait follows a begin"
        (_, future), self._under_way = self._under_way, None
        future.result()
        return np.bool_(True)

    def _stop(self) -> None:
        """Let the call end before TensorFlow and Horovod shut down."""
        # For a limited time, because the call may wait for a rank that is gone
        self.settle(END_SECONDS)

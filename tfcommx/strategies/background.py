"""Calls in a thread of their own, which go on while steps are taken."""

from __future__ import annotations

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
# For a thread to end at the end of the process
END_SECONDS = 2.0


def in_thread(call: Callable[[], Result], name: str) -> Future[Result]:
    """Start a call in a daemon thread, which the end of the process does not wait for."""
    future: Future[Result] = Future()

    def run() -> None:
        try:
            future.set_result(call())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return future


class BackgroundCalls:
    """Calls of which at most one is under way, begun in one step and awaited in a later one.

    `begin` and `wait` are for a step's graph; they return an operation that has run when they have
    happened. A wait takes no thread of TensorFlow's: the call needs one for its own operations,
    and there may be no more than one.
    """

    def __init__(self, calls: Sequence[Callable[[], object]]) -> None:
        self._calls = calls
        # The number of the call that has begun and that nobody has waited for, and its end
        self._under_way: tuple[int, Future[object]] | None = None
        with untraced(), tf.device("/cpu:0"):
            self._ended = tf.queue.FIFOQueue(1, [tf.bool], [[]])

    @property
    def under_way(self) -> int | None:
        """The number of the call that has begun and that nobody has waited for."""
        return None if self._under_way is None else self._under_way[0]

    def begin(self, number: int, after: Sequence[tf.Operation]) -> tf.Tensor:
        """Start a call when some operations have run."""

        def start() -> np.bool_:
            atexit.register(self._stop)
            call = functools.partial(self._carry_out, number)
            self._under_way = number, in_thread(call, "tfcommx-background")
            return np.bool_(True)

        with tf.device("/cpu:0"):
            # What asks the queue comes, in a graph, after a wait that was written before it
            in_turn = self._ended.size()
            with tf.control_dependencies([*after, in_turn]):
                return tf.numpy_function(start, [], tf.bool)

    def wait(self) -> tf.Tensor:
        """Wait for the call that is under way. **Raises:** what it has raised."""
        with tf.device("/cpu:0"), tf.control_dependencies([self._ended.dequeue()]):
            return tf.numpy_function(self._take, [], tf.bool)

    def settle(self) -> None:
        """Let the call that is under way end; it is still waited for. Outside of traced code."""
        self._end(None)

    def _carry_out(self, number: int) -> None:
        try:
            self._calls[number]()
        finally:
            self._ended.enqueue(True)
            atexit.unregister(self._stop)

    def _take(self) -> np.bool_:
        assert self._under_way is not None, "a wait follows a begin"
        (_, future), self._under_way = self._under_way, None
        future.result()
        return np.bool_(True)

    def _stop(self) -> None:
        """Let the call end before TensorFlow and Horovod do."""
        self._end(END_SECONDS)

    def _end(self, seconds: float | None) -> None:
        if self._under_way is not None:
            futures.wait([self._under_way[1]], seconds)

"""Report this rank's activity to the stall watch: its step, and the collective it waits in.

    graph of a step     all gradients exist --> begun = n
                        bucket's result exists --> ended[bucket] = n

    thread, every 2 s   n has changed?                       the rank takes steps
                        a bucket has not ended?              it waits in its exchange
                        else: where is the main thread?      in a collective, in `fit`, beyond it

The thread needs Python's lock to observe the rank; while another thread holds the lock, the last
report remains valid.

**Cost:** in each step one small operation on the host and one per bucket, off the critical path; in
the thread about 0.1 ms per observation.
"""

import atexit
import contextlib
import json
import os
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from types import FrameType

import tensorflow as tf

from tfcommx.kernels.traced import after, untraced
from tfcommx.watch.stalls import COLLECTIVE, COMPUTES, LEFT, PYTHON, WAITS

# Time limit for the last observation to end
END_SECONDS = 2.0
# Longest description of one rank, in characters; longer ones are cut
LONGEST = 120
PACKAGE = os.path.dirname(os.path.dirname(__file__))
COLLECTIVES = os.path.join(PACKAGE, "collectives")
# Parts of the paths of files that users have not written
LIBRARIES = (PACKAGE, "site-packages", "dist-packages", os.path.dirname(os.__file__), "<")


class ExchangeProgress:
    """Counters of one exchange: the number of its starts, and of the ends of each part.

    Args:
        parts: names of the parts in messages, such as "the exchange of bucket 3".
        counted: True if the exchange makes a step.
        queued: True if a collective's op ends before its result exists; see
            `Progress.ends_when_queued`.
    """

    def __init__(self, parts: Sequence[str], counted: bool, queued: bool = False) -> None:
        self.parts, self.counted, self._queued = parts, counted, queued
        # On the host, because the thread must read them while the GPU waits in a collective
        with untraced(), tf.device("/cpu:0"):
            self._begun = tf.Variable(0, dtype=tf.int64, trainable=False, name="begun")
            self._ended = [
                tf.Variable(0, dtype=tf.int64, trainable=False, name="ended") for _ in parts
            ]

    def begin(self, inputs: Iterable[tf.Tensor]) -> tf.Tensor:
        """Count a start of the exchange once all inputs exist; return its number, int64, from 1."""
        with tf.control_dependencies([tf.group(*inputs)]), tf.device("/cpu:0"):
            return self._begun.assign_add(1).read_value()

    def end(self, part: int, outputs: Iterable[tf.Tensor], number: tf.Tensor) -> None:
        """Record the end of this part of exchange `number` once all outputs exist."""
        outputs = list(outputs)
        if self._queued:
            number = after(number, outputs)
        with tf.control_dependencies([tf.group(*outputs)]), tf.device("/cpu:0"):
            self._ended[part].assign(number)

    def begun(self) -> int:
        return int(self._begun.numpy())

    def waiting(self) -> str:
        """Return the first part that has begun and not ended; empty if none."""
        begun = self.begun()
        for part, ended in zip(self.parts, self._ended, strict=True):
            if int(ended.numpy()) < begun:
                return part
        return ""


class UnwatchedExchange(ExchangeProgress):
    """An exchange without a watch: adds no operation to the step."""

    def __init__(self) -> None:
        pass

    def begin(self, inputs: Iterable[tf.Tensor]) -> tf.Tensor:
        return None

    def end(self, part: int, outputs: Iterable[tf.Tensor], number: tf.Tensor) -> None:
        pass


class Progress:
    """Observes the activity of this rank from a separate thread."""

    def __init__(self) -> None:
        self.watched, self._saw_fit, self._step = False, False, -1
        # True if Horovod ends a collective's op when it is queued on the GPU, not when it is done
        self.ends_when_queued = False
        # Living exchange -> its steps at the last observation
        self._waits: dict[weakref.ref[ExchangeProgress], int] = {}
        # Steps of exchanges that no longer exist
        self._steps_before = 0

    def of_exchange(self, parts: Sequence[str], counted: bool = True) -> ExchangeProgress:
        """Return the counters of an exchange; see ExchangeProgress."""
        if not self.watched:
            return UnwatchedExchange()
        self._saw_fit = self._saw_fit or _in_fit(_frames(sys._getframe()))
        exchange = ExchangeProgress(parts, counted, self.ends_when_queued)
        self._waits[weakref.ref(exchange)] = 0
        return exchange

    def watch(self, send: Callable[[bytes], object], period: float) -> None:
        """Start the thread that reports changes to the watcher.

        Args:
            period: seconds between two observations, > 0.
        """
        self.watched, stop = True, threading.Event()

        def look() -> None:
            last_report = None
            while not stop.wait(period):
                report = self.look()
                if report != last_report:
                    last_report = report
                    # The watcher may have ended
                    with contextlib.suppress(OSError):
                        send(b"at " + json.dumps(report).encode() + b"\n")

        thread = threading.Thread(target=look, name="tfcommx-progress", daemon=True)
        thread.start()

        def end() -> None:
            # Because TensorFlow must not be unloaded while the thread uses it
            stop.set()
            thread.join(END_SECONDS)

        atexit.register(end)

    def look(self) -> tuple[int, str, str]:
        """Return the steps begun, the activity, and its collective or source line."""
        exchanges = self._still_there()
        step = self._steps_before + sum(self._waits.values())
        before, self._step = self._step, step
        if step != before:
            return step, COMPUTES, ""
        frames = _frames(sys._current_frames().get(threading.main_thread().ident or 0))
        doing, details = self._doing(frames, exchanges)
        return step, doing, details[:LONGEST]

    def _still_there(self) -> list[ExchangeProgress]:
        exchanges = []
        # A list, because entries of exchanges that no longer exist are removed
        for reference in list(self._waits):
            exchange = reference()
            if exchange is None:
                # Kept, because the number of this rank's steps must not fall
                self._steps_before += self._waits.pop(reference)
                continue
            exchanges.append(exchange)
            self._waits[reference] = exchange.begun() if exchange.counted else 0
        return exchanges

    def _doing(self, frames: list[FrameType], exchanges: list[ExchangeProgress]) -> tuple[str, str]:
        in_fit = _in_fit(frames)
        self._saw_fit = self._saw_fit or in_fit
        in_library = bool(frames) and _is_in(frames[0], "tensorflow", "horovod")
        if in_library and (
            parts := [part for exchange in exchanges if (part := exchange.waiting())]
        ):
            return WAITS, parts[0]
        calls = [index for index, frame in enumerate(frames) if _is_collective(frame)]
        if calls and not any(map(_adds_to_graph, frames[: calls[0]])):
            return WAITS, _caller(frames[calls[-1] + 1 :])
        if self._saw_fit and not in_fit:
            return LEFT, _where(frames)
        return (COMPUTES, "") if in_library else (PYTHON, _where(frames))


def source_line(frame: FrameType) -> str:
    """Return the user's line that leads to a frame, and the function that the frame runs."""
    return _where(_frames(frame), innermost=True)


def function_of(frame: FrameType) -> str:
    """Return the file and function of this package that a frame runs; empty if it is a user's."""
    file = frame.f_code.co_filename
    inside = file.startswith(os.path.join(PACKAGE, ""))
    return f"{os.path.relpath(file, PACKAGE)}:{frame.f_code.co_qualname}" if inside else ""


def _frames(frame: FrameType | None) -> list[FrameType]:
    # The innermost first
    frames = []
    while frame is not None:
        frames.append(frame)
        frame = frame.f_back
    return frames


def _is_in(frame: FrameType, *packages: str) -> bool:
    """Return True if a frame's code lies in the folder of one of these packages."""
    files = [getattr(sys.modules.get(name), "__file__", None) for name in packages]
    folders = tuple(os.path.join(os.path.dirname(file), "") for file in files if file)
    return frame.f_code.co_filename.startswith(folders)


def _in_fit(frames: list[FrameType]) -> bool:
    return any(frame.f_code.co_name == "fit" and _is_in(frame, "keras") for frame in frames)


def _is_collective(frame: FrameType) -> bool:
    in_comm = frame.f_code.co_filename == os.path.join(COLLECTIVES, "horovod.py")
    return in_comm or _is_in(frame, "horovod")


def _adds_to_graph(frame: FrameType) -> bool:
    # A collective that is traced exchanges nothing, and a starved process may trace for minutes
    return frame.f_code.co_filename.endswith("tensorflow/python/framework/op_def_library.py")


def _caller(frames: list[FrameType]) -> str:
    # The first function outside of `collectives`
    for frame in frames:
        name = frame.f_code.co_filename
        if os.path.dirname(name) != COLLECTIVES and not _is_in(frame, "tensorflow"):
            return f"{COLLECTIVE} of {frame.f_code.co_qualname}"
    return COLLECTIVE


def _where(frames: list[FrameType], innermost: bool = False) -> str:
    # The user's line that the thread executes, and the function that it calls, or the innermost one
    for position, frame in enumerate(frames):
        code = frame.f_code
        if any(part in code.co_filename for part in LIBRARIES):
            continue
        line = f"{os.path.basename(code.co_filename)}:{frame.f_lineno} in {code.co_name}"
        # Without Keras's wrapper of `fit` and `evaluate`, which shortens the traces of errors
        called = [
            inner
            for inner in frames[:position]
            if not inner.f_code.co_filename.endswith("traceback_utils.py")
        ]
        if not called:
            return line
        return f"{line} ({called[0 if innermost else -1].f_code.co_qualname})"
    return frames[0].f_code.co_qualname if frames else ""

"""What this rank is doing, for the stall watch: at which step it is, and whether it waits.

    graph of a step     all gradients are there --> begun = n
                        bucket's result is there --> ended[bucket] = n

    thread, every 2 s   n is another one than before?        the rank takes steps
                        a bucket has not ended?              it waits in its exchange
                        else: where is the main thread?      in a collective, in `fit`, beyond it

The thread needs Python's lock for its look; while another thread holds that, what it has said last
stands.

**Cost:** in each step one small operation on the host and one per bucket, which nothing waits for;
of the thread some 0.1 ms per look.
"""

from __future__ import annotations

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
from tfcommx.watch.stalls import COMPUTES, LEFT, PYTHON, WAITS

# For the last look to end
END_SECONDS = 2.0
# Of what is said of one rank; longer is cut
LONGEST = 120
PACKAGE = os.path.dirname(os.path.dirname(__file__))
COLLECTIVES = os.path.join(PACKAGE, "collectives")
# In the paths of files that users have not written
LIBRARIES = (PACKAGE, "site-packages", "dist-packages", os.path.dirname(os.__file__), "<")


class ExchangeProgress:
    """Counters of one exchange: how often it has begun, and each of its parts ended.

    Args:
        parts: what ranks wait in, for people, such as "the exchange of bucket 3".
        counted: whether the exchange makes a step.
        queued: whether a collective's op ends before its result is there, as Progress has it.
    """

    def __init__(self, parts: Sequence[str], counted: bool, queued: bool = False) -> None:
        self.parts, self.counted, self._queued = parts, counted, queued
        with untraced(), tf.device("/cpu:0"):
            self._begun = tf.Variable(0, dtype=tf.int64, trainable=False, name="begun")
            self._ended = [
                tf.Variable(0, dtype=tf.int64, trainable=False, name="ended") for _ in parts
            ]

    def begin(self, inputs: Iterable[tf.Tensor]) -> tf.Tensor:
        """Note, when all inputs are there, that the exchange has begun; return its number."""
        with tf.control_dependencies([tf.group(*inputs)]), tf.device("/cpu:0"):
            return self._begun.assign_add(1).read_value()

    def end(self, part: int, outputs: Iterable[tf.Tensor], number: tf.Tensor) -> None:
        """Note, when all outputs are there, that this part of exchange `number` has ended."""
        outputs = list(outputs)
        if self._queued:
            number = after(number, outputs)
        with tf.control_dependencies([tf.group(*outputs)]), tf.device("/cpu:0"):
            self._ended[part].assign(number)

    def begun(self) -> int:
        """Return how many exchanges have begun."""
        return int(self._begun.numpy())

    def waiting(self) -> str:
        """Return the first part that has begun and not ended; empty if there is none."""
        begun = self.begun()
        for part, ended in zip(self.parts, self._ended, strict=True):
            if int(ended.numpy()) < begun:
                return part
        return ""


class UnwatchedExchange(ExchangeProgress):
    """An exchange that nobody watches: nothing is added to the step."""

    def __init__(self) -> None:
        pass

    def begin(self, inputs: Iterable[tf.Tensor]) -> tf.Tensor:
        return None

    def end(self, part: int, outputs: Iterable[tf.Tensor], number: tf.Tensor) -> None:
        pass


class Progress:
    """What this rank is doing, seen from a thread of its own."""

    def __init__(self) -> None:
        self.watched, self._saw_fit, self._step = False, False, -1
        # Whether Horovod ends a collective's op when it is queued on the GPU, not when it is done
        self.ends_when_queued = False
        # Of exchanges that are still there, each with its steps at the last look
        self._waits: dict[weakref.ref[ExchangeProgress], int] = {}
        # Of those that are gone
        self._steps_before = 0

    def of_exchange(self, parts: Sequence[str], counted: bool = True) -> ExchangeProgress:
        """Return the counters of an exchange; see ExchangeProgress."""
        if not self.watched:
            return UnwatchedExchange()
        self._saw_fit = self._saw_fit or _in_fit(_frames(sys._getframe()))
        made = ExchangeProgress(parts, counted, self.ends_when_queued)
        self._waits[weakref.ref(made)] = 0
        return made

    def watch(self, send: Callable[[bytes], object], period: float) -> None:
        """Tell the watcher from now on.

        Args:
            send: takes a line for the watcher.
            period: seconds between two looks, > 0.
        """
        self.watched, stop = True, threading.Event()

        def look() -> None:
            said = None
            while not stop.wait(period):
                found = self.look()
                if found != said:
                    said = found
                    with contextlib.suppress(OSError):
                        send(b"at " + json.dumps(found).encode() + b"\n")

        thread = threading.Thread(target=look, name="tfcommx-progress", daemon=True)
        thread.start()

        def end() -> None:
            # TensorFlow must not be taken down under it
            stop.set()
            thread.join(END_SECONDS)

        atexit.register(end)

    def look(self) -> tuple[int, str, str]:
        """Return the number of steps begun, what the rank does, and in what or where."""
        there = self._still_there()
        step = self._steps_before + sum(self._waits.values())
        before, self._step = self._step, step
        if step != before:
            return step, COMPUTES, ""
        frames = _frames(sys._current_frames().get(threading.main_thread().ident or 0))
        doing, what = self._doing(frames, there)
        return step, doing, what[:LONGEST]

    def _still_there(self) -> list[ExchangeProgress]:
        """Return the exchanges that somebody still has, and count their steps."""
        there = []
        for found in list(self._waits):
            one = found()
            if one is None:
                self._steps_before += self._waits.pop(found)
                continue
            there.append(one)
            self._waits[found] = one.begun() if one.counted else 0
        return there

    def _doing(self, frames: list[FrameType], there: list[ExchangeProgress]) -> tuple[str, str]:
        in_fit = _in_fit(frames)
        self._saw_fit = self._saw_fit or in_fit
        in_library = bool(frames) and _is_in(frames[0], "tensorflow", "horovod")
        if in_library and (parts := [part for one in there if (part := one.waiting())]):
            return WAITS, parts[0]
        if calls := [frame for frame in frames if _is_collective(frame)]:
            return WAITS, _caller(frames[frames.index(calls[-1]) + 1 :])
        if self._saw_fit and not in_fit:
            return LEFT, _where(frames)
        return (COMPUTES, "") if in_library else (PYTHON, _where(frames))


def _frames(frame: FrameType | None) -> list[FrameType]:
    """Return the frames of a thread, the innermost first."""
    found = []
    while frame is not None:
        found.append(frame)
        frame = frame.f_back
    return found


def _is_in(frame: FrameType, *packages: str) -> bool:
    """Tell whether a frame's code is of one of these packages, by the folder of the package."""
    places = [getattr(sys.modules.get(name), "__file__", None) for name in packages]
    folders = tuple(os.path.join(os.path.dirname(place), "") for place in places if place)
    return frame.f_code.co_filename.startswith(folders)


def _name(frame: FrameType) -> str:
    code = frame.f_code
    return getattr(code, "co_qualname", code.co_name)  # From Python 3.11 on


def _in_fit(frames: list[FrameType]) -> bool:
    return any(frame.f_code.co_name == "fit" and _is_in(frame, "keras") for frame in frames)


def _is_collective(frame: FrameType) -> bool:
    """Tell whether it is one of Horovod's functions that wait, or one of Comm's."""
    own = frame.f_code.co_filename == os.path.join(COLLECTIVES, "horovod.py")
    return own or _is_in(frame, "horovod")


def _caller(frames: list[FrameType]) -> str:
    """Return who has called a collective: the first function outside of `collectives`."""
    for frame in frames:
        name = frame.f_code.co_filename
        if os.path.dirname(name) != COLLECTIVES and not _is_in(frame, "tensorflow"):
            return f"a collective of {_name(frame)}"
    return "a collective"


def _where(frames: list[FrameType]) -> str:
    """Return the line of the user's that a thread is at, and the function that it has called."""
    for frame in frames:
        code = frame.f_code
        if not any(part in code.co_filename for part in LIBRARIES):
            line = f"{os.path.basename(code.co_filename)}:{frame.f_lineno} in {code.co_name}"
            inner = _name(frames[0])
            return line if frame is frames[0] else f"{line} ({inner})"
    return _name(frames[0]) if frames else ""

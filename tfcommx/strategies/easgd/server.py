"""The centre of elastic averaging: its arithmetic, and the server that holds it or a range of it.

    rank 0   alpha, weights --START--> server                  server   centre = weights
             <--STARTED---
    worker   weights x --SNAPSHOT--> server                    server   force = alpha (x - centre)
             x -= force <---FORCE---                                    centre += force
    worker   READ --> server
             <--VALUES--- the current centre
    worker   has ended its training: DONE, with its statistics --> server waits until all are done
             <-- CENTRE, STATISTICS (the average over the workers that have sent DONE)

Each kind of message has a separate tag, because a rank may be both worker and server, and must not
mistake its own message for an answer. Needs no TensorFlow.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Collection, Sequence
from typing import NamedTuple

import numpy as np

from tfcommx.collectives.point_to_point import PointToPoint, Request
from tfcommx.watch.membership import Membership

START, STARTED, SNAPSHOT, FORCE, READ, VALUES, DONE, CENTRE, STATISTICS = range(1, 10)
# Between two polls for messages: a poll takes 1 microsecond, and a core may be shared
LOOK_SECONDS = 0.0005
# Bytes of START before the weights: alpha and the bytes of an entry, as float64
HEADER = 16


class CentreRange(NamedTuple):
    """The range of the flat centre that one server holds."""

    # The server's rank
    server: int
    # Entries [start, stop); may be empty if there are more servers than entries
    start: int
    stop: int


def cut(entries: int, servers: Sequence[int]) -> list[CentreRange]:
    """Cut the centre into ranges, one for each server, whose lengths differ by at most 1.

    >>> [tuple(part) for part in cut(8, [0, 1, 2])]
    [(0, 0, 2), (1, 2, 5), (2, 5, 8)]
    """
    # Products are rounded and not lengths, so that the ranges meet and the last one ends at the
    # last entry
    ends = [entries * number // len(servers) for number in range(len(servers) + 1)]
    return [CentreRange(*row) for row in zip(servers, ends, ends[1:], strict=False)]


def start_message(alpha: float, values: np.ndarray) -> np.ndarray:
    """Return the bytes of START: the moving rate, and float32 or float64 [entries] to begin with.

    >>> centre = read_start(start_message(0.25, np.ones(3, "float32")))
    >>> centre.meet(np.full(3, 2, "float32"))
    array([0.25, 0.25, 0.25], dtype=float32)
    """
    header = np.array([alpha, values.itemsize], np.float64)
    return np.concatenate([header.view(np.uint8), np.ascontiguousarray(values).view(np.uint8)])


def read_start(message: np.ndarray) -> Centre:
    alpha, itemsize = message[:HEADER].view(np.float64)
    return Centre(message[HEADER:].view(f"float{8 * int(itemsize)}"), alpha)


def _average(statistics: Sequence[np.ndarray]) -> np.ndarray:
    """Average the finite statistics, or all if none is finite; empty if lengths differ.

    >>> _average([np.array([1.0, 2.0]), np.array([np.nan, 2.0]), np.array([3.0, 2.0])])
    array([2., 2.])
    """
    if len({len(values) for values in statistics}) > 1:
        return np.zeros(0)
    # Those of a rank that has diverged would spoil the average
    finite = [values for values in statistics if np.isfinite(values).all()]
    average: np.ndarray = np.mean(finite or statistics, axis=0)
    return average


class Centre:
    """The centre and the arithmetic of an exchange, in the centre's dtype.

    >>> centre = Centre(np.zeros(2), alpha=0.25)
    >>> centre.meet(np.array([4.0, 8.0]))
    array([1., 2.])
    >>> centre.values
    array([1., 2.])

    Args:
        start: float32 or float64 [entries]; is copied.
        alpha: > 0, the moving rate.

    **Source:** Zhang, Choromanska, LeCun, "Deep learning with Elastic Averaging SGD" (2015),
    Algorithm 1, steps a and b: the worker subtracts the force, and the centre adds it.
    """

    def __init__(self, start: np.ndarray, alpha: float) -> None:
        self.values = np.array(start)
        # In the centre's dtype, because the float64 of a START message would widen the force
        self._alpha = self.values.dtype.type(alpha)

    def meet(self, weights: np.ndarray) -> np.ndarray:
        """Move the centre towards a worker's weights; return the force, which the worker subtracts.

        **Cost:** three passes over the entries, one more to look for NaN and Inf.
        """
        force: np.ndarray = self._alpha * (weights - self.values)
        # It has overflowed, because workers send finite weights only, and would spoil the centre
        if not np.isfinite(force).all():
            return np.zeros_like(force)
        self.values += force
        return force


class CentreServer:
    """Answers the workers' messages, one after the other."""

    def __init__(
        self, messages: PointToPoint, workers: Collection[int], membership: Membership
    ) -> None:
        self._messages, self._workers, self._membership = messages, set(workers), membership
        # Set by the first START
        self.centre: Centre | None = None
        # True while a training is under way
        self.trains = False
        # Statistics of the workers that have ended their training
        self._done: dict[int, np.ndarray] = {}
        # Answers in transit, kept because an array must live until it has been sent
        self._answers: dict[int, list[tuple[Request, np.ndarray]]] = {}

    def answer_next(self) -> bool:
        """Handle one message, or answer all workers once all are done; return True if any work."""
        for tag, answer in (
            (START, self._start),
            (SNAPSHOT, self._meet),
            (READ, self._read),
            (DONE, self._note),
        ):
            message = self._messages.take(tag)
            if message is not None:
                answer(*message)
                return True
        return self._end_if_all_are_done()

    def _start(self, source: int, message: np.ndarray) -> None:
        self.centre, self.trains = read_start(message), True
        self._done = {}  # An error may have ended the previous training before all were done
        self._answer(source, (np.zeros(0), STARTED))

    def _meet(self, source: int, message: np.ndarray) -> None:
        # Not by START alone, because training may continue from the last centre without one
        self.trains = True
        centre = self._begun()
        force = centre.meet(message.view(centre.values.dtype))
        self._answer(source, (force, FORCE))

    def _read(self, source: int, message: np.ndarray) -> None:
        # A copy, because a snapshot may move the centre while the answer is in transit
        self._answer(source, (self._begun().values.copy(), VALUES))

    def _begun(self) -> Centre:
        assert self.centre is not None, "a START comes first"
        return self.centre

    def _note(self, source: int, message: np.ndarray) -> None:
        self._done[source] = message.view(np.float64)

    def _end_if_all_are_done(self) -> bool:
        if not self._done:
            return False
        if self._workers - self._done.keys() - self._membership.gone():
            self._membership.find_dead()
            return False
        done, self._done, self.trains = self._done, {}, False
        statistics = _average(list(done.values()))
        # A copy, because another training may move the centre while answers are in transit
        values = self._begun().values.copy()
        for worker in done:
            self._answer(worker, (values, CENTRE), (statistics, STATISTICS))
        return True

    def _answer(self, worker: int, *parts: tuple[np.ndarray, int]) -> None:
        """Send to a worker without waiting: it may die before it receives."""
        under_way = self._answers.get(worker, [])
        # Those that have arrived are dropped, so that their arrays are freed
        self._answers[worker] = [
            answer for answer in under_way if not self._messages.done(answer[0])
        ] + [(self._messages.send(array, worker, tag), array) for array, tag in parts]

    def finish(self) -> None:
        """Wait until all answers have been sent, because this rank may end its process next."""
        while self._answers:
            for worker, answers in list(self._answers.items()):
                answers[:] = [answer for answer in answers if not self._messages.done(answer[0])]
                # A worker that is gone, or ends meanwhile, receives nothing
                if not answers or worker in self._membership.gone():
                    del self._answers[worker]
            self._membership.find_dead()
            time.sleep(LOOK_SECONDS if self._answers else 0)

    def run(self, stopped: threading.Event) -> None:
        """Answer until `stopped` is set; an exception ends the rank."""
        try:
            while not stopped.is_set():
                if not self.answer_next():
                    time.sleep(LOOK_SECONDS)
        except Exception:
            # By the hook of the rank, which tells the other ranks: they would wait for answers
            # forever, because an exception that ends a thread is only printed
            sys.excepthook(*sys.exc_info())

"""The centre of elastic averaging: its arithmetic, the server that holds it, a worker's side of it.

    worker   weights x --SNAPSHOT--> server                    server   force = alpha (x - centre)
             x -= force <---FORCE---                                    centre += force

    worker   has ended its training: DONE, with its statistics --> server waits until all are done
             <-- CENTRE, STATISTICS (the average over the workers that are there)

Messages of the four kinds have tags of their own: rank 0 is worker and server, and a message to
itself must not be taken for its own answer.
"""

from __future__ import annotations

import logging
import math
import sys
import threading
import time
from collections.abc import Callable, Collection
from typing import Any, NamedTuple

import numpy as np

from tfcommx.comm.point_to_point import PointToPoint

log = logging.getLogger("tfcommx")

SNAPSHOT, FORCE, DONE, CENTRE, STATISTICS = 1, 2, 3, 4, 5
# Between two looks for messages: a look takes 1 microsecond, and a core may be shared
LOOK_SECONDS = 0.0005
# A worker that waits longer for the others to end says so, and again after twice as long
PATIENT_SECONDS = 60.0
# For a thread to end at the end of the process
END_SECONDS = 2.0
# After the server has ended, for what it has sent before
GRACE_SECONDS = 10.0


class Centre:
    """The centre and what an exchange does to it: pure arithmetic, in the centre's dtype.

    >>> centre = Centre(np.zeros(2), alpha=0.25)
    >>> centre.meet(np.array([4.0, 8.0]))
    array([1., 2.])
    >>> centre.values
    array([1., 2.])

    Args:
        start: float32 or float64 [entries]; is copied.
        alpha: > 0, the moving rate.

    **Source:** Zhang, Choromanska, LeCun, "Deep learning with Elastic Averaging SGD" (2015),
    Algorithm 1, steps a and b: what the worker loses, the centre gains.
    """

    def __init__(self, start: np.ndarray, alpha: float) -> None:
        self.values = np.array(start)
        self._alpha = self.values.dtype.type(alpha)

    def meet(self, weights: np.ndarray) -> np.ndarray:
        """Move the centre towards a worker's weights; return what the worker subtracts from them.

        Weights that are not finite would spoil the centre for all: it stays, and the force is 0.

        **Cost:** three passes over the entries, one more to look for NaN and Inf.
        """
        force = self._alpha * (weights - self.values)
        if not np.isfinite(force).all():
            return np.zeros_like(force)
        self.values += force
        return force


class Final(NamedTuple):
    """What all workers have at the end of a training."""

    # float32 or float64 [entries]
    centre: np.ndarray
    # float64, the average over the workers
    statistics: np.ndarray


class CentreServer:
    """Answers the workers' messages, one after the other.

    Args:
        centre: what it holds.
        messages: of the server's rank.
        workers: ranks that take part.
        gone: returns the ranks that have ended or died: nobody waits for them.
    """

    def __init__(
        self,
        centre: Centre,
        messages: PointToPoint,
        workers: Collection[int],
        gone: Callable[[], Collection[int]],
    ) -> None:
        self.centre, self._messages = centre, messages
        self._workers, self._gone = set(workers), gone
        # Statistics of the workers that have ended their training
        self._done: dict[int, np.ndarray] = {}
        # Answers on their way: an array must live until it has been sent
        self._answers: dict[int, list[tuple[Any, np.ndarray]]] = {}
        # Between two exchanges whoever reads or sets the centre holds it
        self.lock = threading.Lock()
        # Whose weights were not finite
        self._spoilt: set[int] = set()

    def turn(self) -> bool:
        """Answer what has arrived; tell whether there was anything."""
        found = self._messages.take(SNAPSHOT)
        if found is not None:
            source, snapshot = found[0], found[1].view(self.centre.values.dtype)
            with self.lock:
                force = self.centre.meet(snapshot)
            self._warn_of(source, snapshot, force)
            self._answer(source, [(force, FORCE)])
            return True
        found = self._messages.take(DONE)
        if found is not None:
            self._done[found[0]] = found[1].view(np.float64)
        return self._end_if_all_are_done() or found is not None

    def _end_if_all_are_done(self) -> bool:
        if not self._done or self._workers - self._done.keys() - set(self._gone()):
            return False
        done, self._done = self._done, {}
        lengths = {len(one) for one in done.values()}
        statistics = np.mean(list(done.values()), axis=0) if len(lengths) == 1 else np.zeros(0)
        with self.lock:
            values = self.centre.values.copy()
        for worker in done:
            self._answer(worker, [(values, CENTRE), (statistics, STATISTICS)])
        return True

    def _answer(self, worker: int, parts: list[tuple[np.ndarray, int]]) -> None:
        """Send to a worker, which has received what was sent to it before."""
        for request, _ in self._answers.pop(worker, []):
            self._messages.wait_any([request])
        self._answers[worker] = [
            (self._messages.send(array, worker, tag), array) for array, tag in parts
        ]

    def finish(self) -> None:
        """Wait until all answers have been sent: this rank may end its process next.

        Nobody waits for a worker that is gone, or goes meanwhile.
        """
        while self._answers:
            for worker, answers in list(self._answers.items()):
                answers[:] = [one for one in answers if not self._messages.done(one[0])]
                if not answers or worker in self._gone():
                    del self._answers[worker]
            time.sleep(LOOK_SECONDS if self._answers else 0)

    def _warn_of(self, source: int, snapshot: np.ndarray, force: np.ndarray) -> None:
        if source not in self._spoilt and not force.any() and not np.isfinite(snapshot).all():
            self._spoilt.add(source)
            log.warning(
                "The weights of rank %d are not finite: the centre leaves them out, and the other "
                "ranks train on. Lower the learning rate or alpha, or clip the gradients.",
                source,
            )

    def run(self, stopped: threading.Event) -> None:
        """Answer until `stopped`; a failure is a failure of the rank."""
        try:
            while not stopped.is_set():
                if not self.turn():
                    time.sleep(LOOK_SECONDS)
        except Exception:
            sys.excepthook(*sys.exc_info())


class Worker:
    """A worker's side of the exchange.

    Args:
        messages: of the worker's rank.
        server: the rank that holds the centre.
        dtype: of the centre.
        gone: returns the ranks that have ended or died.
    """

    def __init__(
        self,
        messages: PointToPoint,
        server: int,
        dtype: np.dtype,
        gone: Callable[[], Collection[int]],
    ) -> None:
        self._messages, self._server, self._dtype, self._gone = messages, server, dtype, gone
        self._stopped = threading.Event()
        self._under_way: _UnderWay | None = None

    @property
    def waits(self) -> bool:
        """Whether a snapshot was sent whose force nobody has taken yet."""
        return self._under_way is not None

    def arrived(self) -> bool:
        """Tell whether the force of the last snapshot is there."""
        return self._under_way is not None and self._under_way.done.is_set()

    def begin(self, snapshot: np.ndarray) -> None:
        """Send a snapshot and go on: a thread awaits the force.

        Messages get on only while a thread of the process looks for them.

        **Raises:** RuntimeError if nobody has taken the force of the snapshot before: the answers
        could be mistaken for each other.
        """
        if self.waits:
            raise RuntimeError("A force must be taken before the next snapshot is sent.")
        kept = np.array(snapshot, self._dtype)  # The caller's memory is its own again
        self._under_way = _UnderWay(lambda: self.exchange(kept))

    def take(self) -> np.ndarray:
        """Return the force of the last snapshot; wait for it, if need be."""
        under_way, self._under_way = self._under_way, None
        if under_way is None:
            raise RuntimeError("A snapshot must be sent before its force is taken.")
        return under_way.result()

    def exchange(self, snapshot: np.ndarray) -> np.ndarray:
        """Send a snapshot and wait for its force.

        **Raises:** RuntimeError if the server's rank has ended.
        """
        snapshot = np.ascontiguousarray(snapshot, self._dtype)
        request = self._messages.send(snapshot, self._server, SNAPSHOT)
        force = self._await(FORCE).view(self._dtype)
        self._messages.wait_any([request])
        return force

    def end(self, statistics: np.ndarray) -> Final:
        """Wait until all workers have ended their training; return the centre.

        Args:
            statistics: float64, equally many on all workers.

        **Raises:** RuntimeError if the server's rank has ended.
        """
        if self.waits:
            self.take()  # The centre takes the place of these weights
        statistics = np.ascontiguousarray(statistics, np.float64)
        request = self._messages.send(statistics, self._server, DONE)
        centre = self._await(CENTRE).view(self._dtype)
        average = self._await(STATISTICS).view(np.float64)
        self._messages.wait_any([request])
        return Final(centre, average)

    def stop(self) -> None:
        """End the waits of this process's threads: MPI is about to end."""
        self._stopped.set()
        if self._under_way is not None:
            self._under_way.done.wait(END_SECONDS)

    def _await(self, tag: int) -> np.ndarray:
        start, late, gone_at = time.monotonic(), PATIENT_SECONDS, math.inf
        while (found := self._messages.take(tag)) is None:
            if self._stopped.is_set():
                raise RuntimeError("The process ends while it waits for the centre.")
            if self._server in self._gone():
                gone_at = min(gone_at, time.monotonic())
            # What it sent last may still be on its way
            if time.monotonic() - gone_at > GRACE_SECONDS:
                raise RuntimeError(
                    f"Rank {self._server}, which held the centre, has ended: nothing can be "
                    "averaged any more. Let it train, and end, as long as the others, or start "
                    "again from the last checkpoint."
                )
            if time.monotonic() - start > late:
                late *= 2
                log.warning(
                    "%.0f s of waiting for %s, which rank %d sends.",
                    time.monotonic() - start,
                    "the force" if tag == FORCE else "the other ranks to end their training",
                    self._server,
                )
            time.sleep(LOOK_SECONDS)
        return found[1]


class _UnderWay:
    """A call in a thread of its own, and what it returns or raises."""

    def __init__(self, call: Callable[[], np.ndarray]) -> None:
        self.done = threading.Event()
        self._result: np.ndarray | None = None
        self._error: Exception | None = None
        self._call = call
        threading.Thread(target=self._run, name="tfcommx-elastic", daemon=True).start()

    def _run(self) -> None:
        try:
            self._result = self._call()
        except Exception as error:
            self._error = error
        self.done.set()

    def result(self) -> np.ndarray:
        """Wait for the result. **Raises:** what the call has raised."""
        self.done.wait()
        if self._error is not None:
            raise self._error
        assert self._result is not None
        return self._result

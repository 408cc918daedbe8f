"""A worker's messages to the servers that hold the centre of elastic averaging.

    one server      x = [ 0 ................... n )  --SNAPSHOT--> server       <--FORCE--
    several         x = [ 0 ... a ) [ a ... b ) [ b ... n )  a part to each, and one from each

strategies/easgd/server.py defines the messages, and answers them.
"""

import math
import threading
import time
from collections.abc import Sequence
from concurrent import futures
from concurrent.futures import Future

import numpy as np

from tfcommx.collectives.point_to_point import PointToPoint
from tfcommx.core import ConfigurationError, RankLostError, log
from tfcommx.strategies.background import END_SECONDS, in_thread
from tfcommx.strategies.easgd.server import (
    CENTRE,
    DONE,
    FORCE,
    LOOK_SECONDS,
    READ,
    SNAPSHOT,
    START,
    STARTED,
    STATISTICS,
    VALUES,
    CentreRange,
    start_message,
)
from tfcommx.watch.membership import Membership

# A worker that waits longer than this for the others to end logs it, and again after twice as long
PATIENT_SECONDS = 60.0
# Time after a server's end in which its last messages may still arrive
GRACE_SECONDS = 10.0
AWAITED = {FORCE: "the force", CENTRE: "the other ranks to end their training"}
EMPTY = np.zeros(0)


class EasgdWorker:
    """A worker's side of the exchange; `parts` are the ranges of the centre, in order."""

    def __init__(
        self,
        messages: PointToPoint,
        rank: int,
        parts: Sequence[CentreRange],
        dtype: np.dtype,
        membership: Membership,
    ) -> None:
        self._messages, self._rank, self._parts = messages, rank, parts
        self._dtype, self._membership = dtype, membership
        self._stopped = threading.Event()
        self._under_way: Future[np.ndarray] | None = None
        # True after the warning about weights that are not finite
        self._spoilt = False

    @property
    def waits(self) -> bool:
        """True if a snapshot was sent whose force has not been taken yet."""
        return self._under_way is not None

    def start(self, alpha: float, values: np.ndarray) -> None:
        """Initialize the centre with values of its dtype [entries], and wait until it has them."""
        parts = [start_message(alpha, part) for part in self._cut(values)]
        self._ask(START, parts, STARTED)

    def read(self) -> np.ndarray:
        """Return the current centre; parts of several servers may differ by an exchange."""
        (values,) = self._ask(READ, [EMPTY] * len(self._parts), VALUES)
        return self._joined(values)

    def arrived(self) -> bool:
        """Return True if the force of the last snapshot has arrived."""
        return self._under_way is not None and self._under_way.done()

    def begin(self, snapshot: np.ndarray) -> None:
        """Send a snapshot and continue; a thread awaits the force."""
        assert not self.waits, "the answers could be mistaken for each other"
        own_copy = np.array(snapshot, self._dtype)  # The caller may reuse its memory
        # Messages progress only while a thread of the process polls
        self._under_way = in_thread(lambda: self.exchange(own_copy), "tfcommx-elastic")

    def take(self) -> np.ndarray:
        """Return the force of the last snapshot; wait for it if necessary."""
        under_way, self._under_way = self._under_way, None
        assert under_way is not None, "a snapshot was sent"
        return under_way.result()

    def exchange(self, snapshot: np.ndarray) -> np.ndarray:
        """Send a snapshot and wait for its force; 0 if the weights are not finite.

        **Cost:** one pass over the entries to look for NaN and Inf.
        **Raises:** RankLostError if a server's rank has ended.
        """
        snapshot = np.ascontiguousarray(snapshot, self._dtype)
        # They would spoil the centre for all. The worker decides, because it alone sees all parts
        if not np.isfinite(snapshot).all():
            if not self._spoilt:
                self._spoilt = True
                log.warning(
                    "The weights of rank %d are not finite: the centre leaves them out, and the "
                    "other ranks train on. Lower the learning rate or alpha, or clip the "
                    "gradients.",
                    self._rank,
                )
            return np.zeros_like(snapshot)
        (force,) = self._ask(SNAPSHOT, self._cut(snapshot), FORCE)
        return self._joined(force)

    def end(self, statistics: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Wait until all workers have ended; return the centre and the average statistics.

        **Raises:** RankLostError if a server's rank has ended; ConfigurationError if the ranks have
        unequal lengths.
        """
        if self.waits:
            self.take()  # Dropped: the centre replaces these weights
        statistics = np.ascontiguousarray(statistics, np.float64)
        # The first server alone averages them
        none = [EMPTY] * (len(self._parts) - 1)
        centre, averages = self._ask(DONE, [statistics, *none], CENTRE, STATISTICS)
        average = averages[0].view(np.float64)
        if average.size != statistics.size:
            raise ConfigurationError(
                "All ranks need equally many statistics beside the trained weights, such as batch "
                f"norm's means. Rank {self._rank} has {statistics.size}, others have more or less. "
                "Build the same model on all ranks."
            )
        return self._joined(centre), average

    def stop(self) -> None:
        """End the waits of this process's threads before MPI ends."""
        self._stopped.set()
        if self._under_way is not None:
            futures.wait([self._under_way], END_SECONDS)

    def _cut(self, flat: np.ndarray) -> list[np.ndarray]:
        return [flat[part.start : part.stop] for part in self._parts]

    def _joined(self, parts: list[np.ndarray]) -> np.ndarray:
        # With one server no copy is needed
        flat = parts[0] if len(parts) == 1 else np.concatenate(parts)
        return flat.view(self._dtype)

    def _ask(self, tag: int, arrays: Sequence[np.ndarray], *answers: int) -> list[list[np.ndarray]]:
        """Send an array to each server; return, for each kind of answer, one from each server."""
        requests = [
            self._messages.send(array, part.server, tag)
            for array, part in zip(arrays, self._parts, strict=True)
        ]
        received = [self._await(answer) for answer in answers]
        # The answers show that all have been received, but MPI keeps a request until it is waited
        # for
        for request in requests:
            self._messages.wait_any([request])
        return received

    def _await(self, tag: int) -> list[np.ndarray]:
        start, late, gone_at = time.monotonic(), PATIENT_SECONDS, math.inf
        received: dict[int, np.ndarray] = {}
        servers = [part.server for part in self._parts]
        while missing := [server for server in servers if server not in received]:
            message = self._messages.take(tag)
            if message is not None:
                received[message[0]] = message[1]
                continue
            if self._stopped.is_set():
                raise RuntimeError("The process ends while it waits for the centre.")
            gone = sorted(set(missing) & self._membership.gone())
            gone_at = min(gone_at, time.monotonic()) if gone else math.inf
            # Its last messages may still be in transit
            if time.monotonic() - gone_at > GRACE_SECONDS:
                raise RankLostError(
                    f"Rank {gone[0]}, which held {'part of ' if servers[1:] else ''}the centre, "
                    "has ended: nothing can be averaged any more. Let it train, and end, as long "
                    "as the others, or start again from the last checkpoint."
                )
            if time.monotonic() - start > late:
                late *= 2
                log.warning(
                    "%.0f s of waiting for %s, which comes from ranks %s.",
                    time.monotonic() - start,
                    AWAITED.get(tag, "the centre"),
                    missing,
                )
            # The watch may miss the end of a server, if this rank's neighbours in it have died
            # before
            self._membership.find_dead()
            time.sleep(LOOK_SECONDS)
        return [received[server] for server in servers]

"""Point-to-point messages between ranks, over MPI. The only module that imports mpi4py."""

import atexit
import functools
import os
import sys
import threading
import time
from typing import Any, TypeVar

import numpy as np

from tfcommx.collectives.plain_data import decode, encode
from tfcommx.collectives.point_to_point import Request
from tfcommx.core import LaunchError, RankLostError, log
from tfcommx.launch.hosts import check_host_name
from tfcommx.launch.interpreter import ExitStatus, Hook, handle_uncaught
from tfcommx.launch.launcher import launcher, rendezvous_seconds, seconds_from
from tfcommx.launch.mpi_start import limited

T = TypeVar("T")

# Seconds without a message after which a rank warns, and without a watch gives up; more than Gloo's
# limit, 30. TFCOMMX_MESSAGE_TIMEOUT_SECONDS overrides the time until it gives up.
TIMEOUT_SECONDS = 50.0
# The same with a watch, which reports missing ranks; a late rank is then only busy
WATCHED_SECONDS = 6 * 3600.0
# Seconds until all ranks have started MPI; TFCOMMX_RENDEZVOUS_SECONDS overrides it
START_SECONDS = 600.0


@functools.cache
def _communicators() -> tuple[Any, Any]:
    """Return the communicators of the training ranks, without and with the process of centres.

    **Ranks:** all processes of the launch, once. If one is missing for longer than START_SECONDS,
    the others name it and end.
    """
    launch = launcher()
    with limited(launch.rank, launch.local_rank, launch.size, rendezvous_seconds(START_SECONDS)):
        from mpi4py import MPI

    # An MPI that does not know its launcher starts each process as the only one, which would train
    # alone
    if MPI.COMM_WORLD.size != launch.size + launch.centre:
        library = MPI.Get_library_version().partition(",")[0].strip()
        raise LaunchError(
            "MPI must count the processes that mpirun has started. Received "
            f"OMPI_COMM_WORLD_SIZE={launch.size + launch.centre} in the environment of rank "
            f"{launch.rank}, and {MPI.COMM_WORLD.size} from {library}. Either another mpirun was "
            "called than that of this library (`tfcommx run --mpi` finds the right one), or the "
            "variables are left from another launch: unset OMPI_COMM_WORLD_RANK to train in one "
            "process."
        )
    if not launch.centre:
        return MPI.COMM_WORLD, None
    # Both calls are collective, so the process of the centres makes them, too
    return MPI.COMM_WORLD.Split(launch.rank == launch.size), MPI.COMM_WORLD.Dup()


def start() -> None:
    """Start MPI with full thread support, which Horovod then shares and leaves running.

    **Ranks:** all processes of an MPI launch, before Horovod starts.
    """
    _communicators()


def mpi_hosts() -> list[str]:
    """Return every rank's host name, in rank order.

    **Ranks:** all ranks of an MPI launch, after `start`.
    """
    from mpi4py import MPI

    hosts = _gather(_communicators()[0], MPI.Get_processor_name())
    return [check_host_name(host, f"rank {rank} (MPI)") for rank, host in enumerate(hosts)]


def gather_with_centre(item: T) -> list[T]:
    """Return the plain data of all ranks, followed by that of the process that holds a centre.

    **Ranks:** all, and that process.
    """
    return _gather(_communicators()[1], item)


def _gather(communicator: Any, item: T) -> list[T]:
    """Return plain data of all processes of a communicator, in their order."""
    # mpi4py's own allgather would unpickle the data (plain_data.py)
    data = np.frombuffer(encode(item), np.uint8)
    sizes = np.empty(communicator.size, np.int64)
    communicator.Allgather(np.array([data.size], np.int64), sizes)
    parts = np.empty(sizes.sum(), np.uint8)
    communicator.Allgatherv(data, [parts, sizes])
    return [decode(part.tobytes()) for part in np.split(parts, np.cumsum(sizes)[:-1])]


class MpiPointToPoint:
    """Non-blocking messages on a separate communicator, which keeps them apart from Horovod's.

    Args:
        lasting: True if all ranks take part until the end; an uncaught exception then ends the
            launch. False: the others continue without one that fails or dies.
        with_centre: True if they reach the process that holds a centre; all such messages share a
            communicator.

    **Ranks:** all, together and in the same order.
    **Raises:** LaunchError if MPI supports only a lower level of threads.
    """

    def __init__(self, watched: bool, lasting: bool = True, with_centre: bool = False) -> None:
        from mpi4py import MPI

        # Because Horovod's background thread may use MPI at the same time
        if MPI.Query_thread() < MPI.THREAD_MULTIPLE:
            raise LaunchError(
                "Messages beside Horovod need MPI with MPI_THREAD_MULTIPLE. Received less. "
                "Call tfcommx.init() before anything that starts MPI."
            )
        self._mpi = MPI
        ranks, all_processes = _communicators()
        self._world = all_processes if with_centre else ranks.Dup()
        # The centres share it, and no object may free it
        self._shared = with_centre
        self.sent: dict[int, int] = {}
        self._counting = threading.Lock()  # A rank may be worker and server, in two threads
        # Tag -> messages that have begun to arrive: source, array and request of each
        self._arriving: dict[int, list[tuple[int, np.ndarray, Any]]] = {}
        seconds = WATCHED_SECONDS if watched else TIMEOUT_SECONDS
        self._timeout = seconds_from("TFCOMMX_MESSAGE_TIMEOUT_SECONDS", seconds)

        def report_and_end(report: Hook, *failure: Any) -> None:
            report(*failure)
            sys.stderr.write(f"tfcommx: rank {self._world.rank} gives up and ends the launch.\n")
            sys.stderr.flush()
            self._world.Abort(1)

        # The other ranks may be waiting for this one's messages, and Horovod's orderly shutdown
        # would wait for them
        if lasting:
            handle_uncaught(report_and_end)

    def send(self, array: np.ndarray, target: int, tag: int) -> Request:
        with self._counting:
            self.sent[target] = self.sent.get(target, 0) + array.nbytes
        return self._world.Isend([array.view(np.uint8), self._mpi.BYTE], target, tag), target

    def receive(self, array: np.ndarray, source: int, tag: int) -> Request:
        return self._world.Irecv([array.view(np.uint8), self._mpi.BYTE], source, tag), source

    def wait_any(self, requests: list[Request]) -> int:
        """Wait as PointToPoint defines it, without blocking other threads of this process."""
        pending = [request for request, _ in requests]
        start, turns, late = time.monotonic(), 0, TIMEOUT_SECONDS
        while True:
            # Polled, because MPI's own wait has no time limit, and occupies a core
            position, done = self._mpi.Request.Testany(pending)
            if done:
                return position
            turns += 1
            # Polls often at first; messages arrive in bursts
            time.sleep(0 if turns < 100 else 5e-5)
            waited = time.monotonic() - start if turns % 1000 == 0 else 0.0
            awaited = sorted({rank for _, rank in requests}) if waited else []
            if waited > late:
                late *= 2
                log.warning(
                    "Rank %d has waited %.0f s for messages of ranks %s. Are they busy, or do "
                    "ranks take unequal steps?",
                    self._world.rank,
                    waited,
                    awaited,
                )
            if waited > self._timeout:
                raise RankLostError(
                    f"A message must come within {self._timeout:.0f} s. Rank {self._world.rank} "
                    f"has waited longer for ranks {awaited}. Are they alive, and does the network "
                    "work? If they are only slow, raise TFCOMMX_MESSAGE_TIMEOUT_SECONDS."
                )

    def done(self, request: Request) -> bool:
        return bool(request[0].Test())

    def take(self, tag: int) -> tuple[int, np.ndarray] | None:
        """Receive a message that has arrived from any rank; None if there is none."""
        status, arriving = self._mpi.Status(), self._arriving.setdefault(tag, [])
        # A matched probe, because after a plain one another thread could receive the message
        message = self._world.Improbe(self._mpi.ANY_SOURCE, tag, status)
        if message is not None:
            array = np.empty(status.Get_count(self._mpi.BYTE), np.uint8)
            request = message.Irecv([array, self._mpi.BYTE])
            arriving.append((status.Get_source(), array, request))
        waits_for: set[int] = set()
        for position, (source, array, request) in enumerate(arriving):
            # Messages of a rank are received in their order. Tested and not awaited, because a rank
            # that dies while it sends leaves a message that never ends
            if source not in waits_for and request.Test():
                del arriving[position]
                return source, array
            waits_for.add(source)
        return None

    def close(self) -> None:
        """Free the communicator; MPI has a limited number of them."""
        if not self._shared:
            self._world.Free()


# Tag of a rank's last message to the process that holds the centres, on no centre's channel
END = 0
# Seconds to wait until the message is sent, and between two checks
END_SECONDS, POLL_SECONDS = 2.0, 0.0005


def tell_the_centre_at_exit() -> None:
    """Send this rank's exit status to the process that holds the centres. **Ranks:** each."""
    status = ExitStatus()
    status.watch()
    atexit.register(_say_end, os.getpid(), status)


def _say_end(pid: int, status: ExitStatus) -> None:
    if os.getpid() != pid:  # A forked child is not the rank
        return
    messages = MpiPointToPoint(watched=True, lasting=False, with_centre=True)
    request = messages.send(np.array([status.get()], np.int32), launcher().size, END)
    until = time.monotonic() + END_SECONDS
    while not messages.done(request) and time.monotonic() < until:
        time.sleep(POLL_SECONDS)

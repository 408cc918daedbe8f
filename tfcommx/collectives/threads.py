"""ThreadComm: p ranks as p threads of one process, for law tests and corner cases."""

import threading
from collections import deque
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
import tensorflow as tf

from tfcommx.collectives.comm import Comm
from tfcommx.collectives.messages import Messages
from tfcommx.collectives.plain_data import decode, encode
from tfcommx.collectives.point_to_point import Request
from tfcommx.core import Topology, Traffic

T = TypeVar("T")


class _Meeting:
    """Shared state by which the threads of ThreadComm exchange their tensors."""

    def __init__(self, topology: Topology) -> None:
        self.topology = topology
        self.lock = threading.Condition()
        # (ranks, their turn) -> rank -> (label of the collective, item of the rank)
        self.rooms: dict[tuple[tuple[int, ...], int], dict[int, tuple[str, Any]]] = {}
        # (source, target, tag) -> messages that were sent and not received, oldest first
        self.mailbox: dict[tuple[int, int, int], deque[np.ndarray]] = {}
        self.failure: BaseException | None = None

    def exchange(
        self, ranks: tuple[int, ...], turn: int, rank: int, label: str, item: T
    ) -> list[T]:
        """Wait until all of `ranks` have called for the same turn; return their items by rank."""
        with self.lock:
            room = self.rooms.setdefault((ranks, turn), {})
            room[rank] = (label, item)
            self.lock.notify_all()
            self.wait(
                rank,
                lambda: len(room) == len(ranks),
                lambda: f"ranks {sorted(set(ranks) - set(room))} in {label!r}",
            )
            # All ranks hold the room by now; kept here, it would keep the tensors of all turns
            self.rooms.pop((ranks, turn), None)
        labels = {text for text, _ in room.values()}
        if len(labels) > 1:
            raise RuntimeError(f"Ranks {ranks} met in different collectives: {sorted(labels)}.")
        return [room[member][1] for member in ranks]

    def wait(self, rank: int, ready: Callable[[], object], awaited: Callable[[], str]) -> None:
        """Wait, with the lock, until `ready` is true, a rank has failed, or the time is over."""
        # Limited, because ranks that wait for each other would hang a test
        if not self.lock.wait_for(lambda: self.failure is not None or ready(), timeout=60):
            self.failure = TimeoutError(f"Rank {rank} waited for {awaited()}.")
        if self.failure is not None:
            raise RuntimeError(
                f"Rank {rank} was left alone, waiting for {awaited()}: {self.failure}"
            ) from self.failure


class _ThreadPointToPoint:
    """Messages between threads.

    A send puts a copy into the mailbox and is done at once; its request is None. A request to
    receive is (array, source, messages of this pair and tag).
    """

    def __init__(self, rank: int, meeting: _Meeting) -> None:
        self.rank, self.meeting = rank, meeting
        self.sent: dict[int, int] = {}
        self._counting = threading.Lock()  # A rank may be worker and server, in two threads

    def send(self, array: np.ndarray, target: int, tag: int) -> None:
        with self._counting:
            self.sent[target] = self.sent.get(target, 0) + array.nbytes
        with self.meeting.lock:
            messages = self.meeting.mailbox.setdefault((self.rank, target, tag), deque())
            # A copy, because the sender may change its array from now on
            messages.append(array.copy())
            self.meeting.lock.notify_all()

    def receive(
        self, array: np.ndarray, source: int, tag: int
    ) -> tuple[np.ndarray, int, deque[np.ndarray]]:
        with self.meeting.lock:
            return array, source, self.meeting.mailbox.setdefault((source, self.rank, tag), deque())

    def wait_any(self, requests: list[Request]) -> int:
        def ready() -> list[int]:
            """Positions of the requests that are sends, or have a message."""
            return [i for i, request in enumerate(requests) if request is None or request[2]]

        with self.meeting.lock:
            ranks = sorted({request[1] for request in requests if request is not None})
            self.meeting.wait(self.rank, ready, lambda: f"messages of ranks {ranks}")
            position = ready()[0]
            if requests[position] is not None:
                array, source, messages = requests[position]
                message = messages.popleft()
                if message.shape != array.shape:
                    raise RuntimeError(
                        f"Rank {self.rank} expected {array.shape} from rank {source}. Received "
                        f"{message.shape}."
                    )
                array[...] = message
            return position

    def done(self, request: Request) -> bool:
        return request is None or bool(request[2])

    def take(self, tag: int) -> tuple[int, np.ndarray] | None:
        meeting = self.meeting
        with meeting.lock:
            if meeting.failure is not None:
                raise RuntimeError(f"Rank {self.rank} was left alone: {meeting.failure}")
            for (source, target, its_tag), messages in meeting.mailbox.items():
                if (target, its_tag) == (self.rank, tag) and messages:
                    # As bytes, because a message of MPI does not carry its dtype
                    return source, messages.popleft().reshape(-1).view(np.uint8)
        return None

    def close(self) -> None:
        pass


class ThreadComm(Comm):
    """p ranks as p threads of one process, in eager mode, for tests of laws and not for speed.

    Sums are computed in rank order, in the tensor's own dtype. It is an error if ranks meet in
    collectives of different names.
    """

    def __init__(self, rank: int, meeting: _Meeting) -> None:
        messages = Messages(
            rank, meeting.topology, lambda **options: _ThreadPointToPoint(rank, meeting)
        )
        super().__init__(rank, meeting.topology, messages)
        self._meeting = meeting
        self._turns: dict[tuple[int, ...], int] = {}
        self._sent = Traffic(0.0, 0.0)

    @staticmethod
    def run(topology: Topology, work: Callable[[Comm], T]) -> list[T]:
        """Call `work(comm)` as every rank of the topology; return the results in rank order.

        >>> from tfcommx.core import Topology
        >>> ThreadComm.run(Topology(2, 2), lambda comm: comm.members("peers"))
        [(0, 2), (1, 3), (0, 2), (1, 3)]

        **Raises:** the first failure of a rank.
        """
        meeting = _Meeting(topology)
        results: dict[int, T] = {}
        failures: list[tuple[int, BaseException]] = []

        def play(rank: int) -> None:
            try:
                results[rank] = work(ThreadComm(rank, meeting))
            # Any exception, because the other ranks would wait 60 s for this one
            except BaseException as error:
                with meeting.lock:
                    failures.append((rank, error))
                    # The first one, because the others fail only as they were left alone by it
                    meeting.failure = meeting.failure or error
                    meeting.lock.notify_all()

        threads = [threading.Thread(target=play, args=(rank,)) for rank in range(topology.size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if failures:
            raise failures[0][1]
        return [results[rank] for rank in range(topology.size)]

    def _gather_objects(self, item: T) -> list[T]:
        # As bytes, because items that other processes could not receive must fail here, too
        return [decode(data) for data in self._meet("world", "gather_objects", encode(item))]

    def _counted(self) -> Traffic:
        return self._sent

    def _meet(self, group: str, label: str, item: T) -> list[T]:
        ranks = self.members(group)
        # Each rank counts for itself, because all call the collectives of a group in one order
        self._turns[ranks] = turn = self._turns.get(ranks, 0) + 1
        return self._meeting.exchange(ranks, turn, self.rank, label, item)

    def _count(self, sent: Traffic) -> None:
        self._sent = Traffic(*(a + b for a, b in zip(self._sent, sent, strict=True)))

    def _sum(self, tensor: tf.Tensor, group: str, label: str) -> tf.Tensor:
        # In rank order on every rank, because the order of additions changes the last bits
        total, *summands = self._meet(group, label, tensor)
        for summand in summands:
            total = total + summand
        return total

    def _allreduce(self, tensor: tf.Tensor, group: str, name: str) -> tf.Tensor:
        return self._sum(tensor, group, f"allreduce {name}")

    def _allreduce_list(
        self, tensors: list[tf.Tensor], name: str, average: bool
    ) -> list[tf.Tensor]:
        sums = [self._allreduce(tensor, "world", f"{name}/{i}") for i, tensor in enumerate(tensors)]
        if not average:
            return sums
        return [total / tf.cast(self.topology.size, total.dtype) for total in sums]

    def _reduce_scatter(self, tensor: tf.Tensor, group: str, name: str) -> tf.Tensor:
        ranks = self.members(group)
        total = self._sum(tensor, group, f"reduce_scatter {name}")
        return tf.split(total, len(ranks))[ranks.index(self.rank)]

    def _all_gather(self, tensor: tf.Tensor, group: str, name: str) -> tf.Tensor:
        return tf.concat(self._meet(group, f"all_gather {name}", tensor), axis=0)

    def _alltoall(self, tensor: tf.Tensor, group: str, name: str) -> tf.Tensor:
        ranks = self.members(group)
        position = ranks.index(self.rank)
        everyone = self._meet(group, f"alltoall {name}", tensor)
        parts = [tf.split(received, len(ranks))[position] for received in everyone]
        return tf.concat(parts, axis=0)

    def _broadcast(self, tensor: tf.Tensor, root: int, name: str) -> tf.Tensor:
        return self._meet("world", f"broadcast {name}", tensor)[root]

"""The centre's messages at the ends: answers on their way, and ranks that are gone."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest

from tfcommx.strategies import centre as module
from tfcommx.strategies.centre import (
    CENTRE,
    DONE,
    FORCE,
    SNAPSHOT,
    STATISTICS,
    Centre,
    CentreServer,
    Worker,
)


class Messages:
    """What the other side sends lies in `inbox`; a request is done when it is in `arrived`."""

    def __init__(self, *inbox: tuple[int, int, np.ndarray]) -> None:
        self.inbox, self.arrived = list(inbox), set[tuple[int, int]]()
        self.sent: list[tuple[int, int, np.ndarray]] = []

    def send(self, array: np.ndarray, target: int, tag: int) -> tuple[int, int]:
        self.sent.append((target, tag, array.copy()))
        return target, tag

    def done(self, request: tuple[int, int]) -> bool:
        return request in self.arrived

    def wait_any(self, requests: list[tuple[int, int]]) -> int:
        return 0

    def take(self, tag: int) -> tuple[int, np.ndarray] | None:
        for place, (source, its, array) in enumerate(self.inbox):
            if its == tag:
                del self.inbox[place]
                return source, array.view(np.uint8)
        return None


def finishing(server: CentreServer) -> threading.Thread:
    thread = threading.Thread(target=server.finish, daemon=True)
    thread.start()
    return thread


def test_a_server_ends_when_its_answers_have_arrived_and_waits_for_nobody_who_is_gone() -> None:
    """Rank 0 may end its process next: an answer that it has not sent would be lost with it."""
    statistics = np.array([1.0])
    messages, gone = Messages(*((rank, DONE, statistics) for rank in range(3))), set[int]()
    server = CentreServer(Centre(np.ones(2), 0.5), messages, range(3), lambda: gone)
    while server.turn():
        pass
    assert sorted(one[:2] for one in messages.sent) == [
        (rank, tag) for rank in range(3) for tag in (CENTRE, STATISTICS)
    ]
    waits = finishing(server)
    messages.arrived |= {(0, CENTRE), (0, STATISTICS), (1, CENTRE), (2, CENTRE)}
    waits.join(0.05)
    assert waits.is_alive()  # Two statistics are on their way
    gone.add(2)  # It dies meanwhile
    waits.join(0.05)
    assert waits.is_alive()
    messages.arrived.add((1, STATISTICS))
    waits.join(10)
    assert not waits.is_alive()


def test_an_answer_that_was_sent_before_the_server_ended_counts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "GRACE_SECONDS", 0.3)
    messages = Messages()
    worker = Worker(messages, 0, np.dtype("float64"), lambda: {0})
    late = threading.Timer(0.1, lambda: messages.inbox.append((0, FORCE, np.array([2.0]))))
    late.start()
    assert worker.exchange(np.array([7.0])).tolist() == [2]
    assert [one[:2] for one in messages.sent] == [(0, SNAPSHOT)]
    start = time.monotonic()
    with pytest.raises(RuntimeError, match="Rank 0, which held the centre, has ended"):
        worker.exchange(np.array([7.0]))
    assert time.monotonic() - start >= 0.3

"""The centre's messages at the ends: answers on their way, and ranks that are gone."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest

from tfcommx.strategies.easgd import worker as module
from tfcommx.strategies.easgd.server import (
    CENTRE,
    DONE,
    FORCE,
    READ,
    SNAPSHOT,
    START,
    STATISTICS,
    VALUES,
    Centre,
    CentreServer,
    cut,
    start_message,
)
from tfcommx.strategies.easgd.worker import EasgdWorker
from tfcommx.watch import membership as membership_module
from tfcommx.watch.membership import Membership


class Messages:
    """Messages of the other side are in `inbox`; a request is done when it is in `arrived`."""

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


def left(*ranks: int) -> Membership:
    membership = Membership()
    for rank in ranks:
        membership.mark_gone(rank, "it has ended", True)
    return membership


def holding(messages: Messages, membership: Membership) -> CentreServer:
    server = CentreServer(messages, range(3), membership)
    server.centre = Centre(np.ones(2), 0.5)
    return server


def finishing(server: CentreServer) -> threading.Thread:
    thread = threading.Thread(target=server.finish, daemon=True)
    thread.start()
    return thread


def test_a_server_ends_when_its_answers_have_arrived_and_waits_for_nobody_who_is_gone() -> None:
    """Rank 0 may end its process next: an answer that it has not sent would be lost with it."""
    statistics = np.array([1.0])
    messages, membership = Messages(*((rank, DONE, statistics) for rank in range(3))), left()
    server = holding(messages, membership)
    while server.answer_next():
        pass
    assert sorted(one[:2] for one in messages.sent) == [
        (rank, tag) for rank in range(3) for tag in (CENTRE, STATISTICS)
    ]
    waits = finishing(server)
    messages.arrived |= {(0, CENTRE), (0, STATISTICS), (1, CENTRE), (2, CENTRE)}
    waits.join(0.05)
    assert waits.is_alive()  # Two statistics are on their way
    membership.mark_gone(2, "its process has ended", False)  # It dies meanwhile
    waits.join(0.05)
    assert waits.is_alive()
    messages.arrived.add((1, STATISTICS))
    waits.join(60)
    assert not waits.is_alive()


def test_an_answer_that_was_sent_before_the_server_ended_counts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "GRACE_SECONDS", 0.3)
    messages = Messages()
    worker = EasgdWorker(messages, 1, cut(1, [0]), np.dtype("float64"), left(0))
    late = threading.Timer(0.1, lambda: messages.inbox.append((0, FORCE, np.array([2.0]))))
    late.start()
    assert worker.exchange(np.array([7.0])).tolist() == [2]
    assert [one[:2] for one in messages.sent] == [(0, SNAPSHOT)]
    start = time.monotonic()
    with pytest.raises(RuntimeError, match=r"[Rr]ank 0\b.*\bcentre\b"):
        worker.exchange(np.array([7.0]))
    assert time.monotonic() - start >= 0.3


def test_a_worker_that_dies_before_it_has_its_answer_keeps_nobody_waiting() -> None:
    """It asked for the centre while a force was on its way, and neither arrives any more."""
    messages = Messages((1, SNAPSHOT, np.ones(2)), (1, READ, np.zeros(0)), (2, READ, np.zeros(0)))
    server = holding(messages, left(1))
    messages.wait_any = lambda requests: pytest.fail("the server waits for one worker")
    while server.answer_next():
        pass
    assert [one[:2] for one in messages.sent] == [(1, FORCE), (1, VALUES), (2, VALUES)]


def test_weights_that_are_not_finite_are_sent_to_no_server(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of three servers alone would see the NaN; the parts of the others would be met."""
    monkeypatch.setattr(module, "GRACE_SECONDS", 0.1)
    messages = Messages()
    worker = EasgdWorker(messages, 5, cut(3, [0, 1, 2]), np.dtype("float32"), left(0, 1, 2))
    for odd in (np.nan, np.inf):
        assert not worker.exchange(np.array([1, 2, odd])).any()
    assert messages.sent == [] and caplog.text.count("The weights of rank 5 are not finite") == 1


def test_the_answers_of_several_servers_are_put_in_order_and_one_that_is_gone_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "GRACE_SECONDS", 0.1)
    parts = [(2, np.array([5.0])), (0, np.zeros(0)), (1, np.array([4.0]))]
    messages = Messages(*((server, FORCE, part) for server, part in parts))
    worker = EasgdWorker(messages, 1, cut(2, [0, 1, 2]), np.dtype("float64"), left(1))
    assert worker.exchange(np.array([7.0, 8.0])).tolist() == [4, 5]
    assert [(to, array.tolist()) for to, _, array in messages.sent] == [(0, []), (1, [7]), (2, [8])]
    messages.inbox = [(server, FORCE, part) for server, part in parts[:2]]
    with pytest.raises(RuntimeError, match=r"[Rr]ank 1\b.*\bcentre\b"):
        worker.exchange(np.array([7.0, 8.0]))


def test_the_answer_of_a_server_that_has_ended_leaves_time_for_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The grace of one server counted for all: an IndexError, because none was gone."""
    monkeypatch.setattr(module, "GRACE_SECONDS", 0.2)
    messages = Messages()
    worker = EasgdWorker(messages, 2, cut(2, [0, 1]), np.dtype("float64"), left(0))
    for seconds, server in ((0.1, 0), (0.5, 1)):
        answer = (server, FORCE, np.array([float(server)]))
        threading.Timer(seconds, messages.inbox.append, [answer]).start()
    assert worker.exchange(np.array([7.0, 8.0])).tolist() == [0, 1]


def test_a_server_that_nobody_tells_of_is_found_and_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """The worker's neighbours in the watch have died before, and the server after them."""
    monkeypatch.setattr(module, "GRACE_SECONDS", 0.1)
    monkeypatch.setattr(membership_module, "FIND_SECONDS", 0.02)
    membership = left(0, 2)
    membership.probe_with(lambda rank: False, [0, 2, 3], 0.1)
    worker = EasgdWorker(Messages(), 1, cut(1, [3]), np.dtype("float64"), membership)
    with pytest.raises(RuntimeError, match=r"[Rr]ank 3\b.*\bcentre\b"):
        worker.exchange(np.array([7.0]))


def test_a_training_that_begins_anew_forgets_who_had_ended_the_one_before() -> None:
    """An error had ended it on rank 1 while rank 0 waited for the end."""
    begins = start_message(0.5, np.zeros(2))
    messages = Messages((0, DONE, np.ones(1)))
    server = holding(messages, left())
    assert server.answer_next()
    messages.inbox = [(0, START, begins)]
    assert server.answer_next()
    messages.inbox = [(rank, DONE, np.ones(1)) for rank in (1, 2)]
    while server.answer_next():
        pass
    assert not [tag for _, tag, _ in messages.sent if tag == CENTRE]  # Rank 0 trains


@pytest.mark.parametrize("servers", [1, 2, 3, 7])
def test_parts_are_contiguous_and_equal(servers: int) -> None:
    for entries in (0, 1, 2, 3, 6, 7, 8, 100, 10**12 + 1):
        parts = cut(entries, range(servers))
        assert [part.server for part in parts] == list(range(servers))
        ends = [0, *(part.stop for part in parts)]
        assert [part.start for part in parts] == ends[:-1] and ends[-1] == entries
        assert {part.stop - part.start for part in parts} <= {
            entries // servers,
            -(-entries // servers),
        }

"""The link to rank 0: accepted and refused callers, messages, and the request for a pause."""

from __future__ import annotations

import json
import queue
import socket
import time
from typing import Any

import pytest

from tfcommx.launch.handshake import NO_PARTNER, Caller, Handshake
from tfcommx.supervisor.generation import PROTOCOL, RankZeroListener, RunSecret


def call(link: RankZeroListener, said: Any, **changes: Any) -> tuple[socket.socket, Any]:
    """Connect as a rank does, with the variables that it has."""
    own = link.variables | changes
    places, _, port = own["TFCOMMX_SUPERVISOR"].rpartition(":")
    context = own["TFCOMMX_RUN"], own["TFCOMMX_GENERATION"]
    handshake = Handshake(own["TFCOMMX_SUPERVISOR_SECRET"], PROTOCOL, context)
    connection = socket.create_connection((places.split(",")[0], int(port)), timeout=60)
    connection.settimeout(60)
    return connection, handshake.call(connection, said, time.monotonic() + 60)


@pytest.fixture
def heard() -> queue.SimpleQueue[dict[str, Any]]:
    return queue.SimpleQueue()


@pytest.fixture
def link(heard):
    link = RankZeroListener(RunSecret(), 3, heard.put, [], local=True)
    yield link
    link.close()


def test_rank_0_is_heard_and_hears(link, heard) -> None:
    assert not link.pause("growth")
    connection, answer = call(link, {"rank": 0, "size": 2})
    assert answer == {"ok": True}
    assert heard.get(timeout=60) == {"connected": {"rank": 0, "size": 2}}
    connection.sendall(b'{"steps": 7}\n{"steps": 8}\n')
    assert [heard.get(timeout=60) for _ in range(2)] == [{"steps": 7}, {"steps": 8}]
    assert link.pause("growth")
    with connection, connection.makefile("rb") as lines:
        assert json.loads(lines.readline()) == {"pause": "growth"}
        link.close()
        assert lines.readline() == b""


@pytest.mark.parametrize(
    "changes",
    [
        {"TFCOMMX_SUPERVISOR_SECRET": "0" * 32},
        {"TFCOMMX_RUN": "0" * 16},
        # A rank of the generation before
        {"TFCOMMX_GENERATION": "2"},
    ],
)
def test_strangers_get_no_answer(link, heard, changes: dict[str, str]) -> None:
    with pytest.raises(NO_PARTNER):
        call(link, {"rank": 0, "size": 2}, **changes)
    assert heard.empty() and not link.pause("growth")
    assert call(link, {"rank": 1, "size": 2})[1] == {"ok": False}


def test_ranks_of_this_host_alone_are_served_on_the_loopback_only(heard) -> None:
    for local in (True, False):
        link = RankZeroListener(RunSecret(), 0, heard.put, [], local)
        places, _, port = link.variables["TFCOMMX_SUPERVISOR"].rpartition(":")
        first, *others = places.split(",")
        assert (first == "127.0.0.1") == local and int(port) > 0
        # All of several addresses, or the one that there is
        assert link._listening.getsockname()[0] == (first if len(others) <= 1 else "0.0.0.0")
        link.close()


def test_interfaces_that_are_named_are_the_only_ones_that_it_listens_at(heard) -> None:
    link = RankZeroListener(RunSecret(), 0, heard.put, ["lo"], local=False)
    assert link._listening.getsockname()[0] == "127.0.0.1"
    link.close()


def test_a_port_is_free_after_the_end(link) -> None:
    place = link._listening.getsockname()
    link.close()
    with pytest.raises(OSError):
        socket.create_connection(place, timeout=1)


def test_a_caller_who_proves_itself_after_the_end_is_not_heard(link, heard) -> None:
    """It became rank 0 of a generation that had ended, and its thread read from it."""
    link.close()
    rank, supervisor = socket.socketpair()
    with rank:
        rank.shutdown(socket.SHUT_WR)
        handshake = Handshake("", PROTOCOL)
        link._hear(Caller(handshake, supervisor, {"rank": 0, "size": 2}, "0"))
        assert supervisor.fileno() == -1 and heard.empty() and not link.pause("growth")

"""A listener hears its callers side by side; neither silence nor a lack of descriptors ends it."""

from __future__ import annotations

import contextlib
import errno
import queue
import resource
import socket
import threading
import time
from collections.abc import Iterator

import pytest

from tfcommx.launch.handshake import NO_PARTNER, Caller, Entrance, Handshake

OURS = Handshake("our secret", "test 1")


class Listener:
    """An entrance that answers whom it lets in, and its port."""

    def __init__(self, seconds: float, most: int) -> None:
        self.socket = socket.create_server(("127.0.0.1", 0), backlog=128)
        self.port = self.socket.getsockname()[1]
        self.came: queue.SimpleQueue[Caller] = queue.SimpleQueue()
        self.entrance = Entrance(self.socket, OURS, seconds, self.welcome, most)

    def welcome(self, caller: Caller) -> None:
        self.came.put(caller)
        caller.answer("welcome")

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), 10)

    def call(self, seconds: float = 10) -> str:
        with self.connect() as connection:
            return OURS.call(connection, "a partner", time.monotonic() + seconds)


@pytest.fixture
def listener(request: pytest.FixtureRequest) -> Iterator[Listener]:
    found = Listener(*getattr(request, "param", (60.0, 8)))
    yield found
    found.entrance.close()


def test_silent_callers_keep_nobody_waiting_and_the_oldest_are_sent_away(listener) -> None:
    silent = [listener.connect() for _ in range(40)]
    assert listener.call() == "welcome"
    for connection in silent[:30]:  # All but the newest, of which there are at most 8
        connection.settimeout(10)
        while connection.recv(1000):  # It was greeted, perhaps
            pass
    assert len(listener.entrance._unproven) <= 8
    for connection in silent:
        connection.close()


@pytest.mark.parametrize("listener", [(0.5, 8)], indirect=True)
@pytest.mark.parametrize(
    "said",
    [
        b"",
        b"GET / HTTP/1.1\r\n\r\n",
        b"[" * 8000 + b"\n",
        b'{"said": 1, "challenge": "", "proof": ""}\n',
        b'{"said": 1, "challenge": "", "proof": 7}\n',
        b"5\n",
        b"x" * 100_000,
    ],
)
def test_who_proves_nothing_is_sent_away(listener, said: bytes) -> None:
    with listener.connect() as stranger:
        stranger.settimeout(10)
        with contextlib.suppress(ConnectionError):
            stranger.sendall(said)
            while stranger.recv(1000):
                pass
    assert listener.came.empty() and listener.call() == "welcome"


@pytest.mark.parametrize("listener", [(0.5, 8)], indirect=True)
def test_one_that_sends_byte_after_byte_has_its_time_too(listener) -> None:
    start = time.monotonic()
    with listener.connect() as stranger, contextlib.suppress(ConnectionError):
        while time.monotonic() < start + 10:
            stranger.sendall(b"x")
            time.sleep(0.05)
    assert time.monotonic() - start < 5


def test_it_listens_again_when_there_were_no_descriptors_left() -> None:
    """Once, the first EMFILE ended the listeners of mirrors and of the supervisor for good."""
    listener = Listener(60.0, 8)
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    taken: list[socket.socket] = []
    try:
        with socket.socket() as calling:
            resource.setrlimit(resource.RLIMIT_NOFILE, (256, before[1]))
            with pytest.raises(OSError) as full:
                while True:
                    taken.append(socket.socket())
            assert full.value.errno == errno.EMFILE
            calling.settimeout(10)
            calling.connect(("127.0.0.1", listener.port))  # By the system, before `accept`
            time.sleep(0.3)
            for one in taken:
                one.close()
            assert OURS.call(calling, "a partner", time.monotonic() + 10) == "welcome"
        assert listener.call() == "welcome"
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
        for one in taken:
            one.close()
        listener.entrance.close()


def test_it_listens_on_when_a_thread_cannot_be_started(listener, monkeypatch) -> None:
    start = threading.Thread.start

    def fail(thread: threading.Thread) -> None:
        monkeypatch.setattr(threading.Thread, "start", start)
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", fail)
    with pytest.raises(NO_PARTNER):
        listener.call()
    assert listener.call() == "welcome"


def test_after_its_end_nobody_is_heard(listener) -> None:
    waiting = listener.connect()
    waiting.settimeout(10)
    assert waiting.recv(1000)
    listener.entrance.close()
    assert waiting.recv(1000) == b""
    with pytest.raises(OSError):
        listener.connect()
    waiting.close()

"""Two processes prove to each other that they know a secret, which itself does not travel.

    caller                                    callee
      connect ------------------------------>
      <------------------------------ protocol, challenge
      what it says, challenge, proof ------->   a stranger if the proof does not hold
      <------------------------- answer, proof  at once or later

A proof is an HMAC of the other side's challenge and of what is said. Messages are lines of JSON.
`Entrance` hears the callers of a listening socket side by side, until each has proven who it is:

    connections --accept--> at most `most` that have proven nothing yet, a thread each
                              | proof: `welcome`      | no proof in time, or the oldest of too many
                              v                       v
                            who waits for it        closed

One that is silent keeps no other waiting. Nor does a lack of file descriptors or threads end the
listener: it waits a little, and accepts again. Of too many unproven callers the oldest is closed,
not the newest, because a partner proves itself within one round trip.

Knows only the standard library: watchers use it, too.
"""

from __future__ import annotations

import contextlib
import errno
import hmac
import json
import os
import socket
import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple

# Bytes: a deeply nested message of a stranger must not exhaust the stack
LARGEST_MESSAGE = 8192
# Of them, what a text may take: the rest is for the proof
LARGEST_TEXT = 6144
# What `call` and `hear` raise for a stranger, or if the other side does not answer in time
NO_PARTNER = (OSError, ValueError, KeyError, TypeError, RecursionError)


class Handshake(NamedTuple):
    """What both sides must have in common."""

    # Empty: anybody knows it
    secret: str
    # Name and version; the callee says it first
    protocol: str
    # What is proven without being said, such as the name of the launch
    context: tuple[object, ...] = ()

    def call(self, connection: socket.socket, said: object, end: float) -> Any:
        """Say something, and return the answer, which must come until `end` (monotonic clock)."""
        greeting = _read(connection, end)
        if greeting["protocol"] != self.protocol:
            raise ValueError(
                f"another program, or version, listens there: {greeting['protocol']!r}"
            )
        challenge = os.urandom(16).hex()
        proof = self._proof(greeting["challenge"], said, challenge)
        _write(connection, {"said": said, "challenge": challenge, "proof": proof})
        answer = _read(connection, end)
        if not hmac.compare_digest(answer["proof"], self._proof(challenge, answer["said"])):
            raise ValueError("what listens there does not know the secret")
        return answer["said"]

    def hear(self, connection: socket.socket, end: float) -> Caller:
        """Let a caller say something until `end`."""
        challenge = os.urandom(16).hex()
        _write(connection, {"protocol": self.protocol, "challenge": challenge})
        heard = _read(connection, end)
        said, its = heard["said"], heard["challenge"]
        if not hmac.compare_digest(heard["proof"], self._proof(challenge, said, its)):
            raise ValueError("a stranger")
        return Caller(self, connection, said, its)

    def _proof(self, *words: object) -> str:
        text = json.dumps([self.protocol, *self.context, *words])
        return hmac.digest(self.secret.encode(), text.encode(), "sha256").hex()


class Caller(NamedTuple):
    """A process that has proven that it knows the secret, and waits for the answer."""

    handshake: Handshake
    connection: socket.socket
    said: Any
    challenge: str

    def answer(self, text: object) -> None:
        """Answer it. **Raises:** OSError if it has gone, ValueError for more than it reads."""
        proof = self.handshake._proof(self.challenge, text)
        _write(self.connection, {"said": text, "proof": proof})


def _write(connection: socket.socket, text: dict[str, Any]) -> None:
    line = json.dumps(text).encode() + b"\n"
    if len(line) > LARGEST_MESSAGE:
        raise ValueError(f"a message of {len(line)} bytes, of at most {LARGEST_MESSAGE}")
    # Libraries of the process may have set SIGPIPE to its default, which ends it
    connection.sendall(line, socket.MSG_NOSIGNAL)


def shortened(text: str) -> str:
    """Return a text as a message can hold it: its beginning, if it is too long.

    >>> shortened("short"), shortened("long" * 5000)[-7:]
    ('short', 'long...')
    """
    while len(json.dumps(text)) > LARGEST_TEXT:
        text = text[: len(text) * 3 // 4].rstrip(".") + "..."
    return text


def _read(connection: socket.socket, end: float) -> dict[str, Any]:
    """Read one line, and nothing of what follows it."""
    data = b""
    while not data.endswith(b"\n"):
        connection.settimeout(max(end - time.monotonic(), 0.001))
        waiting = connection.recv(4096, socket.MSG_PEEK)
        data += connection.recv(waiting.find(b"\n") + 1 or len(waiting))
        if not waiting or len(data) > LARGEST_MESSAGE:
            raise ValueError("it has ended the connection")
    message: dict[str, Any] = json.loads(data)
    return message


# Callers at once that have proven nothing yet
UNPROVEN = 64
# Between two tries while the system has no file descriptor or memory for a connection
PAUSE_SECONDS = 0.1
# What `accept` fails with once the listening socket is closed or shut down
_CLOSED = (errno.EBADF, errno.EINVAL, errno.ENOTSOCK)


class Entrance:
    """Accepts callers from its first moment until `close`, in threads.

    Args:
        listening: where they connect; blocking.
        handshake: what they must prove.
        seconds: for each to do so.
        welcome: called with each that has, in that caller's thread; the connection is then its.
        most: unproven callers at once.
    """

    def __init__(
        self,
        listening: socket.socket,
        handshake: Handshake,
        seconds: float,
        welcome: Callable[[Caller], object],
        most: int = UNPROVEN,
    ) -> None:
        self._listening, self._handshake = listening, handshake
        self._seconds, self._welcome, self._most = seconds, welcome, most
        # Oldest first
        self._unproven: dict[socket.socket, None] = {}
        self._lock = threading.Lock()
        threading.Thread(target=self._accept, name="tfcommx-entrance", daemon=True).start()

    def close(self) -> None:
        """Accept no more callers, and close those that have proven nothing yet."""
        with contextlib.suppress(OSError):
            self._listening.shutdown(socket.SHUT_RDWR)  # Wakes the thread that waits in `accept`
        self._listening.close()
        with self._lock:
            while self._unproven:
                self._send_oldest_away()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listening.accept()
            except OSError as error:
                if error.errno in _CLOSED:
                    return
                # No file descriptor is left, or the caller has gone already
                time.sleep(PAUSE_SECONDS)
                continue
            with self._lock:
                if len(self._unproven) >= self._most:
                    self._send_oldest_away()
                self._unproven[connection] = None
            try:
                threading.Thread(target=self._hear, args=[connection], daemon=True).start()
            except RuntimeError:  # No thread is left
                self._forget(connection)
                connection.close()

    def _hear(self, connection: socket.socket) -> None:
        try:
            caller = self._handshake.hear(connection, time.monotonic() + self._seconds)
        except NO_PARTNER:
            self._forget(connection)
            connection.close()
        else:
            self._forget(connection)
            self._welcome(caller)

    def _forget(self, connection: socket.socket) -> None:
        with self._lock:
            self._unproven.pop(connection, None)

    def _send_oldest_away(self) -> None:
        """End the oldest unproven connection, if there is one; its thread closes it."""
        for connection in self._unproven:
            del self._unproven[connection]
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
            return

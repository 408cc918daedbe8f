"""Prove to another process that this one knows a secret, without sending the secret.

    caller                                    callee
      connect ------------------------------>
      <------------------------------ protocol, challenge
      message, challenge, proof ------------>   refused if the proof does not hold
      <------------------------- answer, proof  at once or later

A proof is an HMAC of the other side's challenge and of the message. Messages are lines of JSON.
`Entrance` hears the callers of a listening socket concurrently, until each has sent its proof:

    connections --accept--> at most `most` unproven callers, a thread each
                              | proof received        | no proof in time, or the oldest of too many
                              v                       v
                            `welcome`               closed

A silent caller does not block the others. A lack of file descriptors or threads does not end the
listener: it pauses and accepts again.

Imports only the standard library, because watchers use it, too.
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
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

# Limit in bytes, because a stranger's deeply nested message must not exhaust the stack
LARGEST_MESSAGE = 8192
# Bytes of a message that a text may take; the rest is for the proof
LARGEST_TEXT = 6144
# Exceptions of `call` and `hear` for a stranger, or if the other side does not answer in time
NO_PARTNER = (OSError, ValueError, KeyError, TypeError, RecursionError)


class Handshake(NamedTuple):
    """The secret, protocol and context that both sides must share."""

    # Empty: every process passes
    secret: str
    # Name and version; the callee sends it first
    protocol: str
    # Values covered by the proof but not sent, such as the name of the launch
    context: tuple[object, ...] = ()

    def connect(
        self, places: Iterable[tuple[str, int]], said: object, dial: float, wait: float
    ) -> tuple[socket.socket, Any]:
        """Send a message to the first place whose process knows the secret.

        Args:
            places: addresses and ports, best first.
            dial: seconds for each connection.
            wait: seconds for its answer.

        Returns:
            The connection, and the answer.

        **Raises:** ConnectionError with the problem of each place.
        """
        problems = []
        for place in places:
            try:
                with contextlib.ExitStack() as unless_kept:
                    connection = socket.create_connection(place, dial)
                    unless_kept.callback(connection.close)
                    answer = self.call(connection, said, time.monotonic() + wait)
                    unless_kept.pop_all()
                    return connection, answer
            except NO_PARTNER as error:
                problems.append(f"{place[0]}:{place[1]} ({error})")
        raise ConnectionError(f"no answer from {', '.join(problems)}")

    def call(self, connection: socket.socket, said: object, end: float) -> Any:
        """Send a message; return the answer, which must arrive before `end` (monotonic clock)."""
        greeting = _read(connection, end)
        if greeting["protocol"] != self.protocol:
            raise ValueError(
                f"another program, or version, listens there: {greeting['protocol']!r}"
            )
        # The answer's proof covers this challenge, so that a recorded answer does not pass
        challenge = os.urandom(16).hex()
        proof = self._proof(greeting["challenge"], said, challenge)
        _write(connection, {"said": said, "challenge": challenge, "proof": proof})
        answer = _read(connection, end)
        # In constant time, because a stranger could otherwise find a proof byte by byte
        if not hmac.compare_digest(answer["proof"], self._proof(challenge, answer["said"])):
            raise ValueError("what listens there does not know the secret")
        return answer["said"]

    def hear(self, connection: socket.socket, end: float) -> Caller:
        """Receive a caller's message and proof before `end` (monotonic clock)."""
        # A new one for each caller, because a proof could otherwise be recorded and sent again
        challenge = os.urandom(16).hex()
        _write(connection, {"protocol": self.protocol, "challenge": challenge})
        heard = _read(connection, end)
        message, caller_challenge = heard["said"], heard["challenge"]
        if not hmac.compare_digest(
            heard["proof"], self._proof(challenge, message, caller_challenge)
        ):
            raise ValueError("a stranger")
        return Caller(self, connection, message, caller_challenge)

    def _proof(self, *words: object) -> str:
        # As JSON, because two lists of words that are merely joined may give the same text
        text = json.dumps([self.protocol, *self.context, *words])
        return hmac.digest(self.secret.encode(), text.encode(), "sha256").hex()


class Caller(NamedTuple):
    """A process that has proven knowledge of the secret, and waits for the answer."""

    handshake: Handshake
    connection: socket.socket
    said: Any
    challenge: str

    def answer(self, text: object) -> None:
        """Answer it. **Raises:** OSError if it has ended, ValueError for too long a message."""
        proof = self.handshake._proof(self.challenge, text)
        _write(self.connection, {"said": text, "proof": proof})


def _write(connection: socket.socket, text: dict[str, Any]) -> None:
    line = json.dumps(text).encode() + b"\n"
    if len(line) > LARGEST_MESSAGE:
        raise ValueError(f"a message of {len(line)} bytes, of at most {LARGEST_MESSAGE}")
    # Libraries of the process may have set SIGPIPE to its default, which ends it
    connection.sendall(line, socket.MSG_NOSIGNAL)


def shortened(text: str) -> str:
    """Return a text that fits into a message: its beginning, if it is too long.

    >>> shortened("short"), shortened("long" * 5000)[-7:]
    ('short', 'long...')
    """
    while len(json.dumps(text)) > LARGEST_TEXT:
        text = text[: len(text) * 3 // 4].rstrip(".") + "..."
    return text


def _read(connection: socket.socket, end: float) -> dict[str, Any]:
    """Read one line, and no byte after it."""
    data = b""
    while not data.endswith(b"\n"):
        # At least a millisecond, because 0 would make the socket non-blocking
        connection.settimeout(max(end - time.monotonic(), 0.001))
        # The bytes after the line are for the user of the connection
        waiting = connection.recv(4096, socket.MSG_PEEK)
        data += connection.recv(waiting.find(b"\n") + 1 or len(waiting))
        if not waiting or len(data) > LARGEST_MESSAGE:
            raise ValueError("it has ended the connection")
    message: dict[str, Any] = json.loads(data)
    return message


# Limit on concurrent unproven callers
UNPROVEN = 64
# Pause between two tries while the system has no file descriptor or memory for a connection
PAUSE_SECONDS = 0.1
# Errors of `accept` once the listening socket is closed or shut down
_CLOSED = (errno.EBADF, errno.EINVAL, errno.ENOTSOCK)


class Entrance:
    """Accepts callers in threads, from its construction until `close`.

    Args:
        listening: the socket to which they connect; blocking.
        handshake: the secret and context that they must prove to know.
        seconds: time limit for a caller's proof, > 0.
        welcome: called with each proven caller, in that caller's thread; it then owns the
            connection.
        most: limit on concurrent unproven callers.
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
        """Stop accepting, and close the unproven callers."""
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
                # No file descriptor is left, or the caller has disconnected already
                time.sleep(PAUSE_SECONDS)
                continue
            with self._lock:
                # Not the newest, because a partner proves itself within one round trip
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
        connection = next(iter(self._unproven))
        del self._unproven[connection]
        with contextlib.suppress(OSError):
            connection.shutdown(socket.SHUT_RDWR)  # Its thread closes it

"""Two processes prove to each other that they know a secret, which itself does not travel.

    caller                                    callee
      connect ------------------------------>
      <------------------------------ protocol, challenge
      what it says, challenge, proof ------->   a stranger if the proof does not hold
      <------------------------- answer, proof  at once or later

A proof is an HMAC of the other side's challenge and of what is said. Messages are lines of JSON.
Knows only the standard library: watchers use it, too.
"""

from __future__ import annotations

import hmac
import json
import os
import socket
import time
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

    def call(self, connection: socket.socket, said: Any, end: float) -> Any:
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

    def _proof(self, *words: Any) -> str:
        text = json.dumps([self.protocol, *self.context, *words])
        return hmac.digest(self.secret.encode(), text.encode(), "sha256").hex()


class Caller(NamedTuple):
    """A process that has proven that it knows the secret, and waits for the answer."""

    handshake: Handshake
    connection: socket.socket
    said: Any
    challenge: str

    def answer(self, text: Any) -> None:
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
    return json.loads(data)

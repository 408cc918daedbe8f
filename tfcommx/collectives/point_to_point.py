"""PointToPoint: the contract of messages between two ranks; Channel: several that share one."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np

# What `send` and `receive` return: only the object that has made it knows what it is
Request = Any


class PointToPoint(Protocol):
    """Messages between two ranks.

    The array of a request must live, and not be changed, until the request is done. Messages from
    one rank to another with one tag arrive in the order in which they were sent.
    """

    # Rank -> bytes sent to it so far
    sent: dict[int, int]

    def send(self, array: np.ndarray, target: int, tag: int) -> Request:
        """Start to send an array, without waiting.

        Args:
            array: any dtype and shape, contiguous.
            target: a rank of the world.
            tag: >= 0; the receiver gives the same.

        Returns:
            The request.
        """

    def receive(self, array: np.ndarray, source: int, tag: int) -> Request:
        """Start to receive into an array, without waiting.

        Args:
            array: contiguous, of as many bytes as are sent.
            source: a rank of the world.
            tag: >= 0, as the sender gives it.

        Returns:
            The request.
        """

    def wait_any(self, requests: list[Request]) -> int:
        """Wait until one of the requests is done; return its position in the list.

        **Raises:** RuntimeError that names the ranks awaited if nothing comes in time.
        """

    def done(self, request: Request) -> bool:
        """Tell whether a request is done, without waiting. Once done, it is not asked again."""

    def take(self, tag: int) -> tuple[int, np.ndarray] | None:
        """Receive a message that has arrived from any rank; None if there is none. It never waits.

        Returns:
            Who sent it, and its bytes: uint8, as many as were sent.
        """

    def close(self) -> None:
        """Free what the messages needed; no request may be open. **Ranks:** all, once."""


# Tags of one channel
TAGS = 16


class Channel:
    """Messages that share another object's and are not taken for its own, by tags of their own.

    Args:
        messages: whose connections it uses.
        number: of the channel, >= 1, the same on all ranks; 0 are the messages themselves.
    """

    def __init__(self, messages: PointToPoint, number: int) -> None:
        self._messages, self._first = messages, TAGS * number
        self.sent = messages.sent
        self.wait_any, self.done = messages.wait_any, messages.done

    def send(self, array: np.ndarray, target: int, tag: int) -> Request:
        return self._messages.send(array, target, self._first + tag)

    def receive(self, array: np.ndarray, source: int, tag: int) -> Request:
        return self._messages.receive(array, source, self._first + tag)

    def take(self, tag: int) -> tuple[int, np.ndarray] | None:
        return self._messages.take(self._first + tag)

    def close(self) -> None:
        """Do nothing: other channels go on."""

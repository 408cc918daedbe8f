"""PointToPoint: the contract of messages between two ranks; Channel: several that share one."""

from typing import Any, Protocol

import numpy as np

# Result of `send` and `receive`, whose type only the object that made it knows
Request = Any


class PointToPoint(Protocol):
    """Messages between two ranks.

    The array of a request must exist, unchanged, until the request is done. Messages from one rank
    to another with one tag arrive in the order in which they were sent.
    """

    # Rank -> bytes sent to it so far
    sent: dict[int, int]

    def send(self, array: np.ndarray, target: int, tag: int) -> Request:
        """Start sending an array, without waiting; return the request.

        Args:
            array: any dtype and shape, contiguous.
            target: a rank of the world.
            tag: >= 0, equal to the receiver's.
        """

    def receive(self, array: np.ndarray, source: int, tag: int) -> Request:
        """Start receiving into an array, without waiting; return the request.

        Args:
            array: contiguous, with as many bytes as are sent.
            source: a rank of the world.
            tag: >= 0, equal to the sender's.
        """

    def wait_any(self, requests: list[Request]) -> int:
        """Wait until one of the requests is done; return its position in the list.

        **Raises:** RankLostError that names the awaited ranks if no message arrives in time.
        """

    def done(self, request: Request) -> bool:
        """Return True if a request is done, without waiting; not called again once it is."""

    def take(self, tag: int) -> tuple[int, np.ndarray] | None:
        """Receive a message that has arrived from any rank; None if there is none. It never waits.

        Returns:
            The rank that sent it, and its bytes, uint8.
        """

    def close(self) -> None:
        """Free the resources of the messages; no request may be open. **Ranks:** all, once."""


# Number of tags of one channel
TAGS = 16


class Channel:
    """Messages over the connections of another object, with separate tags.

    Args:
        messages: object whose connections it uses.
        number: number of the channel, >= 1, equal on all ranks; 0 is that of `messages`.
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
        """Do nothing; other channels continue."""

"""Hears the callers of a listening socket side by side, until each has proven who it is.

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
import socket
import threading
import time
from collections.abc import Callable

from tfcommx.comm.challenge import NO_PARTNER, Caller, Handshake

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

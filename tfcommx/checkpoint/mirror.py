"""Mirrors: each rank's file of a snapshot also goes to a rank on the next host.

    sender                                   receiver
      {"rank": 2, "files": [[name, bytes]], "keep": [40, 60]}   proven by the run's secret
      <------------------------------------ ok
      the files' bytes --------------------->   named when whole
      <------------------------------------ b"1"

After the loss of any one host all files of the last whole snapshot are on the others.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

from tfcommx.checkpoint.place import SnapshotFolder, check_file_name
from tfcommx.launch.handshake import NO_PARTNER, Caller, Entrance, Handshake
from tfcommx.watch.liveness import listen

PROTOCOL = "tfcommx mirror 1"
# For one address to answer, for a stranger to prove what it is, and between two pieces of a file
WAIT_SECONDS = 20.0
DIAL_SECONDS = 5.0
PIECE = 1 << 20


class Row(NamedTuple):
    """What each rank tells the others before the first snapshot."""

    # As the launch calls it
    host: str
    addresses: list[str]
    port: int


def partner(rank: int, hosts: Sequence[str]) -> int | None:
    """Return the rank that keeps the mirror of a rank; None if all are on one host.

    >>> [partner(rank, ["red", "red", "blue", "blue"]) for rank in range(4)]
    [2, 3, 0, 1]

    Args:
        rank: whose.
        hosts: of each rank; those of a host are consecutive.
    """
    names = list(dict.fromkeys(hosts))
    if len(names) == 1:
        return None
    following = names[(names.index(hosts[rank]) + 1) % len(names)]
    there = [other for other, host in enumerate(hosts) if host == following]
    return there[(rank - hosts.index(hosts[rank])) % len(there)]


class Mirrors:
    """Receives the files of other ranks, and sends this rank's.

    Args:
        handshake: what ranks of this generation prove to each other.
        host: of this rank.
        interfaces: that the ranks were launched on; empty: any.
        place: where files lie, and are put.
    """

    def __init__(
        self, handshake: Handshake, host: str, interfaces: list[str], place: SnapshotFolder
    ) -> None:
        self.handshake, self.place = handshake, place
        listening, addresses = listen(interfaces, one_host=False)
        self.row = Row(host, addresses, listening.getsockname()[1])
        Entrance(listening, handshake, WAIT_SECONDS, self._hear)

    def send(self, to: Row, rank: int, names: Sequence[str], keep: Sequence[int]) -> None:
        """Send files of this rank; return when the other host has them.

        Args:
            to: the receiver.
            rank: whose files these are.
            names: in `place`.
            keep: saves of this rank that the receiver does not delete.

        **Raises:** OSError or ValueError if it does not take them.
        """
        paths = [self.place.path / name for name in names]
        sizes = [[path.name, path.stat().st_size] for path in paths]
        with self._connect(to, {"rank": rank, "files": sizes, "keep": list(keep)}) as connection:
            for path in paths:
                with path.open("rb") as file:
                    connection.sendfile(file)
            if connection.recv(1) != b"1":
                raise ConnectionError("it has closed the connection")

    def _connect(self, to: Row, said: dict[str, Any]) -> socket.socket:
        problem: Exception = ConnectionError("no address")
        for address in to.addresses[:-1] or to.addresses:  # The last one is of any host
            with contextlib.ExitStack() as unless_kept:
                try:
                    connection = socket.create_connection((address, to.port), DIAL_SECONDS)
                    unless_kept.callback(connection.close)
                    self.handshake.call(connection, said, time.monotonic() + WAIT_SECONDS)
                except NO_PARTNER as error:
                    problem = error
                    continue
                unless_kept.pop_all()
                connection.settimeout(WAIT_SECONDS)
                return connection
        raise ConnectionError(f"no answer from {to.host}: {problem}")

    def _hear(self, caller: Caller) -> None:
        with caller.connection, contextlib.suppress(*NO_PARTNER):
            self._receive(caller)  # If it fails, the sender sees the end of the connection

    def _receive(self, caller: Caller) -> None:
        said, connection = caller.said, caller.connection
        files = [(str(name), int(size)) for name, size in said["files"]]
        for name, _ in files:
            check_file_name(name)
        caller.answer("ok")
        connection.settimeout(WAIT_SECONDS)
        for name, size in files:
            with self.place.writing(name) as file:
                _copy(connection, file.fileno(), size)
        self.place.keep(set(said["keep"]), int(said["rank"]))
        connection.sendall(b"1", socket.MSG_NOSIGNAL)


def _copy(connection: socket.socket, file: int, size: int) -> None:
    while size:
        piece = connection.recv(min(size, PIECE))
        if not piece:
            raise ConnectionError("the sender has gone")
        size -= len(piece)
        view = memoryview(piece)
        while view:
            view = view[os.write(file, view) :]

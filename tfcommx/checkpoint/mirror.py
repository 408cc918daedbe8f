"""Mirror each rank's file of a snapshot on the next host.

    sender                                   receiver
      {"rank": 2, "files": [[name, bytes]], "keep": [40, 60]}   proven by the run's secret
      <------------------------------------ ok
      the files' bytes --------------------->   named when complete
      <------------------------------------ b"1"

After the loss of any one host all files of the last complete snapshot are on the others.
"""

import contextlib
import functools
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import IO, NamedTuple

from tfcommx.checkpoint.place import SnapshotFolder
from tfcommx.launch.handshake import NO_PARTNER, Caller, Entrance, Handshake
from tfcommx.launch.supervision import Supervision
from tfcommx.watch.liveness import listen

PROTOCOL = "tfcommx mirror 1"
# Time limit for a caller's proof, an answer, and the next piece of a file
WAIT_SECONDS = 20.0
# Time limit for a connection to one address
DIAL_SECONDS = 5.0
# Bytes of one read
PIECE = 1 << 20


class Row(NamedTuple):
    """Address of a rank, exchanged before the first snapshot."""

    # Name in the launch
    host: str
    addresses: list[str]
    port: int


def partner(rank: int, hosts: Sequence[str]) -> int | None:
    """Return the rank that keeps the mirror of a rank; None if all ranks are on one host.

    >>> [partner(rank, ["red", "red", "blue", "blue"]) for rank in range(4)]
    [2, 3, 0, 1]
    """
    names = list(dict.fromkeys(hosts))
    if len(names) == 1:
        return None
    following = names[(names.index(hosts[rank]) + 1) % len(names)]
    candidates = [candidate for candidate, host in enumerate(hosts) if host == following]
    return candidates[(rank - hosts.index(hosts[rank])) % len(candidates)]


class Mirrors:
    """Receives the files of other ranks, and sends this rank's.

    Args:
        handshake: handshake between ranks of this generation.
        interfaces: network interfaces that the ranks were launched on; empty: any.
        folder: folder from which files are sent, and in which received files are stored.
    """

    def __init__(
        self, handshake: Handshake, host: str, interfaces: list[str], folder: SnapshotFolder
    ) -> None:
        self.handshake, self.place = handshake, folder
        listening, addresses = listen(interfaces, one_host=False)
        self.row = Row(host, addresses, listening.getsockname()[1])
        Entrance(listening, handshake, WAIT_SECONDS, self._receive)

    def send(self, to: Row, rank: int, names: Sequence[str], keep: Sequence[int]) -> None:
        """Send files of this rank; return when the other host has stored them.

        The receiver deletes files of this rank's saves that are not in `keep`; if a model is sent,
        the models of other saves, too.

        **Raises:** OSError or ValueError if the receiver does not accept them.
        """
        paths = [self.place.path / name for name in names]
        sizes = [[path.name, path.stat().st_size] for path in paths]
        addresses = to.addresses[:-1] or to.addresses  # The last is the loopback
        places = [(address, to.port) for address in addresses]
        message = {"rank": rank, "files": sizes, "keep": list(keep)}
        connection, _ = self.handshake.connect(places, message, DIAL_SECONDS, WAIT_SECONDS)
        with connection:
            connection.settimeout(WAIT_SECONDS)
            for path in paths:
                with path.open("rb") as file:
                    connection.sendfile(file)
            if connection.recv(1) != b"1":
                raise ConnectionError("it has closed the connection")

    def _receive(self, caller: Caller) -> None:
        message, connection = caller.said, caller.connection
        # After a failure the sender sees the end of the connection
        with connection, contextlib.suppress(*NO_PARTNER):
            files = [(str(name), int(size)) for name, size in message["files"]]
            caller.answer("ok")
            connection.settimeout(WAIT_SECONDS)
            for name, size in files:
                with self.place.writing(name) as file:
                    _copy(connection, file, size)
            # The last complete save is deleted only now, because the sender may die at any byte
            has_model = any(name.startswith("model") for name, _ in files)
            self.place.keep(set(message["keep"]), int(message["rank"]), models=has_model)
            connection.sendall(b"1", socket.MSG_NOSIGNAL)


@functools.cache
def mirrors_of(supervised: Supervision, interfaces: tuple[str, ...], folder: Path) -> Mirrors:
    """Return the listener of this process, which all calls of `fit` with a folder share."""
    place = SnapshotFolder(supervised.memory, folder)
    return Mirrors(supervised.handshake(PROTOCOL), supervised.host, [*interfaces], place)


def _copy(connection: socket.socket, file: IO[bytes], size: int) -> None:
    while size:
        piece = connection.recv(min(size, PIECE))
        if not piece:
            raise ConnectionError("the sender has gone")
        size -= len(piece)
        file.write(piece)

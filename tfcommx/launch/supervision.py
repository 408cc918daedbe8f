"""Read the variables of a supervised run, and connect rank 0 to `tfcommx run`.

supervisor/generation.py documents their messages. A supervised run is a series of generations of
ranks. A generation leaves its memory in a folder of its host's shared memory, where the next one
finds it.
"""

import contextlib
import functools
import json
import os
import socket
import threading
from pathlib import Path
from typing import NamedTuple

from tfcommx.core import ConfigurationError, log
from tfcommx.launch.handshake import LARGEST_MESSAGE, NO_PARTNER, Handshake

PROTOCOL = "tfcommx supervisor 1"
# Exit status of ranks that the next generation replaces: EX_TEMPFAIL of sysexits.h
PAUSED = 75
# Mount point of a host's shared memory
MEMORY = "/dev/shm"
# Time limit for one address of the supervisor to answer
DIAL_SECONDS = 5.0


class Supervision(NamedTuple):
    """A supervised run, as one of its ranks sees it."""

    # Name of the run, the same in all generations
    run: str
    # Number of the generation, from 0
    generation: int
    # Shared by all ranks and the supervisor
    secret: str
    # Addresses and ports of the supervisor, best first
    places: tuple[tuple[str, int], ...]
    # Name of this host in the launch
    host: str

    @property
    def memory(self) -> Path:
        """This host's folder of state for the next generation; it need not exist."""
        return Path(MEMORY) / f"tfcommx-{os.getuid()}-{self.run}-{self.host}"

    def handshake(self, protocol: str) -> Handshake:
        return Handshake(self.secret, protocol, (self.run, str(self.generation)))


@functools.cache
def supervision() -> Supervision | None:
    """Return the run that this rank belongs to; None if it is not supervised.

    **Ranks:** local. **Raises:** ConfigurationError for missing or malformed variables.
    """
    run = os.environ.get("TFCOMMX_RUN")
    if not run:
        return None
    host = os.environ.get("HOROVOD_HOSTNAME") or socket.gethostname()
    try:
        addresses, _, port = os.environ["TFCOMMX_SUPERVISOR"].rpartition(":")
        secret = os.environ["TFCOMMX_SUPERVISOR_SECRET"].strip()
        if not secret:  # Any process knows the empty one
            raise ValueError("an empty TFCOMMX_SUPERVISOR_SECRET")
        return Supervision(
            run,
            int(os.environ["TFCOMMX_GENERATION"]),
            secret,
            tuple((address, int(port)) for address in addresses.split(",")),
            host,
        )
    except (KeyError, ValueError) as error:
        raise ConfigurationError(
            "A supervised run needs what `tfcommx run` sets beside TFCOMMX_RUN: "
            "TFCOMMX_GENERATION, TFCOMMX_SUPERVISOR and TFCOMMX_SUPERVISOR_SECRET. Received "
            f"{error}. Unset TFCOMMX_RUN, or start with `tfcommx run`."
        ) from error


class SupervisorLink:
    """Rank 0's connection to the supervisor; training continues without it."""

    def __init__(self, supervised: Supervision, size: int) -> None:
        """Connect; `size` is the number of ranks. Log a supervisor that does not answer."""
        # Set when the supervisor wants the ranks to end for the next generation
        self.asked_to_pause = threading.Event()
        self._connection: socket.socket | None = None
        # Several threads send, and their lines must not mix
        self._sending = threading.Lock()
        handshake, message = supervised.handshake(PROTOCOL), {"rank": 0, "size": size}
        try:
            self._connection, _ = handshake.connect(
                supervised.places, message, DIAL_SECONDS, DIAL_SECONDS
            )
        except ConnectionError as error:
            log.warning(
                "The supervisor of this run cannot say how far the run is, and no host can join: "
                "%s.",
                error,
            )
            return
        self._connection.settimeout(None)  # `_listen` waits for the whole run
        threading.Thread(target=self._listen, name="tfcommx-link", daemon=True).start()

    def say(self, **message: object) -> None:
        """Send a message to the supervisor; without effect if it has ended."""
        with self._sending, contextlib.suppress(OSError):
            if self._connection is not None:
                line = json.dumps(message).encode() + b"\n"
                # Without SIGPIPE, which would end a rank whose script has restored the default
                self._connection.sendall(line, socket.MSG_NOSIGNAL)

    def _listen(self) -> None:
        assert self._connection is not None
        with contextlib.suppress(*NO_PARTNER), self._connection.makefile("rb") as lines:
            while line := lines.readline(LARGEST_MESSAGE):
                if "pause" in json.loads(line):
                    self.asked_to_pause.set()


@functools.cache
def supervisor_link(supervised: Supervision, size: int) -> SupervisorLink:
    """Return the connection of this process, which all calls of `fit` share."""
    return SupervisorLink(supervised, size)

"""The supervisor's end of its connection to rank 0 of a generation.

Rank 0 finds it by what the supervisor puts into the environment of all ranks:

    TFCOMMX_RUN                  16 hexadecimal digits, the same for all generations
    TFCOMMX_GENERATION           0, 1, ...
    TFCOMMX_SUPERVISOR           addresses of the supervisor's host, best first, and the port:
                                 10.0.0.1,127.0.0.1:40123
    TFCOMMX_SUPERVISOR_SECRET    another one for each run

Both prove that they know the secret (comm/challenge.py): protocol `tfcommx supervisor 1`, context
run and generation, as they stand in the environment. Rank 0 says `{"rank": 0, "size": n}`, and is
answered `{"ok": true}`. Then lines of JSON, in which `total` counts the steps since the beginning
of the whole run:

    rank 0 -> supervisor                                      when
    {"resumed": {"from": "memory" | "file" | "start",         once, before the first step
                 "epoch": e, "step": s, "total": t, "seconds": x}}
    {"steps": t}                                              at most 20 times a second
    {"snapshot": {"total": t, "seconds": x, "bytes": b}}      after each snapshot in memory
    {"epoch_ended": e}                                        after each epoch
    {"leaving": "node2"}                                      a rank there has got SIGTERM

    supervisor -> rank 0
    {"pause": "growth"}                                       the ranks save, and all end with
                                                              status 75: start them again

After `leaving` the ranks end with status 75, too. A program that does not connect is supervised as
well: nothing is known of its steps.
"""

from __future__ import annotations

import contextlib
import json
import secrets
import socket
from collections.abc import Callable
from typing import Any

from tfcommx.comm.challenge import LARGEST_MESSAGE, NO_PARTNER, Caller, Handshake
from tfcommx.comm.entrance import Entrance
from tfcommx.comm.liveness import listen
from tfcommx.comm.supervision import PROTOCOL

# For a caller to prove who it is
HANDSHAKE_SECONDS = 5.0
# At once that have not proven it: rank 0 alone calls
CALLERS = 16


class RunSecret:
    """What the ranks of a run, and nobody else, know of the supervisor."""

    def __init__(self) -> None:
        self.run = secrets.token_hex(8)
        self.secret = secrets.token_hex(16)


class Link:
    """Listens for rank 0 of one generation, and for what it says.

    Args:
        ours: name and secret of the run.
        generation: its number.
        heard: called with each message, in a thread of this link.
        interfaces: network interfaces that the ranks use; empty: any.
        local: whether all ranks are on this host; then nobody else can connect.
    """

    def __init__(
        self,
        ours: RunSecret,
        generation: int,
        heard: Callable[[dict[str, Any]], None],
        interfaces: list[str],
        local: bool,
    ) -> None:
        self._heard = heard
        self._handshake = Handshake(ours.secret, PROTOCOL, (ours.run, str(generation)))
        self._listening, places = listen(interfaces, local)
        self._rank_0: socket.socket | None = None
        self.variables = {
            "TFCOMMX_RUN": ours.run,
            "TFCOMMX_GENERATION": str(generation),
            "TFCOMMX_SUPERVISOR": f"{','.join(places)}:{self._listening.getsockname()[1]}",
            "TFCOMMX_SUPERVISOR_SECRET": ours.secret,
        }
        self._entrance = Entrance(
            self._listening, self._handshake, HANDSHAKE_SECONDS, self._hear, CALLERS
        )

    def pause(self, reason: str) -> bool:
        """Ask the ranks to save and end; return whether rank 0 is there to be asked."""
        try:
            if self._rank_0 is None:
                return False
            line = json.dumps({"pause": reason}).encode() + b"\n"
            self._rank_0.sendall(line, socket.MSG_NOSIGNAL)
        except OSError:
            return False
        return True

    def close(self) -> None:
        """Stop listening; the generation has ended."""
        self._entrance.close()
        if self._rank_0 is not None:
            with contextlib.suppress(OSError):
                self._rank_0.shutdown(socket.SHUT_RDWR)  # Wakes the thread that waits there
            self._rank_0.close()

    def _hear(self, caller: Caller) -> None:
        """Pass on what a caller says, if it is rank 0, until it ends."""
        connection = caller.connection
        with connection, contextlib.suppress(*NO_PARTNER):
            if caller.said["rank"] != 0:
                caller.answer({"ok": False})
                return
            caller.answer({"ok": True})
            connection.settimeout(None)
            self._rank_0 = connection
            self._heard({"connected": caller.said})
            with connection.makefile("rb") as lines:
                while line := lines.readline(LARGEST_MESSAGE):
                    message = json.loads(line)
                    if isinstance(message, dict):
                        self._heard(message)

"""Generation: one start of the ranks, up to their end, and the decision to continue after it.

The supervisor observes it by a connection to rank 0. Rank 0 finds the supervisor by variables that
the supervisor sets in the environment of all ranks:

    TFCOMMX_RUN                  16 hexadecimal digits, the same for all generations
    TFCOMMX_GENERATION           0, 1, ...
    TFCOMMX_SUPERVISOR           addresses of the supervisor's host, best first, and the port:
                                 10.0.0.1,127.0.0.1:40123
    TFCOMMX_SUPERVISOR_SECRET    different for each run

Both prove that they know the secret (launch/handshake.py): protocol `tfcommx supervisor 1`, context
run and generation, as in the environment. Rank 0 sends `{"rank": 0, "size": n}`, and the answer is
`{"ok": true}`. Lines of JSON follow, in which `total` counts the steps since the beginning of the
whole run:

    rank 0 -> supervisor                                      when
    {"resumed": {"from": "memory" | "file" | "start",         before the first step of a `fit`
                 "epoch": e, "step": s, "total": t, "seconds": x}}
    {"steps": t}                                              at most 20 times a second
    {"snapshot": {"total": t, "seconds": x, "bytes": b}}      after each snapshot in memory
    {"epoch_ended": e}                                        after each epoch
    {"leaving": "node2"}                                      a rank there has received SIGTERM

    supervisor -> rank 0
    {"pause": "growth"}                                       the ranks save, and all end with
                                                              status 75: start them again

After `leaving` the ranks end with status 75, too. A program that does not connect is supervised
without its number of steps.
"""

from __future__ import annotations

import contextlib
import json
import re
import secrets
import signal
import socket
import threading
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from tfcommx.launch.handshake import LARGEST_MESSAGE, NO_PARTNER, Caller, Entrance, Handshake
from tfcommx.launch.horovodrun import Launch
from tfcommx.launch.hosts import Host, slots_of
from tfcommx.launch.rank_output import Failure, RankLines
from tfcommx.launch.supervision import PAUSED, PROTOCOL
from tfcommx.watch.liveness import listen

# Limit on consecutive generations that die at the same step
DEATHS = 3
# A generation without a link that ends earlier has not got beyond its start
START_SECONDS = 60.0
# Largest delay of rank 0's report of its steps
REPORT_SECONDS = 1.0
# Exit status of ssh when the connection is lost
SSH_LOST = 255
# Parts of a watcher's report of missing ranks
SILENT = re.compile(r"rank (\d+) on \S+ \(no response")
CUT_OFF = "it may have been cut off"

# Status of ranks that Gloo aborts after they have noticed that another has ended
ABORTED = 128 + signal.SIGABRT
# Largest delay, over ssh, of the end of a rank that failed independently of the first; ranks that
# horovodrun ends receive SIGKILL later
SEEN_SECONDS = 3.0


def first_failure(lines: RankLines) -> Failure | None:
    """Return the rank that failed first, instead of a rank that Gloo aborted, if it is known."""
    first = lines.failure()
    if first is None or first.status != ABORTED:
        return first
    soon = [
        failure
        for when, failure in lines.endings
        if when - lines.endings[0][0] < SEEN_SECONDS
        and failure.status not in (ABORTED, 128 + signal.SIGTERM)
    ]
    return soon[0] if soon else first


class Ending(NamedTuple):
    """The causes for the end of a generation."""

    # The rank that ended first; None if the launcher does not report it
    first: Failure | None
    # True if the ranks were asked to pause, or a host leaves
    asked: bool = False
    # Reports of ranks about missing ranks
    reports: Sequence[str] = ()
    # Hosts that do not answer, and hosts that have announced that they leave
    dead: Collection[str] = ()
    leaving: Collection[str] = ()

    @property
    def paused(self) -> bool:
        """True if the ranks have saved, and request a restart."""
        return self.asked and self.first is not None and self.first.status == PAUSED

    def silent(self, launch: Launch) -> dict[int, str]:
        """Return silent rank -> its host; empty if a host does not answer, or after a pause."""
        # A rank that was cut off reports the ranks that work
        reports = [text for text in self.reports if CUT_OFF not in text] or self.reports
        ranks = sorted({int(rank) for text in reports for rank in SILENT.findall(text)})
        host_by_rank = {rank: launch.host_of(rank) for rank in ranks if rank < launch.size}
        return {} if self.dead or self.paused else host_by_rank

    def what_was_lost(self, launch: Launch) -> str:
        """Return a description of the loss, as the beginning of a sentence."""
        if self.paused:
            if self.leaving:
                return f"{', '.join(sorted(self.leaving))} leaves (SIGTERM)"
            return "All ranks have saved and paused"
        if self.dead:
            return "; ".join(_host_with_ranks(host, launch) for host in self.dead)
        if silent := self.silent(launch):
            names = ", ".join(f"rank {rank} on {host}" for rank, host in silent.items())
            return f"No response from {names}: stopped, or cut off"
        if self.first is None and self.reports:  # mpirun names none with --enable-recovery
            text, end, _ = self.reports[0].partition(").")
            return f"R{text[1:]}{end[:1]}"
        if self.first is None:
            return "The launcher ended, and does not say which rank was the first"
        where = f"rank {self.first.rank} on {launch.host_of(self.first.rank)}"
        if self.first.status == SSH_LOST:
            return f"The connection to {where} was lost"
        return f"R{where[1:]} {self.first.how()}"


def _host_with_ranks(host: str, launch: Launch) -> str:
    ranks = [rank for rank in range(launch.size) if launch.host_of(rank) == host]
    shown = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {ranks[0]} to {ranks[-1]}"
    return f"{host} with {shown} does not answer"


class Deaths:
    """Counts generations that died without progress, which indicates an error in the program."""

    def __init__(self) -> None:
        self.count = 0
        self._furthest, self._unsaid = -1, 0.0

    def add(self, generation: Generation) -> bool:
        """Count a generation in which no host was lost; return True if the limit is reached."""
        self.count = 1 if self._got_further(generation) else self.count + 1
        return self.count >= DEATHS

    def _got_further(self, generation: Generation) -> bool:
        if not generation.linked:
            return generation.ended - generation.began >= START_SECONDS
        if generation.steps is None:
            return False
        # Rank 0 may have died before it reported its last steps, so that the next generation seems
        # to get further at the same step
        unsaid = (generation.steps_per_second or 0.0) * REPORT_SECONDS
        self._unsaid = max(self._unsaid, unsaid)
        before, self._furthest = self._furthest, max(self._furthest, generation.steps)
        return before < 0 or generation.steps > before + self._unsaid

    def in_words(self, generation: Generation) -> str:
        """Return a sentence with the number of deaths and their step."""
        if not generation.linked:
            where = f"within {START_SECONDS:g} s of their start"
        elif self._furthest < 0:
            where = "before their first step"
        else:
            where = f"at step {self._furthest}"
        return f"{self.count} generations have ended {where}: the program fails by itself."


# Time limit for a caller's proof
HANDSHAKE_SECONDS = 5.0
# Limit on concurrent unproven callers; low, because only rank 0 calls
CALLERS = 16


class RunSecret:
    """Name and secret of a run, known only to its ranks and the supervisor."""

    def __init__(self) -> None:
        self.run = secrets.token_hex(8)
        self.secret = secrets.token_hex(16)


class RankZeroListener:
    """Listens for rank 0 of one generation, and receives its messages.

    Args:
        generation: number of the generation, >= 0.
        heard: called with each message, in a thread of this link.
        interfaces: network interfaces that the ranks use; empty: any.
        local: True if all ranks are on this host; other hosts then cannot connect.
    """

    def __init__(
        self,
        run_secret: RunSecret,
        generation: int,
        heard: Callable[[dict[str, Any]], None],
        interfaces: list[str],
        local: bool,
    ) -> None:
        self._heard = heard
        # The generation is a part of the proof, because a rank of an earlier one may still live
        handshake = Handshake(run_secret.secret, PROTOCOL, (run_secret.run, str(generation)))
        self._listening, places = listen(interfaces, local)
        self._rank_0: socket.socket | None = None
        # Guards `_rank_0` and `_closed`, because a caller may prove itself while this closes
        self._lock, self._closed = threading.Lock(), False
        self.variables = {
            "TFCOMMX_RUN": run_secret.run,
            "TFCOMMX_GENERATION": str(generation),
            "TFCOMMX_SUPERVISOR": f"{','.join(places)}:{self._listening.getsockname()[1]}",
            "TFCOMMX_SUPERVISOR_SECRET": run_secret.secret,
        }
        self._entrance = Entrance(
            self._listening, handshake, HANDSHAKE_SECONDS, self._hear, CALLERS
        )

    def pause(self, reason: str) -> bool:
        """Ask the ranks to save and end; return True if the request was sent to rank 0."""
        try:
            if self._rank_0 is None:
                return False
            line = json.dumps({"pause": reason}).encode() + b"\n"
            self._rank_0.sendall(line, socket.MSG_NOSIGNAL)
        except OSError:
            return False
        return True

    def close(self) -> None:
        self._entrance.close()
        with self._lock:
            self._closed = True
        if self._rank_0 is not None:
            with contextlib.suppress(OSError):
                self._rank_0.shutdown(socket.SHUT_RDWR)  # Wakes the thread that reads from it
            self._rank_0.close()

    def _hear(self, caller: Caller) -> None:
        """Forward a caller's messages, if it is rank 0, until it ends."""
        connection = caller.connection
        with connection, contextlib.suppress(*NO_PARTNER):
            if caller.said["rank"] != 0:
                caller.answer({"ok": False})
                return
            caller.answer({"ok": True})
            # Without a limit, because rank 0 may have nothing to say for long
            connection.settimeout(None)
            with self._lock:
                if self._closed:  # Its generation has ended
                    return
                self._rank_0 = connection
            self._heard({"connected": caller.said})
            with connection.makefile("rb") as lines:
                # Up to a limit, so that a line without an end cannot fill the memory
                while line := lines.readline(LARGEST_MESSAGE):
                    message = json.loads(line)
                    if isinstance(message, dict):
                        self._heard(message)


class Resumed(NamedTuple):
    """The state from which a generation continues, as reported by rank 0."""

    # "memory", "file" or "start"
    source: str
    # Steps since the beginning of the whole run
    total: int
    # Seconds for restoring
    seconds: float


@dataclass
class Generation:
    """One start of the ranks.

    Times are seconds of one clock. The steps are known only with a link to rank 0.
    """

    number: int
    hosts: tuple[Host, ...]
    began: float
    linked: bool = False
    resumed: Resumed | None = None
    # First and last number of steps that rank 0 has reported, and the times of the reports
    first_steps: int = 0
    steps: int | None = None
    first_step_at: float = 0.0
    last_step_at: float = 0.0
    # Seconds and bytes of each snapshot in memory
    snapshots: list[tuple[float, int]] = field(default_factory=list)
    # Hosts with a rank that has received SIGTERM
    leaving: list[str] = field(default_factory=list)
    # True if the supervisor has asked for its end
    asked_to_pause: bool = False
    ended: float = 0.0
    # Description of its end
    how: str = ""

    @property
    def ranks(self) -> int:
        return slots_of(self.hosts)

    def hear(self, message: dict[str, Any], time_now: float) -> str:
        """Record a message of rank 0.

        Returns:
            "first step" if it reports the first step, "epoch" if an epoch has ended, otherwise "".

        **Raises:** KeyError, TypeError or ValueError for a malformed message.
        """
        if "connected" in message:
            self.linked = True
        elif "resumed" in message:
            content = message["resumed"]
            resumed = Resumed(
                str(content["from"]), int(content["total"]), float(content["seconds"])
            )
            # Not of a later `fit` of the script, which continues from the steps before it
            if self.steps is None:
                self.resumed = resumed
        elif "steps" in message:
            return self._count(int(message["steps"]), time_now)
        elif "snapshot" in message:
            content = message["snapshot"]
            self.snapshots.append((float(content["seconds"]), int(content["bytes"])))
            return self._count(int(content["total"]), time_now)
        elif "leaving" in message:
            self.leaving.append(str(message["leaving"]))
        elif "epoch_ended" in message:
            return "epoch"
        return ""

    def _count(self, total: int, time_now: float) -> str:
        if total <= self.began_at_step:  # No step of this generation yet
            return ""
        first = self.steps is None
        if first:
            self.first_steps, self.first_step_at = total, time_now
        self.steps, self.last_step_at = max(total, self.steps or 0), time_now
        return "first step" if first else ""

    @property
    def began_at_step(self) -> int:
        """Steps of the run before this generation."""
        return self.resumed.total if self.resumed else 0

    @property
    def steps_taken(self) -> int:
        """Steps of this generation, as far as rank 0 has reported."""
        return 0 if self.steps is None else self.steps - self.began_at_step

    @property
    def training_seconds(self) -> float:
        """Seconds between its first and its last known step."""
        return self.last_step_at - self.first_step_at

    @property
    def steps_per_second(self) -> float | None:
        """Rate of this generation; None before it is known."""
        if self.steps is None or self.steps == self.first_steps:
            return None
        return (self.steps - self.first_steps) / max(self.training_seconds, 1e-3)

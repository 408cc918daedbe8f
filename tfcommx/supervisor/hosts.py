"""Hosts: those of a run that may be used now, and how many ranks each of them gets.

A host may be used if it is named, by the user or by what the user's script prints, has not been
lost lately or said that it leaves (`Cooldown`), and answers.

To add a way to find hosts: a class with `hosts()`, and a word in cli/restart_options.py.
"""

from __future__ import annotations

import math
import socket
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from tfcommx.core import ConfigurationError, LaunchError
from tfcommx.launch.commands import RemoteHosts, is_local, run_to_end
from tfcommx.launch.hosts import Host, merge, parse_hosts

# Of --blacklist-cooldown-range and --elastic-timeout
COOLDOWN_SECONDS = (60.0, 3600.0)
TIMEOUT_SECONDS = 600.0


@dataclass(frozen=True)
class SupervisorOptions:
    """Limits of a supervised run.

    **Raises:** ConfigurationError for values out of their ranges.
    """

    # Ranks of a generation, >= 1
    fewest: int = 1
    # At most; None: as many as the hosts have slots
    most: int | None = None
    # For the first generation, >= fewest
    first: int = 1
    # Generations after the first one, >= 0; None: any number
    reset_limit: int | None = None
    # Seconds that a lost host is left out: the first time, and at most
    cooldown: tuple[float, float] = COOLDOWN_SECONDS
    # Seconds to wait for enough hosts, >= 0
    timeout: float = TIMEOUT_SECONDS
    # Minutes after which a generation may be ended to grow, > 0; None: at the end of an epoch only
    grow_every: float | None = None
    # Where the table of generations is written as JSON
    file: Path | None = None
    # Network interfaces of the ranks; empty: any
    interfaces: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Check them."""
        if self.most is not None and self.most < self.fewest:
            raise ConfigurationError(
                "--max-np must be at least --min-np. Received "
                f"--max-np {self.most} and --min-np {self.fewest}."
            )
        shortest, longest = self.cooldown
        if not 0 < shortest <= longest < math.inf:
            raise ConfigurationError(
                "--blacklist-cooldown-range must be two numbers of seconds, 0 < shortest <= "
                f"longest. Received {shortest:g} and {longest:g}."
            )


# For the script to end
SCRIPT_SECONDS = 60.0


class HostSource(Protocol):
    """Knows which hosts there are now."""

    # Who says so, for messages
    name: str

    def hosts(self) -> list[Host]:
        """Return the hosts with their slots.

        **Raises:** ConfigurationError if they cannot be found.
        """
        ...


class FixedHosts:
    """The hosts of -H, of a hostfile, or of the allocation; always the same."""

    def __init__(self, hosts: Sequence[Host], name: str) -> None:
        self.name, self._hosts = name, list(hosts)

    def hosts(self) -> list[Host]:
        """Return them."""
        return list(self._hosts)


class ScriptHosts:
    """The hosts that a script prints, as for horovodrun: a line each, `node1:4` or `node1`.

    Args:
        script: a command line, given to the shell.
        slots: of a host that is printed without a number; None: each needs a number.
    """

    def __init__(self, script: str, slots: int | None = None) -> None:
        self.name, self._slots = script, slots

    def hosts(self) -> list[Host]:
        """Run the script. **Raises:** ConfigurationError if it fails, or prints what is no host."""
        done = run_to_end(self.name, SCRIPT_SECONDS)
        if done.late:
            raise self._refusal(f"no end within {SCRIPT_SECONDS:g} s")
        if done.status:
            said = done.errors.strip().splitlines()[-1:]
            raise self._refusal(" ".join([f"status {done.status}", *said]))
        return self._read(done.output)

    def _read(self, printed: str) -> list[Host]:
        found = []
        for word in printed.split():
            try:
                (host,) = parse_hosts(word, "the script")
            except ConfigurationError as error:
                raise self._refusal(str(error)) from None
            if ":" not in word and self._slots is None:
                raise self._refusal(f"{word!r} without a number, and no --slots")
            found.append((host.name, host.slots if ":" in word else self._slots or 1))
        return merge(found, self.name)

    def _refusal(self, received: str) -> ConfigurationError:
        return ConfigurationError(
            "The host discovery script must print the hosts, a line each, such as node1:4, and "
            f"end with status 0. Received from `{self.name}`: {received}."
        )


# A host that says that it goes still answers for a while
LEAVING_SECONDS = 300.0


class Cooldown:
    """Leaves hosts out, for longer each time.

    A host comes back after its time, or as soon as discovery names it again after it did not.

    Args:
        shortest: seconds, the first time, > 0.
        longest: seconds at most; each time doubles the time before.
        clock: returns seconds.
    """

    def __init__(
        self, shortest: float, longest: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._range, self._clock = (shortest, longest), clock
        self._times: dict[str, int] = {}
        self._until: dict[str, float] = {}
        self._unnamed: set[str] = set()

    def leave_out(self, host: str, at_least: float = 0.0) -> float:
        """Leave a host out; return for how many seconds."""
        shortest, longest = self._range
        before = self._times.get(host, 0)
        seconds = max(at_least, min(longest, shortest * 2.0 ** min(before, 30)))
        self._times[host] = before + 1
        self._until[host] = self._clock() + seconds
        return seconds

    def allowed(self, named: Collection[str]) -> set[str]:
        """Return which of the hosts that discovery names now may be used."""
        for host in self._unnamed & set(named):
            self._until.pop(host, None)
        self._unnamed = {host for host in self._until if host not in named}
        return {host for host in named if self._clock() >= self._until.get(host, 0.0)}


# Hosts in a line
SHOWN = 6


def slots_of(hosts: Iterable[Host]) -> int:
    """Return how many ranks these hosts take."""
    return sum(host.slots for host in hosts)


def place(offered: Iterable[Host], before: Iterable[Host], most: int | None) -> list[Host]:
    """Return the hosts of the next generation, with a slot for every rank to start there.

    Hosts of the generation before come first, in their order, so that rank 0 stays where it is.

    Args:
        offered: hosts that may be used, with their slots.
        before: hosts of the generation before.
        most: ranks at most; None: any number.

    >>> place([Host("new", 2), Host("a", 2), Host("b", 2)], [Host("a", 2)], 3)
    [Host(name='a', slots=2), Host(name='new', slots=1)]
    """
    names = [host.name for host in before]
    first = {name: number for number, name in enumerate(names)}
    chosen: list[Host] = []
    for host in sorted(offered, key=lambda host: first.get(host.name, len(first))):
        free = host.slots if most is None else min(host.slots, most - slots_of(chosen))
        if free > 0:
            chosen.append(Host(host.name, free))
    return chosen


def in_words(hosts: Iterable[Host]) -> str:
    """Return hosts as -H has them; of many the first ones.

    >>> in_words([Host("node0", 2), Host("node1", 1)])
    'node0:2,node1:1'
    """
    words = [f"{host.name}:{host.slots}" for host in hosts]
    more = f",... ({len(words)} hosts)" if len(words) > SHOWN else ""
    return ",".join(words[:SHOWN]) + more


# Between two looks at the hosts while there are too few
WAIT_SECONDS = 2.0


def host_named(name: str, hosts: Sequence[Host]) -> str | None:
    """Return the host that a rank calls `name`, which may be longer or shorter than in -H.

    >>> host_named("node1.example.org", [Host("node0", 1), Host("node1", 1)])
    'node1'
    """
    own = name == socket.gethostname()
    for fits in (
        lambda host: host == name,
        lambda host: host.split(".")[0] == name.split(".")[0],
        lambda host: own and is_local(host),
    ):
        for host in hosts:
            if fits(host.name):
                return host.name
    return None


class Hosts:
    """Chooses the hosts of the next generation.

    Args:
        source: names the hosts.
        options: how many ranks there may be, and how long to wait.
        remote: how other hosts are reached.
        say: prints a line for the user.
    """

    def __init__(
        self,
        source: HostSource,
        options: SupervisorOptions,
        remote: RemoteHosts,
        say: Callable[[str], None],
    ) -> None:
        self._source, self._options, self._say = source, options, say
        self.remote = remote
        self._cooldown = Cooldown(*options.cooldown)
        self._named: list[Host] = []
        self._leaving: set[str] = set()
        self._refusal = ""

    def leave_out(self, host: str) -> None:
        """Leave a host out for a while: it does not answer."""
        self._leaving.discard(host)
        self._say(f"{host} is left out for {self._cooldown.leave_out(host):.0f} s.")

    def let_leave(self, host: str) -> None:
        """Leave a host out that will be taken away, unless there are too few others."""
        self._cooldown.leave_out(host, LEAVING_SECONDS)
        self._leaving.add(host)

    def offered(self) -> list[Host]:
        """Return the hosts that may be used, with their slots; they need not answer.

        **Raises:** ConfigurationError if none were ever found; later those found last are returned.
        """
        try:
            self._named, self._refusal = self._source.hosts(), ""
        except ConfigurationError as error:
            if not self._named:
                raise
            if str(error) != self._refusal:
                self._say(f"{error} The hosts found before stay.")
            self._refusal = str(error)
        allowed = self._cooldown.allowed([host.name for host in self._named])
        self._leaving -= allowed
        found = [host for host in self._named if host.name in allowed]
        if slots_of(found) < self._options.fewest:
            found += [host for host in self._named if host.name in self._leaving]
        return found

    def answering(self, hosts: Collection[str], command: Sequence[str] = ("true",)) -> set[str]:
        """Return which hosts carry out a command; this host does."""
        others = [host for host in hosts if not is_local(host)]
        return {*hosts} - {*others} | set(self.remote.run(others, command))

    def wait(
        self,
        fewest: int,
        before: Sequence[Host],
        answered: Collection[str],
        asked: Callable[[], bool],
    ) -> list[Host]:
        """Return the hosts of the next generation, once they have enough slots.

        Args:
            fewest: ranks.
            before: hosts of the generation before.
            answered: hosts that have answered just now.
            asked: tells whether the run shall end; the hosts are then of no use.

        **Raises:** LaunchError if there are too few within the options' time.
        """
        answered, waiting = set(answered), False
        end = time.monotonic() + self._options.timeout
        while True:
            hosts = place(self.offered(), before, self._options.most)
            asking = {host.name for host in hosts} - answered
            silent = asking - self.answering(asking)
            answered |= asking - silent
            for host in sorted(silent):
                self._say(f"{host} does not answer ssh.")
                self.leave_out(host)
            if asked() or (not silent and slots_of(hosts) >= fewest):
                return hosts
            if silent:
                continue
            slots = slots_of(hosts)
            found = f"{slots} slot{'s' * (slots != 1)}"
            found += f" ({in_words(hosts)})" if hosts else ""
            if time.monotonic() >= end:
                raise LaunchError(
                    f"{fewest} ranks are required. {self._source.name} and the hosts' state gave "
                    f"{found} within {self._options.timeout:g} s. Lower --min-np, or raise "
                    "--elastic-timeout.",
                    1,
                )
            if not waiting:
                waiting = True
                self._say(
                    f"{fewest} ranks are required. The hosts have {found}. Waiting for more, for "
                    f"{self._options.timeout:g} s at most."
                )
            time.sleep(WAIT_SECONDS)

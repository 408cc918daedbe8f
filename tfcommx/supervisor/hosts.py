"""Choose the hosts of each generation of a run, and the number of ranks on each.

A host may be used if the user or the output of the user's script names it, if it was not lost
recently and has not announced that it leaves (`Cooldown`), and if it answers.

To add a source of hosts, make a `HostSource` in cli/restart_options.py.
"""

import math
import socket
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from tfcommx.core import ConfigurationError, LaunchError, check_number
from tfcommx.launch.commands import RemoteHosts, is_local, run_to_end
from tfcommx.launch.hosts import Host, first_slots, merge, parse_host, slots_of

# Defaults of --blacklist-cooldown-range and --elastic-timeout
COOLDOWN_SECONDS = (60.0, 3600.0)
TIMEOUT_SECONDS = 600.0


@dataclass(frozen=True)
class SupervisorOptions:
    """Limits of a supervised run.

    **Raises:** ConfigurationError for values out of their ranges.
    """

    # Least number of ranks of a generation, >= 1
    fewest: int = 1
    # Largest number of ranks; None: the number of slots
    most: int | None = None
    # Least number of ranks of the first generation, >= fewest, <= most
    first: int = 1
    # Generations after the first one, >= 0; None: any number
    reset_limit: int | None = None
    # Seconds that a lost host is left out: the first time, and the maximum
    cooldown: tuple[float, float] = COOLDOWN_SECONDS
    # Seconds to wait for enough hosts, >= 0
    timeout: float = TIMEOUT_SECONDS
    # Minutes between two looks for new hosts, > 0; None: only at the end of an epoch
    grow_every: float | None = None
    # File for the table of generations, as JSON
    file: Path | None = None
    # Network interfaces of the ranks; empty: any
    interfaces: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name, ranks in (("--min-np", self.fewest), ("-np", self.first)):
            if self.most is not None and self.most < ranks:
                raise ConfigurationError(
                    f"--max-np, by default -np, must be at least {name}. Received --max-np "
                    f"{self.most} and {name} {ranks}."
                )
        if self.grow_every is not None:
            check_number("--grow-every", self.grow_every, "> 0")
        shortest, longest = self.cooldown
        if not 0 < shortest <= longest < math.inf:
            raise ConfigurationError(
                "--blacklist-cooldown-range must be two numbers of seconds, 0 < shortest <= "
                f"longest. Received {shortest:g} and {longest:g}."
            )


# Time limit of the script
SCRIPT_SECONDS = 60.0


class HostSource(NamedTuple):
    """Source of the hosts that are available now."""

    # For messages
    name: str
    # Returns the hosts with their slots. **Raises:** ConfigurationError if they cannot be found
    hosts: Callable[[], list[Host]]


def hosts_of_script(script: str, slots: int | None = None) -> list[Host]:
    """Run a host discovery script, as for horovodrun; it prints a line each, `node1:4` or `node1`.

    Args:
        script: a command line, given to the shell.
        slots: number for a host that is printed without one; None: each needs a number.

    **Raises:** ConfigurationError if it fails, or for an invalid host.
    """
    pairs = []
    try:
        done = run_to_end(script, SCRIPT_SECONDS)
        if done.late:
            raise ConfigurationError(f"no end within {SCRIPT_SECONDS:g} s")
        if done.status:
            last_line = done.errors.strip().splitlines()[-1:]
            raise ConfigurationError(" ".join([f"status {done.status}", *last_line]))
        for word in done.output.split():
            name, printed = parse_host(word, "the script")
            if ":" not in word and slots is None:
                raise ConfigurationError(f"{word!r} without a number, and no --slots")
            pairs.append((name, printed if ":" in word else slots or 1))
    except ConfigurationError as error:
        raise ConfigurationError(
            "The host discovery script must print the hosts, a line each, such as node1:4, and "
            f"end with status 0. Received from `{script}`: {str(error).removesuffix('.')}."
        ) from None
    return merge(pairs, script)


# Cooldown of a host that has announced that it leaves, because it still answers for a while
LEAVING_SECONDS = 300.0


class Cooldown:
    """Leaves hosts out, for longer each time.

    A host may be used again after its time, or as soon as discovery names it after an absence.

    Args:
        shortest: seconds for the first time, > 0.
        longest: largest number of seconds; each time doubles the previous one.
    """

    def __init__(
        self, shortest: float, longest: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._range, self._clock = (shortest, longest), clock
        self._times: dict[str, int] = {}
        self._until: dict[str, float] = {}
        self._unnamed: set[str] = set()

    def leave_out(self, host: str, at_least: float = 0.0) -> float:
        """Leave a host out; return the seconds, >= `at_least`."""
        shortest, longest = self._range
        before = self._times.get(host, 0)
        # At most 2^30, because a power of a float beyond its range raises an error
        seconds = max(at_least, min(longest, shortest * 2.0 ** min(before, 30)))
        self._times[host] = before + 1
        self._until[host] = self._clock() + seconds
        return seconds

    def allowed(self, named: Collection[str]) -> set[str]:
        """Return the subset of the hosts named by discovery that may be used."""
        # A host that was absent from the list, and is named again, has probably been repaired
        for host in self._unnamed & set(named):
            self._until.pop(host, None)
        self._unnamed = {host for host in self._until if host not in named}
        return {host for host in named if self._clock() >= self._until.get(host, 0.0)}


# Limit on the hosts in a line
SHOWN = 6


def place(offered: Iterable[Host], before: Iterable[Host], most: int | None) -> list[Host]:
    """Return the hosts of the next generation, with a slot for every rank to start there.

    Hosts of the previous generation are first, in their order, so that rank 0 does not move.

    Args:
        most: largest number of ranks; None: any number.

    >>> place([Host("new", 2), Host("a", 2), Host("b", 2)], [Host("a", 2)], 3)
    [Host(name='a', slots=2), Host(name='new', slots=1)]
    """
    names = [host.name for host in before]
    first = {name: number for number, name in enumerate(names)}
    # New hosts stay in the order of discovery, because the sort is stable
    in_order = sorted(offered, key=lambda host: first.get(host.name, len(first)))
    return in_order if most is None else first_slots(in_order, most)


def in_words(hosts: Iterable[Host]) -> str:
    """Return hosts in the format of -H; the first ones if there are many.

    >>> in_words([Host("node0", 2), Host("node1", 1)])
    'node0:2,node1:1'
    """
    words = [f"{host.name}:{host.slots}" for host in hosts]
    suffix = f",... ({len(words)} hosts)" if len(words) > SHOWN else ""
    return ",".join(words[:SHOWN]) + suffix


# Period of checking the hosts while there are too few
WAIT_SECONDS = 2.0


def host_named(name: str, hosts: Sequence[Host]) -> str | None:
    """Return the host that a rank calls `name`, whose domain may differ from -H.

    >>> host_named("node1.example.org", [Host("node0", 1), Host("node1", 1)])
    'node1'
    """
    is_this_host = name == socket.gethostname()
    for fits in (
        lambda host: host == name,
        lambda host: host.split(".")[0] == name.split(".")[0],
        lambda host: is_this_host and is_local(host),
    ):
        for host in hosts:
            if fits(host.name):
                return host.name
    return None


class Hosts:
    """Chooses the hosts of the next generation."""

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
        """Leave out a host that does not answer, for a while."""
        self._leaving.discard(host)
        self._say(f"{host} is left out for {self._cooldown.leave_out(host):.0f} s.")

    def let_leave(self, host: str) -> None:
        """Leave out a host that will be taken away, unless there are too few others."""
        self._cooldown.leave_out(host, LEAVING_SECONDS)
        self._leaving.add(host)

    def offered(self) -> list[Host]:
        """Return the hosts that may be used, with their slots; they need not answer.

        **Raises:** ConfigurationError if none were ever found; later the last ones are returned.
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
        usable = [host for host in self._named if host.name in allowed]
        if slots_of(usable) < self._options.fewest:
            usable += [host for host in self._named if host.name in self._leaving]
        return usable

    def answering(self, hosts: Collection[str], command: Sequence[str] = ("true",)) -> set[str]:
        """Return the hosts that carry out a command; always including this host."""
        # Without ssh to this host, which horovodrun does not need either
        remote_hosts = [host for host in hosts if not is_local(host)]
        return {*hosts} - {*remote_hosts} | set(self.remote.run(remote_hosts, command))

    def wait(
        self,
        fewest: int,
        before: Sequence[Host],
        answered: Collection[str],
        end_requested: Callable[[], bool],
    ) -> list[Host]:
        """Return the hosts of the next generation, once they have enough slots.

        Args:
            answered: hosts that have just answered.
            end_requested: returns True if the run must end; the result is then not used.

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
            if end_requested() or (not silent and slots_of(hosts) >= fewest):
                return hosts
            # Placed again without a pause, because other hosts may take the places of the silent
            # ones
            if silent:
                continue
            slots = slots_of(hosts)
            available = f"{slots} slot{'s' * (slots != 1)}"
            available += f" ({in_words(hosts)})" if hosts else ""
            if time.monotonic() >= end:
                raise LaunchError(
                    f"{fewest} ranks are required. {self._source.name} and the hosts' state gave "
                    f"{available} within {self._options.timeout:g} s. Lower --min-np, or raise "
                    "--elastic-timeout.",
                    1,
                )
            if not waiting:
                waiting = True
                self._say(
                    f"{fewest} ranks are required. The hosts have {available}. Waiting for more, "
                    f"for {self._options.timeout:g} s at most."
                )
            time.sleep(WAIT_SECONDS)

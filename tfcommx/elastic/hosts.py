"""Which hosts may be used now: those that are named, have not been lost lately, and answer."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Collection, Sequence

from tfcommx.comm.allocation import Host
from tfcommx.comm.horovodrun import LaunchError
from tfcommx.comm.remote_hosts import RemoteHosts, is_local
from tfcommx.elastic.cooldown import LEAVING_SECONDS, Cooldown
from tfcommx.elastic.discovery import HostSource
from tfcommx.elastic.options import ElasticOptions
from tfcommx.elastic.placement import in_words, place, slots_of
from tfcommx.terms import PlanError

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
        options: ElasticOptions,
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

        **Raises:** PlanError if none were ever found; later those found last are returned.
        """
        try:
            self._named, self._refusal = self._source.hosts(), ""
        except PlanError as error:
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
                    "--elastic-timeout."
                )
            if not waiting:
                waiting = True
                self._say(
                    f"{fewest} ranks are required. The hosts have {found}. Waiting for more, for "
                    f"{self._options.timeout:g} s at most."
                )
            time.sleep(WAIT_SECONDS)

"""Which hosts there are: those that were given, or those that the user's script prints.

To add a way to find hosts: a class with `hosts()`, and a word in cli/elastic_options.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from tfcommx.comm.allocation import Host, merge, parse_hosts
from tfcommx.comm.commands import run_to_end
from tfcommx.terms import PlanError

# For the script to end
SCRIPT_SECONDS = 60.0


class HostSource(Protocol):
    """Knows which hosts there are now."""

    # Who says so, for messages
    name: str

    def hosts(self) -> list[Host]:
        """Return the hosts with their slots. **Raises:** PlanError if they cannot be found."""
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
        """Run the script. **Raises:** PlanError if it fails, or prints what is no host."""
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
            except PlanError as error:
                raise self._refusal(str(error)) from None
            if ":" not in word and self._slots is None:
                raise self._refusal(f"{word!r} without a number, and no --slots")
            found.append((host.name, host.slots if ":" in word else self._slots or 1))
        return merge(found, self.name)

    def _refusal(self, received: str) -> PlanError:
        return PlanError(
            "The host discovery script must print the hosts, a line each, such as node1:4, and "
            f"end with status 0. Received from `{self.name}`: {received}."
        )

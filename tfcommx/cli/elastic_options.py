"""The options of `tfcommx run` and `tfcommx train` by which a supervisor starts ranks again."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, NamedTuple

import typer

from tfcommx.comm.allocation import Host, ranks_on
from tfcommx.comm.horovodrun import Launch, on_end_signals
from tfcommx.comm.remote_hosts import RemoteHosts
from tfcommx.elastic.discovery import FixedHosts, HostSource, ScriptHosts
from tfcommx.elastic.hosts import Hosts
from tfcommx.elastic.options import COOLDOWN_SECONDS, TIMEOUT_SECONDS, ElasticOptions
from tfcommx.elastic.supervisor import Stop, Supervisor, say
from tfcommx.terms import PlanError

MinNp = Annotated[
    int | None,
    typer.Option("--min-np", min=1, help="Elastic: ranks at least; default: -np, else 1."),
]
MaxNp = Annotated[
    int | None,
    typer.Option("--max-np", min=1, help="Elastic: ranks at most; default: all slots."),
]
Script = Annotated[
    str | None,
    typer.Option(
        "--host-discovery-script", help="Elastic: prints the hosts, a line each: node1:4."
    ),
]
Slots = Annotated[
    int | None,
    typer.Option("--slots", min=1, help="Of hosts that the script prints without a number."),
]
ResetLimit = Annotated[
    int | None,
    typer.Option("--reset-limit", min=0, help="Elastic: so many restarts at most."),
]
Cooldown = Annotated[
    tuple[float, float] | None,
    typer.Option(
        "--blacklist-cooldown-range",
        help="Elastic: seconds that a lost host is left out, the first time and at most; "
        "default: {:g} {:g}.".format(*COOLDOWN_SECONDS),
    ),
]
Timeout = Annotated[
    float | None,
    typer.Option(
        "--elastic-timeout",
        min=0,
        help=f"Elastic: seconds to wait for enough hosts; default: {TIMEOUT_SECONDS:g}.",
    ),
]
GrowEvery = Annotated[
    float | None,
    typer.Option(
        "--grow-every",
        metavar="MINUTES",
        min=0,
        help="Elastic: new hosts may join then, too, not only when an epoch ends.",
    ),
]
GenerationsFile = Annotated[
    Path | None,
    typer.Option("--generations", help="Elastic: write the table of generations, as JSON."),
]


class Elastic(NamedTuple):
    """The options as they were given; None: not given."""

    min_np: int | None
    max_np: int | None
    script: str | None
    slots: int | None
    reset_limit: int | None
    cooldown: tuple[float, float] | None
    timeout: float | None
    grow_every: float | None
    file: Path | None

    @property
    def wanted(self) -> bool:
        """Return whether a supervisor is wanted: one of them was given."""
        return any(value is not None for value in self)

    def options(self, ranks: int | None, interfaces: tuple[str, ...] = ()) -> ElasticOptions:
        """Return the limits of the run. **Raises:** PlanError for values out of range.

        Args:
            ranks: -np, or None.
            interfaces: of the network.
        """
        fewest = self.min_np or min(ranks or 1, self.max_np or ranks or 1)
        return ElasticOptions(
            fewest=fewest,
            most=self.max_np or (None if self.script else ranks),
            first=max(fewest, ranks or fewest),
            reset_limit=self.reset_limit,
            cooldown=self.cooldown or COOLDOWN_SECONDS,
            timeout=TIMEOUT_SECONDS if self.timeout is None else self.timeout,
            grow_every=self.grow_every,
            file=self.file,
            interfaces=interfaces,
        )

    def source(self, hosts: list[Host], name: str, ranks: int | None) -> HostSource:
        """Return what names the hosts: the script, or else these.

        Args:
            hosts: those that were given; empty: none.
            name: who names them, for messages.
            ranks: -np, or None.

        **Raises:** PlanError for hosts from two sources, or too few slots.
        """
        if self.script and hosts:
            raise PlanError(
                "The hosts must come from one source. Received --host-discovery-script, and "
                f"{name}. Leave one of them out."
            )
        if self.script:
            return ScriptHosts(self.script, self.slots)
        if self.slots:
            raise PlanError(
                "--slots is for hosts of --host-discovery-script. Received none. Write the number "
                "behind each host: -H node1:4."
            )
        ranks_on(hosts, ranks or self.min_np or 1, name)
        return FixedHosts(hosts, name)


def supervise(
    source: HostSource,
    options: ElasticOptions,
    remote: RemoteHosts,
    make_launch: Callable[[list[Host], int], Launch],
    stop: Stop,
) -> None:
    """Keep a run going until it has ended well.

    **Raises:** LaunchError if it cannot go on; SystemExit after a signal.
    """
    on_end_signals(stop.ask)
    Supervisor(Hosts(source, options, remote, say), options, make_launch, stop).run()

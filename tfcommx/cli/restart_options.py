"""The options of `tfcommx run` and `tfcommx train` for a supervisor that restarts ranks."""

import functools
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, NamedTuple, get_type_hints

import typer

from tfcommx.cli.parameters import output_file, show_parameters
from tfcommx.core import ConfigurationError
from tfcommx.launch.commands import RemoteHosts
from tfcommx.launch.horovodrun import Launch, on_end_signals
from tfcommx.launch.hosts import Host, ranks_on
from tfcommx.supervisor.hosts import (
    COOLDOWN_SECONDS,
    TIMEOUT_SECONDS,
    Hosts,
    HostSource,
    SupervisorOptions,
    hosts_of_script,
)
from tfcommx.supervisor.supervisor import StopSignal, Supervisor, say


class RestartOptions(NamedTuple):
    """The options of the command line; None: not given."""

    min_np: Annotated[
        int | None, typer.Option(min=1, help="Restart: least number of ranks; default: -np, or 1.")
    ] = None
    max_np: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Restart: most ranks; default: -np, or all slots with a discovery script.",
        ),
    ] = None
    host_discovery_script: Annotated[
        str | None, typer.Option(help="Restart: prints the hosts, a line each: node1:4.")
    ] = None
    slots: Annotated[
        int | None, typer.Option(min=1, help="Slots of hosts printed without a number.")
    ] = None
    reset_limit: Annotated[
        int | None, typer.Option(min=0, help="Restart: largest number of restarts.")
    ] = None
    blacklist_cooldown_range: Annotated[
        tuple[float, float] | None,
        typer.Option(
            help="Restart: seconds that a lost host is left out, the first time and at most; "
            "default: {:g} {:g}.".format(*COOLDOWN_SECONDS)
        ),
    ] = None
    elastic_timeout: Annotated[
        float | None,
        typer.Option(
            min=0, help=f"Restart: seconds to wait for enough hosts; default: {TIMEOUT_SECONDS:g}."
        ),
    ] = None
    grow_every: Annotated[
        float | None,
        typer.Option(
            metavar="MINUTES",
            help="Restart: period at which new hosts may join, > 0, in addition to epoch ends.",
        ),
    ] = None
    generations: Annotated[
        Path | None,
        output_file("--generations", text="Restart: write the table of generations, as JSON."),
    ] = None

    @property
    def wanted(self) -> bool:
        return any(value is not None for value in self)

    def options(self, ranks: int | None, interfaces: tuple[str, ...]) -> SupervisorOptions:
        fewest = self.min_np or min(ranks or 1, self.max_np or ranks or 1)
        return SupervisorOptions(
            fewest=fewest,
            most=self.max_np or (None if self.host_discovery_script else ranks),
            # The first generation has -np ranks, and only later ones may have fewer
            first=max(fewest, ranks or fewest),
            reset_limit=self.reset_limit,
            cooldown=self.blacklist_cooldown_range or COOLDOWN_SECONDS,
            timeout=TIMEOUT_SECONDS if self.elastic_timeout is None else self.elastic_timeout,
            grow_every=self.grow_every,
            file=self.generations,
            interfaces=interfaces,
        )

    def source(self, hosts: list[Host], name: str, ranks: int | None) -> HostSource:
        if self.host_discovery_script and hosts:
            raise ConfigurationError(
                "The hosts must come from one source. Received --host-discovery-script, and "
                f"{name}. Leave one of them out."
            )
        if self.host_discovery_script:
            script = self.host_discovery_script
            return HostSource(script, functools.partial(hosts_of_script, script, self.slots))
        if self.slots:
            raise ConfigurationError(
                "--slots is for hosts of --host-discovery-script. Received none. Write the number "
                "behind each host: -H node1:4."
            )
        ranks_on(hosts, ranks or self.min_np or 1, name)  # Raises for too few slots
        return HostSource(name, lambda: list(hosts))

    def supervise(
        self,
        hosts: list[Host],
        name: str,
        ranks: int | None,
        make_launch: Callable[[list[Host], int], Launch],
        stop: StopSignal,
        remote: RemoteHosts | None = None,
        interfaces: tuple[str, ...] = (),
    ) -> None:
        """Restart a run until it succeeds.

        Args:
            hosts: from the source `name`; empty: those of the discovery script.
            ranks: as the user chose; None: by the options.

        **Raises:** ConfigurationError for options out of range, hosts from two sources, or too few
        slots; LaunchError if the run cannot continue; SystemExit after a signal.
        """
        options, source = self.options(ranks, interfaces), self.source(hosts, name, ranks)
        on_end_signals(stop.ask)
        supervised = Hosts(source, options, remote or RemoteHosts(), say)
        Supervisor(supervised, options, make_launch, stop).run()


def add_options(command: Callable[..., None]) -> Callable[..., None]:
    """Add these options to a command, which receives them as one argument, `restart`.

    >>> def say(name: str, restart: RestartOptions) -> None: ...
    >>> [*inspect.signature(add_options(say)).parameters][:3]
    ['name', 'min_np', 'max_np']
    """
    hints = get_type_hints(command, include_extras=True)
    # Copied into the signature, because typer reads options from parameters only
    options = inspect.signature(RestartOptions).parameters
    kinds = get_type_hints(RestartOptions, include_extras=True)
    parameters = [
        option.replace(annotation=(kinds | hints)[option.name], kind=inspect.Parameter.KEYWORD_ONLY)
        for name, parameter in inspect.signature(command).parameters.items()
        for option in (options.values() if name == "restart" else [parameter])
    ]

    def with_options(**arguments: Any) -> None:
        restart = RestartOptions(**{name: arguments.pop(name) for name in options})
        command(**arguments, restart=restart)

    # Typer takes the command's name and help from these
    with_options.__name__, with_options.__doc__ = command.__name__, command.__doc__
    show_parameters(with_options, parameters)
    return with_options

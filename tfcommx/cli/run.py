"""`tfcommx run`: start a command on all hosts; a thin wrapper of horovodrun."""

import shlex
import shutil
import sys
from pathlib import Path
from typing import Annotated

import typer

from tfcommx.cli import restart_options
from tfcommx.core import ConfigurationError, LaunchError
from tfcommx.launch.commands import RemoteHosts, is_local, reads_script_from_input
from tfcommx.launch.horovodrun import (
    Launch,
    Running,
    on_end_signals,
    require_interfaces,
    search_path,
)
from tfcommx.launch.hosts import Host, allocation, parse_hosts, ranks_on, read_hostfile
from tfcommx.launch.launcher import later_task
from tfcommx.launch.rank_output import RankLines
from tfcommx.supervisor.supervisor import StopSignal

# A shell's exit status for a missing command
NOT_FOUND = 127


@restart_options.add_options
def run(
    command: Annotated[
        list[str], typer.Argument(help="Command of every rank, such as `python train.py`.")
    ],
    num_proc: Annotated[
        int | None, typer.Option("-np", "--num-proc", min=1, help="Ranks; default: all slots.")
    ] = None,
    hosts: Annotated[
        str | None, typer.Option("-H", "--hosts", help="Such as node1:4,node2:4.")
    ] = None,
    hostfile: Annotated[
        Path | None, typer.Option(help="File with a line per host: `node1 slots=4`.")
    ] = None,
    gloo: Annotated[bool, typer.Option("--gloo", help="Launch over Gloo; the default.")] = False,
    mpi: Annotated[
        bool, typer.Option("--mpi", help="Launch with mpirun: for routes of messages.")
    ] = False,
    network_interfaces: Annotated[
        str | None, typer.Option(help="Networks of all hosts, such as eth0 or eth0,eth1.")
    ] = None,
    ssh_port: Annotated[
        int | None, typer.Option("-p", "--ssh-port", help="Port of ssh, the same on all hosts.")
    ] = None,
    ssh_identity_file: Annotated[
        Path | None, typer.Option("-i", "--ssh-identity-file", help="A private key.")
    ] = None,
    start_timeout: Annotated[
        int | None, typer.Option(min=1, help="Seconds for all hosts to answer; default 30.")
    ] = None,
    mpi_args: Annotated[str, typer.Option(help="Options for mpirun, as one word.")] = "",
    horovodrun_args: Annotated[
        list[str] | None,
        typer.Option(metavar="WORD", help="Pass a word to horovodrun. Repeatable."),
    ] = None,
    *,
    restart: restart_options.RestartOptions,
) -> None:
    """Start COMMAND on every rank: `tfcommx run -np 8 -H node1:4,node2:4 -- python train.py`.

    Without -H and --hostfile the hosts are those of the allocation: of Slurm, PBS, LSF, or
    Kubernetes' MPI operator; outside of one, this machine. Ctrl-C ends all ranks. If a rank fails,
    the others are ended, one line names it, and its exit status is returned. With a restart option
    the ranks are then started again, on the remaining hosts.
    """
    if gloo and mpi:
        raise ConfigurationError("One of --gloo and --mpi is required at most. Received both.")
    if shutil.which(command[0], path=search_path()) is None:
        is_script = command[0].endswith(".py") and Path(command[0]).is_file()
        remedy = f" Write `python {command[0]}`." if is_script else ""
        raise LaunchError(
            f"A command that can be run is required. Received {command[0]!r}.{remedy}", NOT_FOUND
        )
    if hosts is None and hostfile is None and (task := later_task()):
        raise ConfigurationError(
            "`tfcommx run` must be called once, because it starts the ranks of all hosts. Received "
            f"a call by {task}. Call it without that launcher, or start `python train.py` by it. "
            "For a separate training in each task, name the hosts of each: -H localhost:2."
        )
    values = {
        "--ssh-port": ssh_port,
        "--ssh-identity-file": ssh_identity_file,
        "--start-timeout": start_timeout,
    }
    options = [word for name, value in values.items() if value for word in (name, str(value))]
    options += horovodrun_args or []

    def make_launch(hosts: list[Host], generation: int = 0) -> Launch:
        if reads_script_from_input(command):
            raise ConfigurationError(
                "Ranks have no standard input, so a script must be a file, such as `tfcommx run "
                f"-np 2 -- python train.py`. Received `{shlex.join(command)}`, which would read "
                "its script from there."
            )
        kind = "mpi" if mpi else "gloo"
        # Not on one host, because horovodrun uses the loopback there, and would find no other
        network_options: list[str] = []
        if network_interfaces and not all(is_local(host.name) for host in hosts):
            # Not after a loss, because an address may come back
            if kind == "gloo" and not generation:
                require_interfaces(network_interfaces.split(","))
            network_options = ["--network-interfaces", network_interfaces]
        return Launch(tuple(hosts), tuple(command), kind, mpi_args, (*network_options, *options))

    if not restart.wanted:
        source, available = find_hosts(num_proc, hosts, hostfile)
        if failure := carry_out(make_launch(ranks_on(available, num_proc, source)), StopSignal()):
            raise failure
        return
    # Not the allocation's hosts
    if restart.host_discovery_script and hosts is None and hostfile is None:
        source, available = "", []
    else:
        source, available = find_hosts(
            num_proc or restart.max_np or restart.min_np, hosts, hostfile
        )
    interfaces = tuple(network_interfaces.split(",")) if network_interfaces else ()
    remote = RemoteHosts(ssh_port, ssh_identity_file)
    restart.supervise(available, source, num_proc, make_launch, StopSignal(), remote, interfaces)


def find_hosts(
    ranks: int | None, hosts: str | None, hostfile: Path | None
) -> tuple[str, list[Host]]:
    """Return the source of the hosts, for messages, and the hosts.

    **Raises:** ConfigurationError for unusable hosts, and for an unknown number of ranks.
    """
    if hosts is not None and hostfile is not None:
        raise ConfigurationError("One of -H and --hostfile is required at most. Received both.")
    if hosts is not None:  # An empty text is refused, because a script's variable was not set
        return "-H", parse_hosts(hosts)
    if hostfile is not None:
        return str(hostfile), read_hostfile(hostfile)
    if job := allocation():
        return job.source, job.hosts
    if ranks:
        return "-np", [Host("localhost", ranks)]
    raise ConfigurationError(
        "A number of ranks is required: -np 4 on this machine, -H node1:4,node2:4 on several. "
        "Received neither, outside of an allocation."
    )


def carry_out(launch: Launch, stop: StopSignal, advice: str = "") -> LaunchError | None:
    """Start the ranks and show their output until they end.

    Args:
        stop: receives SIGINT (Ctrl-C), SIGTERM, SIGHUP and SIGUSR1, in place of horovodrun, which
            would kill the ranks 5 s after the first.
        advice: last sentence of the error.

    Returns:
        The error of a rank that failed; None if all ranks succeeded.

    **Raises:** LaunchError if no process reads the output; SystemExit after a signal.
    """
    lines = RankLines()
    running = stop.running = Running(launch)
    on_end_signals(stop.ask)
    status = running.wait(lines)
    if stop.number:
        # The status that shells give to a process that a signal has ended
        sys.exit(128 + stop.number)
    return running.failed(status, lines, advice) if status else None

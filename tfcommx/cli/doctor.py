"""`tfcommx doctor`: check whether this machine, or these hosts, can train, and what to fix."""

from __future__ import annotations

import json
import socket
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from tfcommx.cli import doctor_host, doctor_launches
from tfcommx.cli.doctor_host import FAILED, OK, WARNING, Finding
from tfcommx.comm.allocation import Host, parse_hosts
from tfcommx.comm.horovodrun import KINDS

COLOURS = {OK: "green", WARNING: "yellow", FAILED: "bold red"}
# Heading of the launches on all hosts
ALL_HOSTS = "all hosts"


def doctor(
    hosts: Annotated[
        str | None,
        typer.Option("-H", "--hosts", help="Hosts and slots, as for horovodrun: node1:4,node2:4"),
    ] = None,
    launch: Annotated[bool, typer.Option(help="Start ranks, and let them exchange.")] = True,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Look at this machine and start two ranks on it; with -H at each host, and start ranks on all.

    Each line is ok, a warning or failed, and says what to do. Exit status 1 if something failed.
    """
    report = examine(hosts, launch)
    if as_json:
        rows = {host: [one._asdict() for one in found] for host, found in report.items()}
        print(json.dumps({"hosts": rows}))
    else:
        show(report)
    if any(one.state == FAILED for found in report.values() for one in found):
        raise typer.Exit(1)


def examine(hosts: str | None, launch: bool) -> dict[str, list[Finding]]:
    """Check each host, then start ranks on all of them.

    Args:
        hosts: as for `horovodrun -H`; None: this host, with two ranks.
        launch: whether to start ranks.

    Returns:
        Host -> its findings; those of launches on several hosts under ALL_HOSTS.

    **Raises:** PlanError for hosts in another form than horovodrun's.
    """
    here = socket.gethostname()
    if hosts is None:
        report = {here: doctor_host.here()}
        chosen = [Host("localhost", 2)]
    else:
        chosen = parse_hosts(hosts)
        report = {
            name: doctor_host.here() if doctor_host.is_here(name) else doctor_launches.on_host(name)
            for name, _ in chosen
        }
        report[ALL_HOSTS] = [same_versions(report)]
    if launch:
        gpus = doctor_host.present_gpus()
        more = [doctor_launches.bare(tuple(chosen))]
        for engine in KINDS:
            more += doctor_launches.exchange(tuple(chosen), engine, len(gpus))
        report.setdefault(ALL_HOSTS if len(report) > 1 else here, []).extend(more)
    return report


def same_versions(report: dict[str, list[Finding]]) -> Finding:
    """Compare the hosts' versions."""
    by_text: dict[str, list[str]] = {}
    for host, found in report.items():
        for one in found:
            if one.name == "versions":
                by_text.setdefault(one.what, []).append(host)
    if len(by_text) > 1:
        what = "; ".join(f"{text} on {', '.join(names)}" for text, names in by_text.items())
        return Finding("same versions", FAILED, what, "Set all hosts up alike.")
    return Finding("same versions", OK, "the hosts that answer have equal ones")


def show(report: dict[str, list[Finding]], console: Console | None = None) -> None:
    """Print a line for each finding, and below it what to do."""
    console = console or Console(highlight=False, soft_wrap=True)
    width = max(len(one.name) for found in report.values() for one in found)
    for host, found in report.items():
        console.print(Text(host, style="bold"))
        for one in found:
            state = Text(f"  {one.state:8}", style=COLOURS[one.state])
            console.print(state, Text(f"{one.name:{width}}  {one.what}"), sep="")
            if one.remedy:
                console.print(Text(f"{'':{width + 12}}{one.remedy}"))

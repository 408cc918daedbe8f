"""The hosts of a launch: as the user writes them, from a hostfile, or from the job's allocation.

    scheduler                          source
    Slurm                              SLURM_JOB_NODELIST, SLURM_TASKS_PER_NODE; of a heterogeneous
                                       job those with _HET_GROUP_0, _1, ...
    PBS, Torque                        the file PBS_NODEFILE, a line a slot
    OAR, Cobalt                        the file OAR_NODEFILE or COBALT_NODEFILE, likewise
    Grid Engine                        the file PE_HOSTFILE: host, slots, queue, processors
    LSF                                the file LSB_DJOB_HOSTFILE, or LSB_MCPU_HOSTS
    Kubernetes' MPI operator           the hostfile that it names or mounts

**Ranks:** local, in the launcher. Needs neither TensorFlow nor Horovod.

All host names pass the same check, because users, schedulers, scripts and other ranks supply them,
and horovodrun gives ssh's command lines to a shell: `-Fconfig` would be an option that runs a
program.
"""

import itertools
import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from tfcommx.core import ConfigurationError, check_name

# Letters, digits and "._-", as horovodrun accepts; no resolver accepts longer names
HOST_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,252}")


def is_host_name(name: object) -> bool:
    """Return True if this is the name or the IPv4 address of a host.

    >>> [is_host_name(name) for name in ("gpu-07.example.org", "10.0.0.2", "-Fconfig", "a;b", 7)]
    [True, True, False, False, False]
    """
    return isinstance(name, str) and HOST_NAME.fullmatch(name) is not None


def check_host_name(name: object, source: str) -> str:
    """Return a host name. **Raises:** ConfigurationError if no host can have it."""
    if not is_host_name(name):
        raise ConfigurationError(
            "A host's name must be made of the letters A to Z, digits, `.`, `_` and `-`, begin "
            "with a letter, digit or `_`, and have at most 253 characters. Received "
            f"{name!r:.80} from {source}. Name the host by its address, or as ssh knows it."
        )
    return str(name)


# A host with its slots, as in horovodrun's -H
HOST = re.compile(r"([^:,\s]+)(?::([1-9][0-9]*))?")
# An entry of a Slurm node list: text, and numbers in brackets
NODES = r"(?:[^,\[\]]|\[\d+(?:-\d+)?(?:,\d+(?:-\d+)?)*\])+"
# Settings behind a host in a hostfile of Open MPI. Only the first counts here, because the others
# limit its oversubscription
HOSTFILE_SETTINGS = ("slots", "max_slots", "max-slots")
# File in which the MPI operator lists the workers of its job
KUBERNETES_HOSTFILE = Path("/etc/mpi/hostfile")
# Variables with the file in which a scheduler lists the hosts of a job
HOSTFILES_OF_JOBS = ("PBS_NODEFILE", "LSB_DJOB_HOSTFILE", "OAR_NODEFILE", "COBALT_NODEFILE")
# Largest number of components of a heterogeneous job that Slurm allows by default
MOST_COMPONENTS = 128
# Open MPI 4 and 5 read these; the MPI operator sets the first
HOSTFILE_VARIABLES = ("OMPI_MCA_orte_default_hostfile", "PRTE_MCA_prte_default_hostfile")


class Host(NamedTuple):
    """A host and the number of ranks that may run on it."""

    name: str
    slots: int


class Allocation(NamedTuple):
    """The hosts that a scheduler has assigned to this job."""

    # Variable, file or scheduler that lists them, for messages
    source: str
    hosts: list[Host]


def merge(names: list[tuple[str, int]], source: str) -> list[Host]:
    """Add the slots of hosts that are named several times; the first mention gives the order.

    **Raises:** ConfigurationError for a name that no host can have.
    """
    slots: dict[str, int] = {}
    for name, count in names:
        slots[check_host_name(name, source)] = slots.get(name, 0) + count
    return [Host(name, count) for name, count in slots.items()]


def parse_hosts(text: str) -> list[Host]:
    """Parse hosts in the format of horovodrun's -H; a host without a number has one slot.

    **Raises:** ConfigurationError for an invalid host.

    >>> parse_hosts("node1:4,node2")
    [Host(name='node1', slots=4), Host(name='node2', slots=1)]
    """
    return merge([parse_host(word, "-H") for word in text.split(",")], "-H")


def parse_host(word: str, source: str) -> tuple[str, int]:
    """Parse one host, `node1:4` or `node1`; return its name and its slots, by default 1.

    **Raises:** ConfigurationError for anything else, also for several hosts.
    """
    match = HOST.fullmatch(word.strip())
    if not match:
        is_ipv6 = re.fullmatch(r"\[?[0-9A-Fa-f]*:[0-9A-Fa-f:.]*:.*", word.strip())
        advice = " Horovod connects by IPv4 alone: give a name or an IPv4 address." * bool(is_ipv6)
        raise ConfigurationError(
            "Hosts must be NAME:SLOTS, separated by commas, such as node1:4,node2:4, and one a "
            f"line in a hostfile or the output of a script. Received {word!r} from {source}."
            f"{advice}"
        )
    return match[1], int(match[2] or 1)


def read_hostfile(path: Path) -> list[Host]:
    """Read a hostfile: a line a host, `node1 slots=4` or `node1:4`; `#` begins a comment.

    A host without a number has one slot, and may be named again. As in Open MPI, one with `slots=0`
    is left out, and `max_slots` is ignored.
    **Raises:** ConfigurationError if it cannot be read, for a line of another form, and if it lists
    no slot.
    """
    try:
        # Some editors write a byte order mark; a comment may be in any encoding
        lines = path.read_text(encoding="utf-8-sig", errors="replace").splitlines()
    except OSError as error:
        raise ConfigurationError(f"A hostfile is required at {path}. Received: {error}.") from None
    texts = (line.partition("#")[0].strip() for line in lines)
    hosts = merge([_host_of_line(text, str(path)) for text in texts if text], str(path))
    if not slots_of(hosts):
        raise ConfigurationError(
            f"A hostfile must name at least one host with a slot. Received {path} with none."
        )
    return [host for host in hosts if host.slots]


def _host_of_line(line: str, source: str) -> tuple[str, int]:
    # Open MPI allows spaces around the equals sign
    first, *words = re.sub(r"\s*=\s*", "=", line).split()
    name, slots = parse_host(first, source)
    numbers = [first] * (":" in first)
    for word in words:
        key, _, value = word.partition("=")
        check_name("setting", key, HOSTFILE_SETTINGS, f"in the line {line!r} of {source}")
        if not re.fullmatch(r"[0-9]+", value):
            raise ConfigurationError(
                f"`{key}` must be a whole number >= 0. Received {word!r} in the line {line!r} of "
                f"{source}."
            )
        if key == "slots":
            slots = int(value)
            numbers.append(word)
    if len(numbers) > 1:
        raise ConfigurationError(
            f"A host needs one number of slots. Received {' and '.join(numbers)} in the line "
            f"{line!r} of {source}."
        )
    return name, slots


def expand_nodelist(text: str) -> list[str]:
    """Return the host names of a Slurm node list, as `scontrol show hostnames` does.

    **Raises:** ConfigurationError for text of another form, such as one that was cut off.

    >>> expand_nodelist("gpu[1-3,07],login")
    ['gpu1', 'gpu2', 'gpu3', 'gpu07', 'login']
    """
    text = text.strip()  # A script that has set the variable may have left a line feed
    if not re.fullmatch(f"{NODES}(?:,{NODES})*", text):
        raise ConfigurationError(
            f"A node list of Slurm must be like gpu[1-3,07],login. Received {text!r}. Name the "
            "hosts by -H, or unset what another job has left in the environment."
        )
    names = []
    for entry in re.findall(NODES, text):
        parts = [_numbers(part) for part in re.findall(r"\[[^\]]*\]|[^\[]+", entry)]
        names += ["".join(words) for words in itertools.product(*parts)]
    return names


def _numbers(part: str) -> list[str]:
    """Return the expansion of a part of an entry: itself, or the numbers in brackets."""
    if not part.startswith("["):
        return [part]
    numbers = []
    for piece in part[1:-1].split(","):
        first, _, last = piece.partition("-")
        # Numbers keep their leading zeros, as in gpu[07-10]
        width = len(first)
        numbers += [f"{n:0{width}d}" for n in range(int(first), int(last or first) + 1)]
    return numbers


def expand_tasks(text: str) -> list[int]:
    """Expand Slurm's number of tasks of each node.

    >>> expand_tasks("4(x2),3")
    [4, 4, 3]
    """
    matches = re.findall(r"(\d+)(?:\(x(\d+)\))?", text)
    return [int(tasks) for tasks, times in matches for _ in range(int(times or 1))]


def allocation() -> Allocation | None:
    """Return the hosts of this job's allocation; None outside of one.

    **Raises:** ConfigurationError if a scheduler's variables or files cannot be read.
    """
    components = [""]
    for name, number in itertools.product(("HET", "PACK"), range(MOST_COMPONENTS)):
        if f"SLURM_JOB_NODELIST_{name}_GROUP_{number}" in os.environ:
            components += [f"_{name}_GROUP_{number}"]
    # The variables without a number are those of the first component
    if hosts := list(itertools.chain.from_iterable(map(_of_slurm, components[1:] or [""]))):
        return Allocation("Slurm", merge(hosts, "Slurm"))
    for variable in HOSTFILES_OF_JOBS:
        if file := os.environ.get(variable):
            return Allocation(variable, read_hostfile(Path(file)))
    if file := os.environ.get("PE_HOSTFILE"):
        return Allocation("PE_HOSTFILE", _of_grid_engine(Path(file)))
    if text := os.environ.get("LSB_MCPU_HOSTS", "").strip():
        if not re.fullmatch(r"\S+\s+[0-9]+(?:\s+\S+\s+[0-9]+)*", text):
            raise ConfigurationError(
                "LSB_MCPU_HOSTS must list hosts, each with its slots, such as node1 4 node2 4. "
                f"Received {text!r}. Name the hosts by -H."
            )
        words = text.split()
        pairs = zip(words[::2], map(int, words[1::2]), strict=True)
        return Allocation("LSB_MCPU_HOSTS", merge(list(pairs), "LSB_MCPU_HOSTS"))
    files = [Path(os.environ[name]) for name in HOSTFILE_VARIABLES if os.environ.get(name)]
    files += [KUBERNETES_HOSTFILE] * KUBERNETES_HOSTFILE.is_file()
    return Allocation(str(files[0]), read_hostfile(files[0])) if files else None


def _of_slurm(component: str) -> list[tuple[str, int]]:
    """Return the nodes of a component of Slurm's job with their tasks; none outside of a job."""
    if not (nodes := os.environ.get(f"SLURM_JOB_NODELIST{component}")):
        return []
    names, variable = expand_nodelist(nodes), f"SLURM_TASKS_PER_NODE{component}"
    tasks = expand_tasks(os.environ.get(variable, f"1(x{len(names)})"))
    if len(names) != len(tasks):
        raise ConfigurationError(
            f"{variable} must have a number for each of the {len(names)} nodes of "
            f"SLURM_JOB_NODELIST{component}={nodes}. Received {os.environ[variable]!r}. "
            "Name the hosts by -H."
        )
    return list(zip(names, tasks, strict=True))


def _of_grid_engine(path: Path) -> list[Host]:
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError as error:
        raise ConfigurationError(
            f"The file of PE_HOSTFILE is required. Received: {error}. Name the hosts by -H."
        ) from None
    rows = [line.split() for line in lines if line.strip()]
    if not rows or not all(len(row) > 1 and re.fullmatch(r"[1-9][0-9]*", row[1]) for row in rows):
        raise ConfigurationError(
            "PE_HOSTFILE must list hosts, each with its slots, such as `node1 4 all.q UNDEFINED`. "
            f"Received {path} with {lines[:3]}. Name the hosts by -H."
        )
    return merge([(row[0], int(row[1])) for row in rows], str(path))


def slots_of(hosts: Iterable[Host]) -> int:
    return sum(host.slots for host in hosts)


def first_slots(hosts: Iterable[Host], most: int) -> list[Host]:
    """Return the first hosts, with at most so many slots in total."""
    chosen: list[Host] = []
    for host in hosts:
        free = min(host.slots, most - slots_of(chosen))
        if free > 0:
            chosen.append(Host(host.name, free))
    return chosen


def ranks_on(hosts: list[Host], ranks: int | None, source: str) -> list[Host]:
    """Return the first hosts, with as many slots in total as ranks; None: one on each slot.

    **Raises:** ConfigurationError if there are too few slots.

    >>> ranks_on([Host("node1", 4), Host("node2", 4)], 5, "-H")
    [Host(name='node1', slots=4), Host(name='node2', slots=1)]
    """
    slots = slots_of(hosts)
    ranks = ranks or slots
    if ranks > slots:
        each = -(-ranks // len(hosts))
        wider = ",".join(f"{host.name}:{each}" for host in hosts)
        raise ConfigurationError(
            f"-np must be at most the number of slots. Received -np {ranks}, and {slots} slots "
            f"from {source}. Give fewer, or name the hosts with more: -H {wider}."
        )
    # Because Horovod 0.28 starts a rank on every slot of -H and ignores -np
    return first_slots(hosts, ranks)

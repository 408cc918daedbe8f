"""Read the environment variables of horovodrun, mpirun and the user about this process.

`known_launchers` has the table of launchers. `tfcommx run` starts ranks with horovodrun, by the
command line of `horovodrun.Launch.words`.
"""

import math
import os
import tempfile
from pathlib import Path
from typing import NamedTuple, overload

from tfcommx.core import ConfigurationError, local_path
from tfcommx.core.files import open_private
from tfcommx.launch.cluster_environment import is_within_task
from tfcommx.launch.known_launchers import LAUNCHERS, OF_HOROVOD, cluster_environment

# Example command whose last process holds the centre of elastic averaging
CENTRE_LAUNCH = (
    "`tfcommx run -np 9 -H node1:4,node2:5 --mpi --mpi-args=--enable-recovery -- tfcommx centre -- "
    "python train.py`, for 8 ranks that train"
)
# Holds the launch's name, because launches that a script makes inherit the variable
CENTRE_VARIABLE = "TFCOMMX_CENTRE"
# Holds the launch's name, and the number of calls of init() by a rank and its ancestors
STARTED_VARIABLE = "TFCOMMX_STARTED"


class Launcher(NamedTuple):
    """Kind, rank and size of this process, from its launcher, before Horovod starts."""

    # "gloo", "mpi" or "none"; "environment": before `rendezvous.join` makes it a Gloo launch
    kind: str
    # Rank among the ranks that train; a process that holds a centre has the number `size`
    rank: int
    size: int
    # Number of the process on its host, from 0: chooses the GPU
    local_rank: int
    # True if the launch has one more process, which holds the centre of elastic averaging
    centre: bool = False


def launcher() -> Launcher:
    """Read the launcher's environment variables; without any the process is alone.

    **Ranks:** local. Needs neither TensorFlow nor Horovod.
    """
    for kind, row in OF_HOROVOD.items():
        # Not the variables of a task of mpirun that has started torchrun
        if row.rank in os.environ and not (
            kind == "mpi" and is_within_task(os.environ.get(row.size, ""))
        ):
            rank, size, local_rank = map(_number, (row.rank, row.size, row.variable("LOCAL_RANK")))
            launch = os.environ.get("PMIX_NAMESPACE", "")
            centre = kind == "mpi" and launch == os.environ.get(CENTRE_VARIABLE)
            return Launcher(kind, rank, size - centre, local_rank, centre)
    if (environment := cluster_environment()) is not None:
        return Launcher(
            "environment", environment.rank, environment.size, environment.local_rank or 0
        )
    return Launcher("none", 0, 1, 0)


def on_one_host() -> bool:
    """Return True if the launcher has started all processes of the launch on this host."""
    for row in OF_HOROVOD.values():
        if size := os.environ.get(row.size):
            return os.environ.get(row.variable("LOCAL_SIZE")) == size
    return False


def _number(name: str) -> int:
    value = os.environ.get(name, "")
    if not value.isdecimal():
        raise ConfigurationError(
            f"{name} must be a whole number >= 0, as horovodrun and mpirun set it. Received "
            f"{value!r}. Unset what another launch has left in the environment."
        )
    return int(value)


@overload
def seconds_from(name: str, default: float) -> float: ...
@overload
def seconds_from(name: str, default: float | None, off: bool) -> float | None: ...
def seconds_from(name: str, default: float | None, off: bool = False) -> float | None:
    """Return an environment variable as seconds > 0; the default if it is not set.

    Args:
        off: True if 0 is allowed; it then means None.

    **Raises:** ConfigurationError for any other value.
    """
    word = os.environ.get(name)
    if word is None:
        return default
    try:
        seconds = float(word)
    except ValueError:
        seconds = -1.0
    if off and seconds == 0:
        return None
    if not 0 < seconds < math.inf:
        raise ConfigurationError(
            f"{name} must be a number of seconds > 0{', or 0 for off' * off}. Received {word!r}."
        )
    return seconds


def rendezvous_seconds(default: float) -> float:
    """Return the seconds that ranks wait for each other at the start."""
    return seconds_from("TFCOMMX_RENDEZVOUS_SECONDS", default)


def run_name() -> str:
    """Return a name that all processes of this run have, and no other run on the machine.

    It is the launch's name; without a launcher, it identifies the process.
    **Raises:** ConfigurationError if the launcher sets none.
    """
    kind = launcher().kind
    if kind == "none":
        # With the time of its start, because a process number may be reused, also by another
        # container
        line = Path("/proc/self/stat").read_text(encoding="utf-8", errors="replace")
        # Behind the last parenthesis, because the program's name before it may contain any
        # character
        return f"{os.getpid()} {line.rpartition(')')[2].split()[19]}"
    if kind not in OF_HOROVOD:
        raise ConfigurationError(
            "The run has a name once its ranks have met. Received a process that has not called "
            "tfcommx.init() yet. Call it first."
        )
    names = OF_HOROVOD[kind].launch
    if missing := [name for name in names if name not in os.environ]:
        raise ConfigurationError(
            f"A name of the run is required in {' and '.join(names)}, as horovodrun and mpirun "
            f"set them. Received none in {' and '.join(missing)}. Launch with one of them, or set "
            "it, equal on all ranks."
        )
    return " ".join(os.environ[name] for name in names)


def earlier_inits() -> int:
    """Return the number of this process's ancestors that have called init() as this rank.

    More than 0 in a process that a rank has started and that has inherited its variables.
    """
    name, _, count = os.environ.get(STARTED_VARIABLE, "").rpartition(" ")
    return int(count) if count.isdecimal() and name == run_name() else 0


def later_task() -> str:
    """Return which of several tasks of srun or mpirun this process is; "" for the first or only.

    Also "" in a program of a rank, which may start separate ranks.
    """
    if STARTED_VARIABLE in os.environ:
        return ""
    for row in LAUNCHERS:
        rank, size = os.environ.get(row.rank, "0"), os.environ.get(row.size, "1")
        if row.name in ("srun", "mpirun") and rank != "0" and size not in ("", "0", "1"):
            return f"task {rank} of the {size} of {row.name}"
    return ""


def record_init() -> None:
    """Let the processes that this rank starts know that it has called init(), as one of several."""
    os.environ[STARTED_VARIABLE] = f"{run_name()} {earlier_inits() + 1}"


def launch_interfaces() -> list[str]:
    """Return the network interfaces that the launcher set for Horovod; an empty list if none."""
    of_gloo, of_open_mpi = "HOROVOD_GLOO_IFACE", "OMPI_MCA_btl_tcp_if_include"
    names = os.environ.get(of_gloo) or os.environ.get(of_open_mpi) or ""
    return [name for name in names.split(",") if name]


def cache_folder() -> Path:
    """Return the folder for measurements that later runs use, on the machine of rank 0.

    TFCOMMX_CACHE; without it `tfcommx` in XDG_CACHE_HOME, or in ~/.cache; in the folder of
    temporary files for a user without a home.

    **Raises:** ConfigurationError for an address such as gs://bucket/cache, and for a folder of
    temporary files that another user has made.
    """
    if chosen := os.environ.get("TFCOMMX_CACHE"):
        return local_path("TFCOMMX_CACHE", chosen)
    if shared := os.environ.get("XDG_CACHE_HOME"):
        return local_path("XDG_CACHE_HOME", shared) / "tfcommx"
    try:
        return Path.home() / ".cache" / "tfcommx"
    except RuntimeError:  # A container's user without a home
        folder = Path(tempfile.gettempdir()) / f"tfcommx-{os.getuid()}"
        try:
            os.close(open_private(folder))  # Another user could have made it
        except OSError as error:
            raise ConfigurationError(f"{error} Or set TFCOMMX_CACHE to another folder.") from error
        return folder

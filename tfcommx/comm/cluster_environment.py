"""What srun, torchrun and other launchers than horovodrun and mpirun tell each process.

    environment --cluster_environment()--> ClusterEnvironment --rendezvous.join()--> Gloo launch

To add a launcher, write a function that returns its ClusterEnvironment, or None if it did not start
this process, and put it into LAUNCHERS.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import NamedTuple

from tfcommx.comm.allocation import expand_nodelist
from tfcommx.comm.host_names import check_host_name
from tfcommx.terms import PlanError

# Above the ports of common services and below those that systems hand out
FIRST_PORT, PORTS = 12_000, 20_000


class ClusterEnvironment(NamedTuple):
    """What a launcher says of one process, before the processes have met."""

    # For messages
    launcher: str
    # In [0, size)
    rank: int
    size: int
    # Number of the process on its host, from 0; None: it does not say
    local_rank: int | None
    # Where rank 0 is
    address: str
    # TCP port at which rank 0 listens
    port: int
    # What ranks of other launches do not have
    launch: str = ""
    # Whether the launcher says that all ranks are on this host
    one_host: bool = False


def cluster_environment() -> ClusterEnvironment | None:
    """Read what the launcher says; None for a process that none of LAUNCHERS has started.

    **Ranks:** local. **Raises:** PlanError that names a variable which is missing or no number.
    """
    found = (read() for read in LAUNCHERS)
    return next((one for one in found if one is not None), None)


def srun() -> ClusterEnvironment | None:
    """Read what Slurm's srun says of a task.

    srun's address is the step's first node, its port follows from the job and the step.
    """
    if os.environ.get("SLURM_STEP_NUM_TASKS", "1") in ("", "0", "1"):
        return None
    job, step = _number("srun", "SLURM_JOB_ID"), _number("srun", "SLURM_STEP_ID")
    return ClusterEnvironment(
        "srun",
        _number("srun", "SLURM_PROCID"),
        _number("srun", "SLURM_STEP_NUM_TASKS"),
        _number("srun", "SLURM_LOCALID"),
        _first_node(_word("srun", "SLURM_STEP_NODELIST")),
        _own_port() or FIRST_PORT + (97 * job + step) % PORTS,
        f"{job}.{step}",
        os.environ.get("SLURM_STEP_NUM_NODES") == "1",
    )


def torchrun() -> ClusterEnvironment | None:
    """Read the variables of torchrun, which many managed services set as well.

    torchrun itself listens at MASTER_PORT; then rank 0 takes the next port.
    """
    if os.environ.get("WORLD_SIZE", "1") in ("", "0", "1"):
        return None
    local_rank = os.environ.get("LOCAL_RANK")
    taken = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return ClusterEnvironment(
        "torchrun",
        _number("torchrun", "RANK"),
        _number("torchrun", "WORLD_SIZE"),
        int(local_rank) if (local_rank or "").isdecimal() else None,
        _word("torchrun", "MASTER_ADDR"),
        _own_port() or _number("torchrun", "MASTER_PORT") + taken,
        os.environ.get("TORCHELASTIC_RUN_ID", ""),
        os.environ.get("LOCAL_WORLD_SIZE") == os.environ["WORLD_SIZE"],
    )


LAUNCHERS: tuple[Callable[[], ClusterEnvironment | None], ...] = (srun, torchrun)


def _own_port() -> int | None:
    """Return the port that the user asks for."""
    return _number("a user", "TFCOMMX_PORT") if "TFCOMMX_PORT" in os.environ else None


def _first_node(nodes: str) -> str:
    names = expand_nodelist(nodes)
    return check_host_name(names[0] if names else "", f"SLURM_STEP_NODELIST={nodes}")


def _word(launcher: str, name: str) -> str:
    if not (value := os.environ.get(name, "")):
        raise PlanError(
            f"{launcher} seems to have started this process, so {name} is required in its "
            f"environment. Received none. Export it in the script that {launcher} starts, or start "
            "the ranks with `tfcommx run`."
        )
    return value


def _number(launcher: str, name: str) -> int:
    value = _word(launcher, name)
    if not value.isdecimal():
        raise PlanError(f"{name} must be a whole number >= 0. Received {value!r}.")
    return int(value)

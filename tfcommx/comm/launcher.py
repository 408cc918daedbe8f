"""What the launcher's environment variables say of this process."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

from tfcommx.terms import PlanError


class Launcher(NamedTuple):
    """What the environment says of the process's place before Horovod starts."""

    # "gloo", "mpi" or "none"
    kind: str
    rank: int
    size: int
    # Place on its host: chooses the GPU
    local_rank: int


def launcher() -> Launcher:
    """Read the launcher's environment variables; a process that none started is alone."""
    env = os.environ
    if "HOROVOD_RANK" in env:
        return Launcher(
            "gloo",
            int(env["HOROVOD_RANK"]),
            int(env["HOROVOD_SIZE"]),
            int(env["HOROVOD_LOCAL_RANK"]),
        )
    if "OMPI_COMM_WORLD_RANK" in env:
        return Launcher(
            "mpi",
            int(env["OMPI_COMM_WORLD_RANK"]),
            int(env["OMPI_COMM_WORLD_SIZE"]),
            int(env["OMPI_COMM_WORLD_LOCAL_RANK"]),
        )
    return Launcher("none", 0, 1, 0)


def run_name() -> str:
    """Return a name that all processes of this run have, and no other run that lives on the
    machine.

    Of the launch; in a process that none started, of the process.
    **Raises:** PlanError where the launcher gives none.
    """
    kind = launcher().kind
    # a process number may come again, and another container may have it: with its start it is one
    # process
    if kind == "none":
        return f"{os.getpid()} {Path('/proc/self/stat').read_text().rpartition(')')[2].split()[19]}"
    words = {
        "gloo": ("HOROVOD_GLOO_RENDEZVOUS_ADDR", "HOROVOD_GLOO_RENDEZVOUS_PORT"),
        "mpi": ("PMIX_NAMESPACE",),
    }[kind]
    if missing := [word for word in words if word not in os.environ]:
        raise PlanError(
            f"A name of the run is required in {' and '.join(words)}, as horovodrun and mpirun "
            "set them. "
            f"Received none in {' and '.join(missing)}. Launch with one of them, or set it, "
            "equal on all ranks."
        )
    return " ".join(os.environ[word] for word in words)


def launch_interfaces() -> list[str]:
    """Return the network interfaces that the launcher gave to the engine; none where it leaves the
    choice to it.
    """
    of_gloo, of_open_mpi = "HOROVOD_GLOO_IFACE", "OMPI_MCA_btl_tcp_if_include"
    names = os.environ.get(of_gloo) or os.environ.get(of_open_mpi) or ""
    return [name for name in names.split(",") if name]

"""All launchers, and how each starts 4 ranks as 2 x 2 on node1 and node2.

A launcher is one row of LAUNCHERS. To add one, write its row, and its requirements in `why_not`.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import slurm
from launching import LAUNCHERS as OPTIONS
from launching import ROOT, WORKERS

PYTHON = sys.executable
HOSTS = ["-np", "4", "-H", "node1:2,node2:2"]
HOROVOD = [*HOSTS, "--network-interfaces", "eth0"]
# In a separate environment, because torchrun and tfcommx need no package of the other
TORCHRUN = os.environ.get("TFCOMMX_TORCHRUN", str(ROOT / ".venv-torchrun" / "bin" / "torchrun"))
INSTALL_TORCHRUN = "python3 -m venv .venv-torchrun && .venv-torchrun/bin/pip install torch==2.13.0"


class Start(NamedTuple):
    """A command that a user runs on a node."""

    node: int
    words: list[str]
    environment: dict[str, str]


def torchrun(program: list[str]) -> list[Start]:
    """On each node; `--no-python`, because the program has another Python than torchrun."""
    words = [TORCHRUN, "--nnodes=2", "--nproc-per-node=2", "--master-addr=node1"]
    words += ["--master-port=29500", "--no-python"]
    return [Start(1 + rank, [*words, f"--node-rank={rank}", *program], {}) for rank in (0, 1)]


def by_hand(program: list[str]) -> list[Start]:
    """Each process by itself, with torchrun's variables."""
    common = {"WORLD_SIZE": "4", "MASTER_ADDR": "node1", "MASTER_PORT": "29600"}
    return [Start(1 + rank // 2, program, common | {"RANK": str(rank)}) for rank in range(4)]


def on_head(*words: str) -> Callable[[list[str]], list[Start]]:
    """One command, on the node from which users start their runs."""
    return lambda program: [Start(0, [*words, *program], {})]


# Nodes share no folder: each would pass on the lines of all workers whose logs it finds
OWN_FOLDER = 'mkdir -p /tmp/ray && mount -t tmpfs tmpfs /tmp/ray && exec "$@"'


def ray_node(node: int, *words: str, **environment: str) -> Start:
    """Return the command that makes a virtual node a node of Ray; see workers/ray_node.py."""
    own = ["unshare", "--mount", "sh", "-c", OWN_FOLDER, "sh", PYTHON]
    return Start(node, [*own, str(WORKERS / "ray_node.py"), *words], environment)


def ray(program: list[str]) -> list[Start]:
    """A node of Ray on each; on the first, also the driver."""
    # Each line counts, also if other ranks print the same
    head = ray_node(1, "head", "node1", "2", *program, RAY_DEDUP_LOGS="0")
    return [head, ray_node(2, "join", "node1")]


# Name -> program -> the commands that start it
LAUNCHERS: dict[str, Callable[[list[str]], list[Start]]] = {
    "tfcommx run": on_head("tfcommx", "run", *HOROVOD, "--"),
    "tfcommx run --mpi": on_head("tfcommx", "run", *HOROVOD, "--mpi", "--"),
    "horovodrun --gloo": on_head("horovodrun", *HOROVOD, "--gloo"),
    "horovodrun --mpi": on_head("horovodrun", *HOROVOD, *OPTIONS["mpi"]),
    "mpirun": on_head("mpirun", *HOSTS, "--bind-to", "none", "--map-by", "slot"),
    "srun": on_head("srun", "-N2", "-n4", "--kill-on-bad-exit=1"),
    "torchrun": torchrun,
    "torchrun's variables": by_hand,
    "tfcommx.ray": ray,
}
SLURM = {"srun"}
# These leave a late rank running: the end of ssh does not end the program that it started on
# another host, and no launcher ends processes that were started by hand
LEAVES_A_LATE_RANK = {"tfcommx run", "horovodrun --gloo", "torchrun's variables"}


def why_not(launcher: str) -> str:
    """Return the reason why this launcher cannot be tried here; empty if it can."""
    if launcher in SLURM:
        return slurm.why_not()
    if launcher == "torchrun" and not Path(TORCHRUN).is_file():
        return f"no torchrun at {TORCHRUN}; {INSTALL_TORCHRUN}"
    if launcher == "tfcommx.ray":
        found = importlib.util.find_spec("ray")
        # The folder of Ray's tests has this name, too
        return "" if found and found.origin else "no Ray; pip install 'ray>=2.40'"
    return ""

"""The trainings of losses.py, their limits of time, and the check for remaining processes."""

from __future__ import annotations

import sys
from pathlib import Path

from losses_runs import FAULTS, MEMORY, Length, Run, Setup

SETUPS = {
    "hitopk": Setup("losses_worker.py", ("hitopk",), faults=FAULTS),
    "3 x 2": Setup("losses_worker.py", ("hitopk",), nodes=3, slots=2, faults=("kill", "node")),
    "sharded": Setup("losses_worker.py", ("sharded",)),
    "auto": Setup("losses_worker.py", ("auto",)),
    "two optimizers": Setup("losses_loop.py"),
    "one callback": Setup("losses_worker.py", ("callback",)),
    "horovod": Setup("losses_horovod.py", horovod=True, faults=("kill", "node", "cut", "stop")),
}
STEPS_BEFORE = 50
# Without a step after the fault: then it has not gone on. Horovod does so when the ssh to a node
# that does not answer has ended, as it does when the run is ended here
WAIT_SECONDS = 300.0


def undisturbed(cluster: str, setup: Setup, length: Length, folder: Path) -> str:
    """Return the hash of the weights of a run without a fault."""
    run = Run(cluster, folder, setup, length)
    if run.end(3600):
        sys.exit(f"The run without a fault has failed: see {folder / 'stderr'}")
    if not (weights := run.weights(setup.ranks)):
        sys.exit(f"The ranks of the run without a fault ended with different weights: {folder}")
    return weights


def left(folder: Path) -> list[str]:
    """Return the processes and memory files that runs have left."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            command = path.read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:  # It has ended
            continue
        if str(folder) in command:
            found.append(f"{path.parent.name}: {command[:100]}")
    runs = {path.name.removeprefix("run-") for path in folder.rglob("run-*")}
    return [*found, *(str(path) for run in runs for path in MEMORY.glob(f"tfcommx-*-{run}-*"))]

"""Virtual clusters of scripts/cluster for measurements, which are removed whatever happens.

The standard library suffices.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

SCRIPTS = Path(__file__).resolve().parent.parent


def command(name: str, *words: object) -> list[str]:
    """Return the words that carry out a verb on the cluster of this name."""
    return [str(SCRIPTS / "cluster"), "--name", name, *map(str, words)]


def space(name: str, node: int) -> str:
    """Return the network namespace of a node."""
    return f"tfcommx-{name}-{node}"


def call(name: str, *words: object) -> None:
    """Carry out a verb. **Raises:** SystemExit if it fails; the script has printed the reason."""
    line = command(name, *words)
    if subprocess.run(line, stdout=subprocess.DEVNULL).returncode:
        raise SystemExit(f"`{' '.join(line)}` failed.")


def state(name: str) -> dict[str, Any]:
    """Return nodes, slots, rate and rate_mbit of a cluster that is up.

    **Raises:** SystemExit if there is none of this name.
    """
    file = Path(f"/run/tfcommx-{name}/state.json")
    if not file.is_file():
        raise SystemExit(f"A virtual cluster that is up is required. Received {name!r}: no {file}.")
    return json.loads(file.read_text())


@contextlib.contextmanager
def made(nodes: int, slots: int, rate: str) -> Iterator[str]:
    """Make a cluster with a name of this process, yield the name, and remove the cluster.

    It is removed after SIGTERM, too, which ends this process with status 143.
    """
    name = f"b{os.getpid()}"
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        call(name, "up", "--nodes", nodes, "--slots", slots, "--rate", rate)
        yield name
    finally:
        # A signal during the removal would leave a half of the cluster
        interrupt = signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        # Without root it only repeats the refusal of `up`
        subprocess.run(command(name, "down"), capture_output=True)
        signal.signal(signal.SIGINT, interrupt)
        signal.signal(signal.SIGTERM, before)

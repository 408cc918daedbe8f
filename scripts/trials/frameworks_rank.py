"""Shared by the workers of frameworks.py: all take the same steps and write the same notes."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

# Of node0 of the virtual cluster; the next node has the next address
CHIEF, PORT = "10.200.0.1", 29512
CLASSES = 10
# Steps that are not counted: tracing, buffers, and PowerSGD's first two, which it does not compress
WARM_UP = 4


def bytes_sent() -> int:
    """Return the bytes that this node's network interface has sent."""
    lines = Path("/proc/net/dev").read_text().splitlines()
    (line,) = (one for one in lines if one.strip().startswith("eth0:"))
    return int(line.partition(":")[2].split()[8])


def measure(
    step: Callable[[], object],
    barrier: Callable[[], object],
    weights: Callable[[], Sequence[np.ndarray]],
    steps: int,
    version: str,
) -> None:
    """Take steps; print seconds of each, bytes of one, and a hash of the weights, as JSON.

    Args:
        step: trains, and returns when it is done.
        barrier: returns when all ranks have called it.
        weights: that the ranks should agree on.
        steps: that count.
        version: of the framework.

    **Ranks:** all.
    """
    for _ in range(WARM_UP):
        step()
    seconds, sent = [], 0
    for _ in range(steps):
        barrier()
        before, start = bytes_sent(), time.perf_counter()
        step()
        seconds.append(time.perf_counter() - start)
        sent += bytes_sent() - before
    barrier()
    arrays = weights()
    found = {
        "seconds": seconds,
        "bytes": sent / steps,
        "parameters": sum(array.size for array in arrays),
        "weights": hashlib.sha256(b"".join(array.tobytes() for array in arrays)).hexdigest(),
        "version": version,
    }
    print(json.dumps(found), flush=True)

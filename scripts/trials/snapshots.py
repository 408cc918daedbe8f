#!/usr/bin/env python3
"""The cost of a snapshot in memory, for ResNet-50 with momentum and residuals.

    python scripts/trials/snapshots.py --record snapshots

Two ranks under `tfcommx run`, on two names of this machine that stand for two hosts: each writes
model and residuals into shared memory, and sends its residuals to the other. Blocks of steps with
and without one snapshot take turns. Columns:

    step        seconds of a step without a snapshot (median of the blocks)
    copy        seconds that a step waits for the copy
    write       seconds until it is written and mirrored, beside the steps
    extra       seconds that a block with a snapshot takes longer: the whole cost, as writing takes
                cores, memory and network from the steps (median)
    memory      bytes of shared memory on one host: two snapshots and two mirrors
    every       steps between two snapshots, so that they cost 1 % of the steps
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts"))
from bench import records  # noqa: E402

HOSTS = "localhost:1,127.0.0.1:1"


def work(folder: Path, batch: int, size: int, blocks: int, steps: int) -> None:
    """Train as one of the ranks; rank 0 writes its measurements."""
    import keras
    import numpy as np

    import tfcommx as cx

    comm = cx.init()
    keras.utils.set_random_seed(1)
    model = keras.applications.ResNet50(weights=None, input_shape=(size, size, 3), classes=100)
    scheme = cx.Scheme("hitopk", "mstopk", 0.01)
    optimizer = cx.DistributedOptimizer(keras.optimizers.SGD(0.01, 0.9), scheme)
    model.compile(optimizer, loss="sparse_categorical_crossentropy", jit_compile=False)
    random = np.random.default_rng(comm.rank)
    images = random.normal(size=(batch, size, size, 3)).astype("f4")
    labels = random.integers(0, 100, batch)
    snapshots = cx.checkpoint.Snapshots(model, folder / "run", every=1)
    snapshots.load()

    def block(snapshot: bool) -> float:
        """Take some steps, whose exchange keeps the ranks together; return the seconds."""
        start = time.monotonic()
        for number in range(steps):
            model.train_on_batch(images, labels)
            if snapshot and not number:  # It also learns that the one before is whole
                snapshots.after_step(0, 1, 0)
        return time.monotonic() - start

    block(True)  # Traced, and all memory touched once
    pairs = [(block(False), block(True)) for _ in range(blocks)]
    snapshots.after_step(0, 1, 0)
    if comm.rank:
        return
    one = statistics.median(plain for plain, _ in pairs) / steps
    extra = statistics.median(busy - plain for plain, busy in pairs)
    cost = snapshots.cost.summary()
    row = {
        "name": f"ResNet-50, {size} x {size}, batch {batch}",
        "ranks": comm.topology.size,
        "snapshots": cost["count"],
        "step": one,
        "copy": cost["copy_seconds"],
        "write": cost["write_seconds"],
        "extra": extra,
        "bytes": cost["bytes"],
        "memory": sum(path.stat().st_size for path in snapshots.place.path.iterdir()),
        "every": math.ceil(max(extra, cost["copy_seconds"]) / one / 0.01),
    }
    if cost["write_seconds"] > steps * one:
        sys.exit(f"A block must last longer than writing: {row}. Raise --steps.")
    (folder / "row.json").write_text(json.dumps(row))


def main() -> int:
    """Start the ranks, and show or record their measurements."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--batch", type=int, default=16, help="of a rank (default: 16)")
    parser.add_argument("--size", type=int, default=64, help="pixels a side (default: 64)")
    parser.add_argument("--blocks", type=int, default=5, help="of each kind (default: 5)")
    parser.add_argument("--steps", type=int, default=8, help="of a block (default: 8)")
    records.add_option(parser)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.folder:
        work(chosen.folder, chosen.batch, chosen.size, chosen.blocks, chosen.steps)
        return 0
    with tempfile.TemporaryDirectory(prefix="tfcommx_snapshots") as name:
        own = [__file__, "--folder", name, "--batch", chosen.batch, "--size", chosen.size]
        words = ["python", *own, "--blocks", chosen.blocks, "--steps", chosen.steps]
        command = [sys.executable, "-m", "tfcommx.cli.main", "run", "-H", HOSTS, "--min-np", "2"]
        status = subprocess.call(
            [*command, "--reset-limit", "0", "--", *map(str, words)],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )
        if status:
            return status
        row = json.loads((Path(name) / "row.json").read_text())
    print(json.dumps(row, indent=1))
    if chosen.record:
        records.write(chosen.record, [row], records.tidied(["python", *sys.argv]))
    return 0


if __name__ == "__main__":
    sys.exit(main())

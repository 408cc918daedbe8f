#!/usr/bin/env python3
"""Install the wheels of dist/ as a user does, and time it: from nothing to the first trained step.

    make wheels
    python scripts/verify/wheels.py [--record wheels]

An empty environment is made, with this Python and without a compiler on PATH; pip installs the two
wheels and their requirements; then two ranks train, launched by `tfcommx run`. dist/sbom.json lists
the installed packages with their licences.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts"))

from bench import records  # noqa: E402

COMMAND = "python scripts/verify/wheels.py"

TRAIN = """
import keras, numpy as np, tfcommx as cx
from tfcommx.kernels import loader

cx.init(node_size=1)
model = keras.Sequential([keras.layers.Input((8,)), keras.layers.Dense(300), keras.layers.Dense(1)])
scheme = cx.Scheme("hitopk", "mstopk", density=0.1)
model.compile(cx.DistributedOptimizer(keras.optimizers.SGD(0.01), scheme), "mse", jit_compile=False)
inputs = np.random.default_rng(cx.rank()).normal(size=(32, 8))
model.fit(inputs, inputs.sum(1), callbacks=[cx.callbacks.BroadcastState()], verbose=0)
assert loader.library() is not None
print("trained on", cx.size(), "ranks")
"""


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--wheels", type=Path, default=ROOT / "dist", help="their folder")
    records.add_option(parser)
    chosen = parser.parse_args()
    if not list(chosen.wheels.glob("*.whl")):
        raise SystemExit(f"Wheels are required in {chosen.wheels}: make wheels")
    seconds: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        python = folder / "venv" / "bin" / "python"
        # Only the programs of a bare Debian with Python: no compiler
        tools = folder / "tools"
        tools.mkdir()
        for tool in ("bash", "sh", "env", "uname", "hostname", "ps"):
            (tools / tool).symlink_to(shutil.which(tool) or f"/bin/{tool}")
        # How pip reaches an index is a part of the machine
        environment = {
            name: value
            for name, value in os.environ.items()
            if name.startswith("PIP_") or name.lower().endswith("_proxy")
        } | {
            "PATH": f"{python.parent}:{tools}",
            "HOME": str(Path.home()),
            "TF_CPP_MIN_LOG_LEVEL": "3",
        }

        def do(what: str, *words: object) -> str:
            start = time.monotonic()
            done = subprocess.run(
                [str(word) for word in words],
                cwd=folder,
                env=environment,
                text=True,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
            )
            seconds[what] = time.monotonic() - start
            print(f"{what}: {seconds[what]:.0f} s", flush=True)
            if done.returncode:
                raise SystemExit(f"{what} ended with status {done.returncode}:\n{done.stdout}")
            return done.stdout

        do("environment", sys.executable, "-m", "venv", folder / "venv")
        # By path: by name, pip would prefer a higher version of the registry's
        wheels = sorted(path.resolve() for path in chosen.wheels.glob("*.whl"))
        do("install", python, "-m", "pip", "install", "--no-cache-dir", *wheels)
        (folder / "train.py").write_text(TRAIN)
        launch = (python.parent / "tfcommx", "run", "-np", 2, "--", "python", "train.py")
        assert "trained on 2 ranks" in do("first trained step", *launch)
        bom = chosen.wheels / "sbom.json"
        listing = (Path(sys.prefix) / "bin" / "cyclonedx-py", "environment", python)
        subprocess.run([*listing, "--output-file", bom], check=True)
    print(
        f"{sum(seconds.values()):.0f} s in all; {len(json.loads(bom.read_text())['components'])} "
        f"packages in {bom}"
    )
    if chosen.record:
        rows = [{"name": what, "seconds": round(value, 1)} for what, value in seconds.items()]
        rows.append({"name": "in all", "seconds": round(sum(seconds.values()), 1)})
        records.write(chosen.record, rows, COMMAND)
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""All benchmarks still run on small input, and verify what they time: `bench all --smoke`.

All write the same first columns, in the same order, then the rows that they promise.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from bench_runs import bench
from launching import ROOT
from virtual_cluster import ENVIRONMENT

sys.path.insert(0, str(ROOT / "scripts"))
from bench.registry import BENCHMARKS

ROWS = {
    "select": {
        "residual_add", "mstopk", "exact", "dgc", "algorithm1", "tf_top_k", "numpy_argpartition",
    },
    "data": {
        "datacache_whole", "tfdata_decode", "tfdata_cache", "tfdata_cache_same", "datacache",
    },
    "step": {"horovod", "tfcommx"},
    "auto": {"plain", "Scheme()", "auto"},
    "training": {"none", "horovod"},
    "local_updates": {"none", "1/0", "1/2", "2/1"},
    "routes": {"allreduce plain", "hitopk pair32"},
}  # fmt: skip
# One launch each. Training and routes have tests of their own
TOGETHER = [
    pytest.param(["select", "data"], id="one process"),
    pytest.param(["step"], id="two ranks"),
    pytest.param(
        ["auto", "training", "local_updates", "routes"],
        id="longer",
        marks=pytest.mark.exhaustive,
    ),
]


@pytest.mark.parametrize("names", TOGETHER)
def test_smoke(names: list[str], tmp_path: Path) -> None:
    """No line of TensorFlow's, no warning of optimizers that stay plain."""
    rows, output = bench(tmp_path, "all", "--smoke", "--only", *names)
    noise = r"oneDNN|absl|cuda|not wrapped"
    assert not [line for line in output.splitlines() if re.search(noise, line, re.I)]
    for name in names:
        found = {row["name"] for row in rows if row["benchmark"] == name}
        assert found - {"torch_topk"} == ROWS[name]


def test_every_benchmark_has_a_smoke_run_here() -> None:
    every = sorted(name for name, one in BENCHMARKS.items() if not one.needs_gpu)
    assert every == sorted(ROWS) == sorted(one for group in TOGETHER for one in group.values[0])


@pytest.mark.parametrize("wrong", [False, True])
def test_select_on_a_gpu(tmp_path: Path, wrong: bool) -> None:
    """No GPU is here: check_cuda's rows are made up, and NumPy stands in for CuPy.

    What is verified is real.
    """
    folder = tmp_path / "scripts"
    shutil.copytree(ROOT / "scripts" / "bench", folder / "bench")
    row = {"name": "mstopk", "n": 5000, "k": 50, "seconds": 1.0, "verified": True}
    (folder / "check_cuda").write_text(f"#!/bin/sh\necho '{json.dumps(row)}'\n")
    (folder / "check_cuda").chmod(0o755)
    (folder / "cupy.py").write_text(
        "from types import SimpleNamespace as Space\nfrom numpy import *\nimport numpy\nasnumpy "
        "= array\n"
        "cuda = Space(runtime=Space(deviceSynchronize=lambda: None))\n"
        "asarray = lambda given: array(given)  # a copy, as to a GPU\n"
        f"argpartition = lambda x, place: numpy.argpartition({'-x' if wrong else 'x'}, place)\n"
    )
    command = [sys.executable, "scripts/bench", "select_gpu", "--sizes", "5000", "--repeats", "2"]
    command += ["--record", "gpu", "--json", "rows.jsonl"]
    environment = {**ENVIRONMENT, "PYTHONPATH": str(folder)}
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, env=environment)
    lines = (tmp_path / "rows.jsonl").read_text().splitlines()
    rows = {row["name"]: row["verified"] for row in map(json.loads, lines)}
    record = tmp_path / "docs" / "records" / "gpu.json"
    assert record.exists() != wrong  # What is wrong is not kept
    if not wrong:
        kept = json.loads(record.read_text())
        assert (
            kept["command"]
            == "python scripts/bench select_gpu --sizes 5000 --repeats 2 --json rows.jsonl"
        )
        assert {row["name"] for row in kept["rows"]} == set(rows)
    assert (done.returncode, rows["cupy_argpartition"]) == (wrong, not wrong), done.stderr

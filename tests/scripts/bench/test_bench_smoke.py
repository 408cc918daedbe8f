"""All benchmarks run on small input, and verify the results that they time: `bench all --smoke`.

All write the same first columns, in the same order, then the rows that they promise.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
from bench_runs import bench
from launching import ROOT

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
    "end_to_end": {"horovod", "torus"},
}  # fmt: skip
# One launch each. Training and routes have separate tests
TOGETHER = [
    pytest.param(["select", "data"], id="one process", marks=pytest.mark.exhaustive),
    pytest.param(["step"], id="two ranks"),
    pytest.param(
        ["auto", "training", "local_updates", "routes", "end_to_end"],
        id="longer",
        marks=pytest.mark.exhaustive,
    ),
]


@pytest.mark.extended
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
    every = sorted(BENCHMARKS)
    assert every == sorted(ROWS) == sorted(one for group in TOGETHER for one in group.values[0])

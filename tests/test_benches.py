"""The benchmarks that need no cluster still run on small input, verify what they time, and write the rows that they promise."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from launching import ROOT
from test_cluster import ENVIRONMENT


def rows_of(command: list[str], json_file: Path) -> list[dict]:
    ended = subprocess.run([*command, "--json", str(json_file)], cwd=ROOT, env=ENVIRONMENT, text=True, stdout=subprocess.PIPE,
                           stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, timeout=300)
    assert ended.returncode == 0, ended.stdout[-4000:]
    rows = [json.loads(line) for line in json_file.read_text().splitlines()]
    assert all(row["verified"] for row in rows), rows
    return rows


def test_data(tmp_path: Path) -> None:
    png = tmp_path / "data.png"
    rows = rows_of([sys.executable, "scripts/bench_data.py", "--images", "130", "--resolutions", "32", "--repeats", "3", "--firsts", "1",
                    "--as-found", "--png", str(png)], tmp_path / "data.jsonl")
    assert [row["name"] for row in rows] == ["datacache_whole", "tfdata_decode", "tfdata_cache", "tfdata_cache_same", "datacache"]
    assert set(rows[0]) == {"name", "resolution", "images_per_second", "images_per_cpu_second", "limit_images_per_second", "verified"}
    assert png.stat().st_size > 10_000


def test_select(tmp_path: Path) -> None:
    rows = rows_of([sys.executable, "scripts/bench_select.py", "--n", "100000", "--density", "0.01", "--rounds", "4"],
                   tmp_path / "select.jsonl")
    names = {"residual_add", "mstopk", "exact", "dgc", "algorithm1", "tf_top_k", "numpy_argpartition"}
    assert names <= {row["name"] for row in rows} <= names | {"torch_topk"}
    assert set(rows[0]) >= {"name", "device", "dtype", "n", "k", "threads", "seconds", "limit_seconds", "verified"}


def test_step(tmp_path: Path) -> None:
    rows = rows_of(["horovodrun", "-np", "2", "--gloo", sys.executable, "scripts/bench_step.py", "--entries", "100000", "--rounds", "2"],
                   tmp_path / "step.jsonl")
    assert {row["name"] for row in rows} == {"horovod", "tfcommx"}

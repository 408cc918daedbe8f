"""The benchmarks that need no cluster still run on small input, and verify what they time.

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
from launching import ROOT, WORKERS, horovodrun
from test_cluster import ENVIRONMENT

# scripts/benchmark_options.py
COLUMNS = ["name", "n", "density", "seconds", "limit_seconds", "times_limit", "verified"]
COLUMNS += ["repeats", "lowest_seconds", "highest_seconds"]


def rows_of(command: list[str], json_file: Path) -> list[dict]:
    ended = subprocess.run(
        [*command, "--json", str(json_file)],
        cwd=ROOT,
        env=ENVIRONMENT,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        stdin=subprocess.DEVNULL,
        timeout=300,
    )
    assert ended.returncode == 0, ended.stdout[-4000:]
    rows = [json.loads(line) for line in json_file.read_text().splitlines()]
    assert all(row["verified"] for row in rows), rows
    assert all(list(row)[: len(COLUMNS)] == COLUMNS for row in rows), rows
    return rows


def test_data(tmp_path: Path) -> None:
    png = tmp_path / "data.png"
    rows = rows_of(
        [
            sys.executable,
            "scripts/bench_data.py",
            "--images",
            "130",
            "--sizes",
            "32",
            "--repeats",
            "3",
            "--firsts",
            "1",
            "--as-found",
            "--png",
            str(png),
        ],
        tmp_path / "data.jsonl",
    )
    assert [row["name"] for row in rows] == [
        "datacache_whole",
        "tfdata_decode",
        "tfdata_cache",
        "tfdata_cache_same",
        "datacache",
    ]
    assert set(rows[0]) == {
        *COLUMNS,
        "images",
        "images_per_second",
        "images_per_cpu_second",
        "limit_images_per_second",
    }
    assert [row["n"] for row in rows] == [128, 32, 32, 32, 32]
    assert png.stat().st_size > 10_000


def test_select(tmp_path: Path) -> None:
    rows = rows_of(
        [
            sys.executable,
            "scripts/bench_select.py",
            "--sizes",
            "100000",
            "--density",
            "0.01",
            "--repeats",
            "4",
        ],
        tmp_path / "select.jsonl",
    )
    names = {
        "residual_add",
        "mstopk",
        "exact",
        "dgc",
        "algorithm1",
        "tf_top_k",
        "numpy_argpartition",
    }
    assert names <= {row["name"] for row in rows} <= names | {"torch_topk"}
    assert set(rows[0]) >= {*COLUMNS, "device", "dtype", "k", "threads"}


@pytest.mark.parametrize("wrong", [False, True])
def test_select_on_a_gpu(tmp_path: Path, wrong: bool) -> None:
    """No GPU is here: check_cuda's rows are made up, and NumPy stands in for CuPy.

    What is verified is real.
    """
    folder = tmp_path / "scripts"
    (folder / "documents").mkdir(parents=True)
    for name in (
        "bench_select_gpu.py",
        "benchmark_options.py",
        "documents/records.py",
        "verify_selection.py",
    ):
        shutil.copy(ROOT / "scripts" / name, folder / name)
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
    command = [sys.executable, "bench_select_gpu.py", "--sizes", "5000", "--repeats", "2"]
    command += ["--record", "gpu"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    rows = {row["name"]: row["verified"] for row in map(json.loads, lines)}
    record = tmp_path / "docs" / "records" / "gpu.json"
    assert record.exists() != wrong  # What is wrong is not kept
    if not wrong:
        kept = json.loads(record.read_text())
        assert kept["command"] == "python bench_select_gpu.py --sizes 5000 --repeats 2"
        assert {row["name"] for row in kept["rows"]} == set(rows)
    assert (done.returncode, rows["cupy_argpartition"]) == (wrong, not wrong), done.stderr


def test_step(tmp_path: Path) -> None:
    rows = rows_of(
        [
            "horovodrun",
            "-np",
            "2",
            "--gloo",
            sys.executable,
            "scripts/bench_step.py",
            "--sizes",
            "100000",
            "--repeats",
            "2",
        ],
        tmp_path / "step.jsonl",
    )
    assert {row["name"] for row in rows} == {"horovod", "tfcommx"}
    assert all(row["n"] == 100_000 and row["ranks"] == 2 and row["ratio"] > 0 for row in rows)


@pytest.mark.exhaustive
def test_overlap(tmp_path: Path) -> None:
    words = ["-n", "4096", "--repeats", "2", "--bucket-mib", "0.001", "1"]
    command = ["horovodrun", "-np", "2", "--gloo", sys.executable, "scripts/bench_overlap.py"]
    rows = rows_of([*command, *words], tmp_path / "overlap.jsonl")
    assert [(row["name"], row["buckets"]) for row in rows] == [
        ("horovod", 0),
        ("0.001 MiB", 8),
        ("1 MiB", 1),
    ]


@pytest.mark.exhaustive
def test_passes(tmp_path: Path) -> None:
    command = [sys.executable, "scripts/bench_passes.py", "-n", "40000", "--repeats", "2"]
    rows = rows_of(command, tmp_path / "passes.jsonl")
    assert {"flatten", "select", "merge and average", "unflatten"} <= {row["name"] for row in rows}


def test_norms(tmp_path: Path) -> None:
    script = [sys.executable, "scripts/bench_norms.py", "--models", "resnet50", "--repeats", "1"]
    rows = rows_of(script, tmp_path / "norms.jsonl")
    assert [row["name"] for row in rows] == [
        *("norms", "tf_norm", "read"),
        *("lars", "lars_plain", "sgd", "add", "read"),
    ]
    assert {row["n"] for row in rows} == {2 * 25_557_032, 25_557_032}


@pytest.mark.exhaustive
def test_parallel_operator(tmp_path: Path) -> None:
    """The same script on two ranks; rank 0 writes."""
    json_file = tmp_path / "operator.jsonl"
    command = ["scripts/bench_norms.py", "--repeats", "1", "--json", str(json_file)]
    ended = horovodrun(2, command)
    assert ended.status == 0, ended.output[-4000:]
    rows = [json.loads(line) for line in json_file.read_text().splitlines()]
    assert len(rows) == 9 and all(row["verified"] and row["ranks"] == 2 for row in rows)
    assert {row["form"] for row in rows} <= {"local", "parallel"}


# Rows whose `verified` compares times, which say nothing on so little
JUDGED_BY_TIME = {"with a check", "elastic, rank 2 slow"}


@pytest.mark.exhaustive
@pytest.mark.long_wait
def test_benchmarks_on_ranks(tmp_path: Path) -> None:
    """All in one launch, 46 s of a processor.

    No line of TensorFlow's, no warning of optimizers that stay plain.
    """
    ended = horovodrun(3, [str(WORKERS / "run_benches.py"), str(tmp_path)], "mpi")
    assert ended.status == 0, ended.output[-4000:]
    ranks = [line for line in ended.output.splitlines() if "<std" in line]
    assert not [line for line in ranks if re.search(r"oneDNN|absl|cuda|not wrapped", line, re.I)]
    names = {}
    for file in tmp_path.iterdir():
        rows = [json.loads(line) for line in file.read_text().splitlines()]
        assert all(list(row)[: len(COLUMNS)] == COLUMNS for row in rows), rows
        wrong = [row for row in rows if row["verified"] is False]
        assert not {row["name"] for row in wrong} - JUDGED_BY_TIME, wrong
        names[file.stem] = [row["name"] for row in rows]
    assert names == {
        "bench_auto": ["plain", "Scheme()", "auto"],
        "bench_guard": ["no guard", "between checks", "with a check"],
        "bench_strategies": [
            f"{what}, {name}"
            for what in ("pull + forward", "step")
            for name in ("synchronous", "at_once", "layers", "ibatch", "batched")
        ],
        "bench_elastic_averaging": [
            "elastic, ranks alike",
            "elastic, rank 2 slow",
            "sync, ranks alike",
            "sync, rank 2 slow",
        ],
    }

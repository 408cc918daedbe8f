"""The benchmark of the routes still runs, and verifies a few small steps of each route."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from launching import ROOT
from test_benches import COLUMNS
from test_cluster import ENVIRONMENT, needs_cluster

from tfcommx import routes

FIELDS = [*COLUMNS, "route", "wire", "nodes", "slots", "rate_mbit", "wire_bytes"]
WAYS = {(route, wire) for route, row in routes.ROUTES.items() for wire in row.wires}
MESSAGES = {(route, wire) for route, wire in WAYS if routes.ROUTES[route].messages} | {
    ("torus+pipeline", "plain")
}


def bench(folder: Path, *words: str) -> list[dict]:
    """Run it on a gradient of 8,000 entries; return its rows."""
    json_file, png = folder / "found.jsonl", folder / "found.png"
    command = [
        sys.executable,
        "scripts/bench_routes.py",
        "--sizes",
        "8000",
        "--repeats",
        "1",
        "--json",
        str(json_file),
        "--png",
        str(png),
        *words,
    ]
    ended = subprocess.run(
        command,
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
    assert all(
        list(row) == FIELDS and row["verified"] and row["limit_seconds"] > 0 for row in rows
    ), rows
    assert png.stat().st_size > 10_000
    return rows


@pytest.mark.exhaustive
def test_on_one_host(tmp_path: Path) -> None:
    """Routes of messages need MPI; under Gloo each is left out with a word."""
    rows = bench(tmp_path, "--hosts", "localhost:2", "--node-size", "1")
    assert {(row["route"], row["wire"]) for row in rows} == WAYS - MESSAGES


@needs_cluster
@pytest.mark.parametrize("slots", [pytest.param("1", marks=pytest.mark.exhaustive), "2"])
def test_on_a_virtual_cluster(tmp_path: Path, slots: str) -> None:
    rows = bench(
        tmp_path, "--nodes", "2", "--slots", slots, "--launcher", "mpi", "--rate", "200mbit"
    )
    assert {(row["route"], row["wire"]) for row in rows} == WAYS | MESSAGES

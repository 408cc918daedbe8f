"""The benchmark of the routes still runs, and verifies a few small steps of each route."""

from __future__ import annotations

from pathlib import Path

import pytest
from bench_runs import COLUMNS, bench
from virtual_cluster import needs_cluster

from tfcommx import routes

FIELDS = [*COLUMNS, "route", "wire", "nodes", "slots", "rate_mbit", "wire_bytes"]
WAYS = {(route, wire) for route, row in routes.ROUTES.items() for wire in row.wires}
MESSAGES = {(route, wire) for route, wire in WAYS if routes.ROUTES[route].messages} | {
    ("torus+pipeline", "plain")
}


def run(folder: Path, *words: str) -> set[tuple[str, str]]:
    """Run it on a gradient of 8,000 entries; return its routes with their wire formats."""
    png = folder / "found.png"
    rows, _ = bench(
        folder, "routes", "--sizes", "8000", "--repeats", "1", "--png", str(png), *words
    )
    assert all(list(row) == FIELDS and row["limit_seconds"] > 0 for row in rows), rows
    assert png.stat().st_size > 10_000
    return {(row["route"], row["wire"]) for row in rows}


@pytest.mark.exhaustive
def test_on_one_host(tmp_path: Path) -> None:
    """Routes of messages need MPI; under Gloo each is left out with a word."""
    assert run(tmp_path, "--hosts", "localhost:2", "--node-size", "1") == WAYS - MESSAGES


@pytest.mark.exhaustive  # tests/ranks/test_routes.py has sums of all routes on nodes of two
@needs_cluster
@pytest.mark.parametrize("slots", ["1", "2"])
def test_on_a_virtual_cluster(tmp_path: Path, slots: str) -> None:
    words = ["--nodes", "2", "--slots", slots, "--launcher", "mpi", "--rate", "200mbit"]
    assert run(tmp_path, *words) == WAYS | MESSAGES

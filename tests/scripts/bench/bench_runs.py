"""Runs benchmarks as a user does, and checks the columns that all of them share."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import warm_ranks
from launching import ROOT
from virtual_cluster import ENVIRONMENT

# scripts/bench/options.py
COLUMNS = ["name", "n", "density", "seconds", "limit_seconds", "times_limit", "verified"]
COLUMNS += ["repeats", "lowest_seconds", "highest_seconds"]


def bench(folder: Path, *words: str) -> tuple[list[dict], str]:
    """Run `python scripts/bench WORDS`; return its rows, all verified, and its output."""
    json_file = folder / "rows.jsonl"
    ended = subprocess.run(
        [sys.executable, "scripts/bench", *words, "--json", str(json_file)],
        cwd=ROOT,
        env={**ENVIRONMENT, **warm_ranks.environment()},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        stdin=subprocess.DEVNULL,
        timeout=300,
    )
    assert ended.returncode == 0, ended.stdout[-4000:]
    rows = [json.loads(line) for line in json_file.read_text().splitlines()]
    assert all(row["verified"] in (True, None) for row in rows), rows
    shared = [[name for name in row if name != "benchmark"][: len(COLUMNS)] for row in rows]
    assert all(names == COLUMNS for names in shared), rows
    return rows, ended.stdout

"""How `scripts/trials/misuse.py` judges runs, and two of its cases for real."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import pytest
from launching import ROOT
from virtual_cluster import ENVIRONMENT

sys.path.append(str(ROOT / "scripts" / "trials"))
from misuse_cases import MISUSES, Case, Outcome, draw, judge

CASE = Case(0, 2, "a rank is killed", 1, 2, ("BroadcastState",), "number", "root", "dense", False)
DIFFERENT, SAME = {0: "a", 1: "b"}, {0: "a", 1: "a"}


@pytest.mark.parametrize(
    ("misuse", "status", "output", "fingerprints", "verdict"),
    [
        ("none", 0, "", SAME, "equal"),
        ("none", 0, "", DIFFERENT, "silent drift"),
        ("none", 0, "", {0: "a"}, "unnamed error"),
        ("none", 1, "SomeError: Replicas differ", {}, "unnamed error"),
        ("one rank assigns a weight", 1, "x\nReplicas differ at step 5.\n", {}, "named"),
        ("a rank is killed", 1, "ranks are missing: rank 1 on here", {}, "named"),
        ("a rank is killed", None, "", {}, "hang"),
        ("one rank stops", None, "", {0: "a"}, "silent wait"),
        (
            "one rank stops",
            None,
            "Rank 0 has waited 61 s in the exchange of 'w'",
            {0: "a"},
            "named",
        ),
        ("one rank stops", 1, "Horovod has been shut down.", {0: "a"}, "unnamed error"),
        ("a rank is killed", None, "ranks are missing: rank 1 on here", {}, "late"),
        ("not wrapped", 0, "", DIFFERENT, "silent drift"),
        ("not wrapped", 0, "'sgd' is not wrapped and takes steps", DIFFERENT, "named"),
    ],
)
def test_verdicts(
    misuse: str, status: int | None, output: str, fingerprints: dict[int, str], verdict: str
) -> None:
    case = dataclasses.replace(CASE, misuse=misuse)
    assert judge(case, Outcome(status, output, fingerprints, 1.0))[0] == verdict


def test_only_what_a_case_has_wrong_names_it() -> None:
    """Weights that differ are the error of other seeds, and of no run that broadcasts."""
    drift = Outcome(1, "ReplicaError: Replicas differ at the first check.", {}, 1.0)
    other = dataclasses.replace(CASE, misuse="none", own_seeds=True)
    assert judge(other, drift)[0] == "unnamed error"
    assert judge(dataclasses.replace(other, callbacks=()), drift)[0] == "named"


def test_all_misuses_are_drawn_and_seeds_mean_the_same_case() -> None:
    drawn = [draw(seed) for seed in range(400)]
    assert {case.misuse for case in drawn} == set(MISUSES)
    assert {case.ranks for case in drawn} == {2, 4}
    assert drawn == [draw(seed) for seed in range(400)]


@pytest.mark.exhaustive
@pytest.mark.long_wait
def test_cases_for_real(tmp_path: Path) -> None:
    """A rank that is killed; and a deep copy, which is no misuse at all."""
    seeds = {
        next(seed for seed in range(999) if draw(seed, [2]).misuse == misuse): verdict
        for misuse, verdict in (
            ("a rank is killed", "named"),
            ("a deep copy of the optimizer", "equal"),
        )
    }
    rows = tmp_path / "rows.jsonl"
    words = ["--ranks", "2", "--json", str(rows), "--only", *map(str, seeds)]
    subprocess.run([sys.executable, "scripts/trials/misuse.py", *words], cwd=ROOT, env=ENVIRONMENT)
    ended = {row["seed"]: row["verdict"] for row in map(json.loads, rows.read_text().splitlines())}
    assert ended == seeds

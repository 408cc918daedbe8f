"""The reproductions keep their protocol; the laboratory notes have the printed numbers."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from launching import ROOT

from tfcommx.planner.predict import MISSES
from tfcommx.recipes.reader import parse
from tfcommx.recipes.recipe import read

FOLDER = ROOT / "scripts" / "reproduce"
REPORT = (ROOT / "docs" / "laboratory" / "reproduction.md").read_text()


def run(name: str, folder: Path, *words: str) -> tuple[str, list[dict[str, object]]]:
    file = folder / f"{name}.json"
    done = subprocess.run(
        [sys.executable, str(FOLDER / f"{name}.py"), "--json", str(file), *words],
        cwd=ROOT,
        env={"PYTHONPATH": str(ROOT)},
        text=True,
        capture_output=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout, [json.loads(line) for line in file.read_text().splitlines()]


def test_no_goal_is_reached_without_a_scored_row() -> None:
    sys.path.insert(0, str(FOLDER))
    try:
        from reproduction import NOT_SCORED, row, verdict
    finally:
        # Because horovod.py of this folder would be imported in place of the package
        sys.path.remove(str(FOLDER))
    scored = row("any", "one", 1.0, None, 1.01)
    assert "reached" in verdict("any", [scored], {"largest": 0.02})
    assert "MISSED" in verdict("any", [scored | {"role": NOT_SCORED}], {"largest": 0.02})


def test_tables_of_omgs_as_reported(tmp_path: Path) -> None:
    output, rows = run("omgs", tmp_path)
    for line in output.splitlines():
        assert line in REPORT
    assert "13 (13), resnet50 53 (53), inception_v4 150 (150), lstm_ptb 9 (9)" in output
    roles = [row["role"] for row in rows]
    assert (roles.count("scored"), roles.count("calibrated")) == (8, 4)
    for row in rows:
        if row["role"] == "calibrated":
            assert row["calibrated_s"] == pytest.approx(row["published_s"], rel=1e-3)
    scored = [abs(row["error"]) for row in rows if row["role"] == "scored"]
    assert max(scored) < 0.25


@pytest.mark.parametrize(
    ("name", "scored", "calibrated"),
    [
        pytest.param("horovod", 32 + 35 + 35, 6, marks=pytest.mark.exhaustive),
        pytest.param("commlib", 6 + 2 + 1, 3, marks=pytest.mark.exhaustive),
        ("theano_mpi", 12, 4),
        ("ibatch", 7, 1),
        ("linear_pipeline", 5, 0),
    ],
)
def test_other_tables_as_reported(name: str, scored: int, calibrated: int, tmp_path: Path) -> None:
    output, rows = run(name, tmp_path)
    for line in output.splitlines():
        assert line in REPORT or line.startswith("- not scored")
    roles = [row["role"] for row in rows]
    assert (roles.count("scored"), roles.count("calibrated")) == (scored, calibrated)
    assert all(row["reason"] for row in rows if row["role"] == "not scored")


def test_the_record_of_commlib_is_trained_as_the_recipe_says() -> None:
    """All of table 4 was taken for MSTopK's; section 5.6 names 2DTAR from 128 pixels on."""
    data = parse((FOLDER / "commlib.yaml").read_text())
    recipe = read(ROOT / "configs" / "dawnbench_resnet50.yaml")
    columns = {"torus": "2DTAR", "hitopk": "MSTopK"}
    for (name, column, epochs), phase in zip(data["record"]["phases"], recipe.phases, strict=True):
        row = data["rows"][name]
        assert (row["size"], epochs) == (phase.resolution, phase.epochs)
        assert row.get("batch", data["assumed"]["batch"]) == recipe.batch(phase)
        assert column == columns[phase.scheme.route]
        measured = dict(zip(data["columns"], row["throughput"], strict=True))
        assert [other for other, rate in measured.items() if rate] == [column]


def test_the_product_has_the_misses_that_are_reported() -> None:
    assert f"in the product: {tuple(MISSES)}" in REPORT


@pytest.mark.exhaustive
def test_intervals_hold_the_rows_as_reported() -> None:
    """Of all sources, each by the misses of the others and by those of the product."""
    done = subprocess.run(
        [sys.executable, str(FOLDER / "intervals.py")],
        cwd=ROOT,
        env={"PYTHONPATH": str(ROOT)},
        text=True,
        capture_output=True,
    )
    assert done.returncode == 0, done.stderr
    for line in done.stdout.splitlines():
        assert line in REPORT


def test_what_mergings_leave_for_the_lstm(tmp_path: Path) -> None:
    output, rows = run("merging", tmp_path, "--models", "lstm_ptb", "--gbit", "1")
    for line in output.splitlines()[2:]:
        assert line in REPORT
    assert all(row["over_optimal"] >= 1 - 1e-9 for row in rows)
    assert {row["merging"] for row in rows} == {
        "threshold", "single", "each", "mg_wfbp", "omgs", "optimal"
    }  # fmt: skip


@pytest.mark.exhaustive
def test_ends_of_the_forward_pass_as_reported(tmp_path: Path) -> None:
    """The figure of iBatch: no method ends before the optimum or the forward pass alone."""
    output, rows = run("pulls", tmp_path, "--png", str(tmp_path / "pulls.png"))
    report = (ROOT / "docs" / "laboratory" / "strategies.md").read_text()
    for line in output.splitlines():
        assert line in report
    assert len(rows) == 2 * 2 * 2 * 4 and (tmp_path / "pulls.png").stat().st_size > 10_000
    for row in rows:
        same = ("model", "between_gbit", "startup_s")
        (best,) = (
            other
            for other in rows
            if other["method"] == "optimal" and all(other[key] == row[key] for key in same)
        )
        assert row["finish_s"] >= best["finish_s"] > best["forward_s"]

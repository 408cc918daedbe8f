"""Recipes under the supervisor: a later generation resumes only from its own run's checkpoint.

One rank is killed and started again.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import warm_ranks
from launching import QUICK, ROOT, WORKERS

pytestmark = pytest.mark.long_wait
EPOCHS, STEPS = 3, 16


def train(folder: Path, *words: str, lost: str = "") -> subprocess.CompletedProcess[str]:
    """Train lost.yaml; the first generation is lost there."""
    return subprocess.run(
        [
            *(sys.executable, "-m", "tfcommx.cli.main", "train", "tests/workers/lost.yaml"),
            *("--output", str(folder), "-np", "1", *words),
        ],
        cwd=ROOT,
        env={
            **os.environ,
            "PYTHONPATH": f"{QUICK}:{WORKERS}",
            "LOST": lost,
            **warm_ranks.environment(),
        },
        text=True,
        capture_output=True,
        timeout=600,
    )


def supervised(folder: Path, *words: str, lost: str) -> list[dict]:
    """Train with a supervisor; return the generations."""
    table = folder / "generations.json"
    done = train(folder, "--min-np", "1", "--generations", str(table), *words, lost=lost)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Rank 0 on localhost was killed by SIGKILL" in done.stderr
    return json.loads(table.read_text())["generations"]


@pytest.mark.extended
def test_a_run_that_is_lost_behind_its_last_save_is_finished(tmp_path: Path) -> None:
    """It ended with status 2: "A resumed run needs epochs left to train". Only the report lacks."""
    first, second = supervised(tmp_path, lost="close")
    assert first["steps"] == EPOCHS * STEPS and second["steps"] is None
    assert second["how"] == "finished" and second["resumed"]["source"] == "file"
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert [row["epoch"] for row in summary["rows"]] == [1, 2, 3]
    assert summary["replicas_identical"] and summary["test_accuracy"] is not None


@pytest.mark.extended
def test_another_run_s_checkpoint_is_not_taken(tmp_path: Path) -> None:
    """A generation that is lost before its first save is followed by one that begins anew.

    Its report has the cost of its snapshots.
    """
    older = train(tmp_path, "--set", "phases.0.epochs=2")
    assert older.returncode == 0, older.stdout + older.stderr
    assert (tmp_path / "checkpoint" / "checkpoint.json").exists()
    _, second = supervised(tmp_path, "--set", "checkpoint.memory_every=8", lost="step")
    assert second["resumed"]["source"] == "start"
    # With the older run's two epochs these would be fewer
    assert second["steps"] == EPOCHS * STEPS
    cost = json.loads((tmp_path / "summary.json").read_text())["snapshots"]
    assert 1 <= cost["count"] <= EPOCHS * STEPS / 8 and cost["bytes"] > 0
    assert cost["copy_seconds"] > 0 and cost["write_seconds"] > 0

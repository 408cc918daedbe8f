"""The trial of other frameworks: the words that its workers get, and the rows that it makes."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import pytest
from launching import ROOT

sys.path.insert(0, str(ROOT / "scripts" / "trials"))
import frameworks

# Its weights differ between ranks where it exchanges nothing, and where it is told to lose one
WORKER = """
import json, os, sys
method, batch, steps = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
rank = int(os.environ["RANK"])
assert os.environ["WORLD_SIZE"] == "2"
same = method == "ring" and batch == 4
row = {"seconds": [rank + step for step in range(steps)], "bytes": 10 * rank, "parameters": 7}
print(json.dumps(row | {"weights": "" if same else str(rank), "version": "any"}))
"""


@pytest.mark.parametrize(
    ("name", "batch", "verified"),
    [("multi-worker", 4, True), ("multi-worker", 5, False), ("multi-worker none", 4, True)],
)
def test_workers_get_method_batch_and_steps(
    name: str, batch: int, verified: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "frameworks_tensorflow.py").write_text(WORKER)
    monkeypatch.setattr(frameworks, "FOLDER", tmp_path)

    def here(cluster: str, *words: object) -> list[str]:
        """Run a node's command on this machine."""
        assert (cluster, words[:2], words[3]) == ("any", ("run", "--node"), "--")
        return [*map(str, words[4:])]

    monkeypatch.setattr(frameworks.virtual_cluster, "command", here)
    options = argparse.Namespace(nodes=2, batch=batch, repeats=3)
    row = frameworks.other(name, "any", options, tmp_path)
    assert (row["name"], row["verified"]) == (name, verified)
    # Seconds are the slowest rank's; bytes are the mean over ranks
    assert (row["lowest_seconds"], row["step_seconds"], row["highest_seconds"]) == (1, 2, 3)
    assert row["bytes_sent"] == 5

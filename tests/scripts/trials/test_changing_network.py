"""The trial of a network that changes in mid-run, at its smallest: rows, and no cluster left."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from launching import ROOT
from virtual_cluster import needs_cluster

SCRIPT = ROOT / "scripts" / "trials" / "changing_network.py"


@needs_cluster
@pytest.mark.exhaustive
@pytest.mark.long_wait
def test_each_scheme_has_a_row_of_both_halves() -> None:
    words = ["--nodes", "2", "--steps", "60", "--schemes", "Scheme()", "auto sparse"]
    ended = subprocess.run(
        [sys.executable, SCRIPT, *words], capture_output=True, text=True, timeout=300
    )
    rows = json.loads(ended.stdout[ended.stdout.index("[") :])
    assert [row["scheme"] for row in rows] == ["Scheme()", "auto sparse"], ended.stderr
    assert all(row["before"] > 0 and row["after"] > 0 for row in rows)
    assert min(row["after_to_best"] for row in rows) == 1
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True).stdout
    assert "tfcommx-changing-" not in listed

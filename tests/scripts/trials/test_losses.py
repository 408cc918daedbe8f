"""The trial of losses: a long run needs the record of single faults."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import pytest
from launching import ROOT

sys.path.insert(0, str(ROOT / "scripts" / "trials"))
import losses_hour
from bench import records


def test_a_long_run_reads_the_costs_of_faults_before_it_trains(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It read them after its hour, and ended with a traceback if they were missing."""
    assert set(losses_hour.costs(losses_hour.single_faults())) == set(losses_hour.FAULTS)
    monkeypatch.setattr(records, "FOLDER", tmp_path)
    chosen = argparse.Namespace(minutes=60.0, seed=0, record=None)
    with pytest.raises(SystemExit, match=r"losses\.json.*kill"):
        losses_hour.measure(tmp_path, chosen)
    row = {"fault": "kill", "setup": losses_hour.SETUP, "went_on": True}
    (tmp_path / "losses.json").write_text(json.dumps({"rows": [row]}))
    with pytest.raises(SystemExit, match=r"lacks node, cut\b"):
        losses_hour.measure(tmp_path, chosen)

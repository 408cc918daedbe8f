"""The map of schemes: no recommendation is slower than plain Horovod, and the record is current."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from launching import ROOT

sys.path.insert(0, str(ROOT / "scripts"))
sys.path.insert(0, str(ROOT / "scripts" / "documents"))
import figures
import scheme_map
from bench import record

from tfcommx.cli.machines import offer_rows, read_offers

CELLS = figures.read_records().rows("scheme_map")


def test_the_map_has_all_rates_nodes_and_published_models() -> None:
    cells = {(cell["machine"], cell["model"]) for cell in CELLS}
    assert len(cells) == len(scheme_map.PUBLISHED) and len(CELLS) == len(cells) * 7 * 6


def test_no_recommendation_is_slower_than_plain_horovod() -> None:
    """Whatever loss is accepted, and also if all messages miss their predictions alike."""
    for cell in CELLS:
        for schemes in scheme_map.ACCEPTED.values():
            chosen = scheme_map.recommended(cell, schemes)
            for miss in (0.69, 1.0, 1.6):
                assert scheme_map.times_faster(cell, chosen, miss=miss) >= 1, (cell, chosen)


def test_a_later_scheme_must_be_notably_faster() -> None:
    exposed = {"plain Horovod": 1.0, "torus": 0.97, "4 bits": 0.9}
    cell: dict[str, Any] = {"compute_seconds": 1.0, "exposed_seconds": exposed}
    assert scheme_map.recommended(cell, ("plain Horovod", "torus")) == "plain Horovod"
    assert scheme_map.recommended(cell, exposed) == "4 bits"


@pytest.mark.parametrize("machine", ["V100", "A100", "H100"])
def test_the_record_has_what_the_file_predicts(machine: str, tmp_path: Path) -> None:
    content = yaml.safe_load((ROOT / "docs" / "records" / "scheme_map.yaml").read_text())
    settings = {**content["machines"][machine], "model": "resnet50"}
    changed = {**content, "machines": {machine: settings}, "nodes": 16, "between_gbit": [25]}
    (tmp_path / "one.yaml").write_text(yaml.safe_dump(changed, sort_keys=False))
    (cell,) = record.cells_of(offer_rows(read_offers(tmp_path / "one.yaml")))
    names = ("machine", "model", "nodes", "between_gbit")
    (recorded,) = (row for row in CELLS if all(row[name] == cell[name] for name in names))
    assert cell["exposed_seconds"] == pytest.approx(recorded["exposed_seconds"], rel=1e-3)
    assert cell["compute_seconds"] == pytest.approx(recorded["compute_seconds"], rel=1e-3)

"""A plan in a file names a module of its writer's, which reading the file must not import."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tfcommx import routes
from tfcommx.core import PlanError, Scheme, Topology
from tfcommx.planner.plan import Gradient, make_plan

TRAP = "open({!r}, 'w').close()\nfrom tfcommx.routes.allreduce import ROUTE\n"


@pytest.mark.parametrize("field", ["route", "selection", "wire", "compression"])
def test_reading_a_plan_imports_no_module_that_only_the_file_names(
    field: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kept choices, checkpoints and measured steps all hold plans, which are read by this way."""
    (tmp_path / f"trap_{field}.py").write_text(TRAP.format(str(tmp_path / "ran")))
    monkeypatch.syspath_prepend(str(tmp_path))
    plan = make_plan([Gradient("a", (4,), "float32")], {"*": Scheme()}, Topology(1, 2))
    content = json.loads(plan.to_json())
    content["buckets"][0][field] = f"trap_{field}:ROUTE"
    with pytest.raises(PlanError, match=f"'trap_{field}:ROUTE'"):
        routes.read_plan(json.dumps(content))
    assert not (tmp_path / "ran").exists() and f"trap_{field}" not in sys.modules


def test_a_member_that_the_users_scheme_names_is_read(tmp_path: Path) -> None:
    Scheme(selection="tfcommx.selection.rules:EXACT", route="allgather", density=0.5)
    plan = make_plan(
        [Gradient("a", (4,), "float32")],
        {"*": Scheme("allgather", "tfcommx.selection.rules:EXACT", 0.5)},
        Topology(1, 2),
    )
    assert routes.read_plan(plan.to_json()) == plan

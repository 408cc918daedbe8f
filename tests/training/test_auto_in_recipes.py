"""`Scheme("auto")` in recipes: the number of steps it is given, and the choices it stores."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from launching import WORKERS, horovodrun

from tfcommx.core import Topology
from tfcommx.optim.automatic import ExpectedRun
from tfcommx.recipes.recipe import Recipe
from tfcommx.training.dry_run import expected_run
from tfcommx.training.run import Run

LOSSY = {"route": "auto", "selection": "mstopk", "density": 0.001}


def prepared(phases: list[dict[str, Any]], steps: tuple[int, ...]) -> Run:
    """Return a run of which nothing is opened."""
    asked = Recipe(name="small", batch_per_rank=4, phases=phases, learning_rate={"peak": 0.1})
    comm = SimpleNamespace(rank=0, topology=Topology(1, 2))
    return Run(asked, Path(), comm, None, None, steps)  # type: ignore[arg-type]


def test_each_density_of_a_warm_up_has_its_own_steps() -> None:
    """And so a trial that fits into them: none, where an epoch has 60 steps."""
    phase = {"epochs": 10, "resolution": 8, "scheme": LOSSY, "warm_up": [0.25, 0.063, 0.015, 0.004]}
    run = prepared([phase], (60,))
    told = [run.expected_run(epoch) for epoch in range(10)]
    assert [one.steps for one in told] == [60] * 4 + [360] * 6
    assert [one.trial_steps for one in told[:5]] == [1, 1, 1, 1, 7]
    assert expected_run(run, 0) == told[-1]._replace(keeps_choice=False)


def test_phases_that_share_a_scheme_are_told_the_same() -> None:
    """So a run that is resumed in the second one finds the choice of the first."""
    auto = {"resolution": 8, "scheme": {"route": "auto"}}
    phases = [
        {"epochs": 1, "resolution": 8, "scheme": {"route": "torus"}},
        {"epochs": 2, **auto},
        {"epochs": 3, "batch": 2, **auto},
        {"epochs": 1, "resolution": 8, "scheme": {"route": "torus"}},
    ]
    run = prepared(phases, (500, 500, 1000, 500))
    assert run.expected_run(0).steps == run.expected_run(6).steps == 500
    told = ExpectedRun(2 * 500 + 3 * 1000, 500, 4, whole_run=True)
    assert [run.expected_run(epoch) for epoch in (1, 2)] == [told] * 2
    # Under another batch than that of the key nothing is kept
    assert [run.expected_run(epoch) for epoch in (3, 5)] == [told._replace(keeps_choice=False)] * 2
    assert run.expected_run(1, accumulated=3).steps == 4000 // 3


@pytest.mark.exhaustive
def test_a_dry_run_keeps_no_choice_and_a_resumed_run_continues_with_its_own(tmp_path: Path) -> None:
    worker = [str(WORKERS / "auto_in_recipes.py"), str(tmp_path)]
    ended = horovodrun(2, worker, TFCOMMX_CACHE=str(tmp_path / "kept"))
    done = ended.output.count("all as it should be")
    assert ended.status == 0 and done == 2, ended.output[-6000:]

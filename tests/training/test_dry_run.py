"""The synthetic batches of a dry run, and the run length that it expects."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tensorflow as tf

from tfcommx.core import Topology
from tfcommx.optim.automatic import ExpectedRun
from tfcommx.recipes.recipe import Recipe
from tfcommx.training import dry_run
from tfcommx.training.run import Run
from tfcommx.training.steps import STEP_KINDS

PICTURES = (tf.TensorSpec([None, None, None, 3]), tf.TensorSpec([None], tf.int64))
WORDS = tf.TensorSpec([None, None], tf.int32)


def test_rows_of_open_length_are_sentences_and_pictures_of_open_sides_are_not() -> None:
    """Of sentences a batch counts word pieces."""
    pictures, labels = dry_run.made_up(PICTURES, outputs=10, batch=6, resolution=8)
    assert pictures.shape == (6, 8, 8, 3) and labels.shape == (6,)
    others, _ = dry_run.made_up(PICTURES, outputs=10, batch=6, resolution=8, rank=1)
    assert tf.reduce_any(pictures != others)  # Or BroadcastState warns of data not divided
    inputs, labels = dry_run.made_up(({"source": WORDS}, WORDS), 10, batch=24, resolution=8)
    assert inputs["source"].shape == labels.shape == (3, 8)


class Model:
    """Records the steps of each `fit`."""

    def __init__(self, **optimizer: Any) -> None:
        self.optimizer, self.fits = SimpleNamespace(**optimizer), []

    def make_train_function(self, force: bool) -> None:
        """Trace nothing."""

    def fit(self, data: Any, steps_per_epoch: int, **rest: Any) -> None:
        """Take no steps."""
        self.fits.append(steps_per_epoch)


# A strategy at work: its plan has been chosen in the phase before
CHOSEN = SimpleNamespace(executor=SimpleNamespace(plan=SimpleNamespace(buckets=())))


@pytest.mark.parametrize(
    ("ranks", "runs", "accumulated", "fits"),
    [
        (2, {}, None, [19, 6]),
        (2, {}, 3, [57, 6]),
        (2, {("kernel",): CHOSEN}, None, [6]),
        (1, {}, None, [6]),
    ],
)
def test_auto_knows_the_real_run_and_its_trial_is_over_before_steps_are_timed(
    ranks: int,
    runs: dict[Any, Any],
    accumulated: int | None,
    fits: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = Recipe(
        name="small",
        batch_per_rank=4,
        phases=[
            {"epochs": 1, "resolution": 8, "scheme": {"route": "torus"}},
            {"epochs": 2, "resolution": 8, "scheme": {"route": "auto"}},
            {"epochs": 3, "resolution": 12, "batch": 2, "scheme": {"route": "auto"}},
        ],
        learning_rate={"peak": 0.1},
    )
    comm = SimpleNamespace(rank=0, topology=Topology(1, ranks))
    objective = SimpleNamespace(outputs=10, targets=lambda batches: batches)
    run = Run(asked, Path(), comm, None, objective, (500, 500, 1000))  # type: ignore[arg-type]
    monkeypatch.setattr(Run, "samples_of", lambda *_: SimpleNamespace(element_spec=PICTURES))
    monkeypatch.setattr(dry_run, "exchanger_of", lambda model: model.optimizer.exchanger)
    schemes = {"*": asked.phases[1].scheme}
    requested = SimpleNamespace(expected_run=ExpectedRun(), schemes=schemes)
    exchanger = SimpleNamespace(requested=requested, ranks=ranks, runs=runs)
    timing = SimpleNamespace(seconds=dict.fromkeys(STEP_KINDS, 1.0))
    model = Model(exchanger=exchanger, gradient_accumulation_steps=accumulated)
    dry_run._phase(model, run, 1, timing, steps=5)
    steps = (2 * 500 + 3 * 1000) // (accumulated or 1)
    assert requested.expected_run == ExpectedRun(steps, 500, 4, whole_run=True, keeps_choice=False)
    assert model.fits == fits

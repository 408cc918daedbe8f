"""Small runs of one process, in this one: stopped, and resumed with another batch."""

from __future__ import annotations

import fcntl
import json
import logging
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import keras
import numpy as np
import pytest

import tfcommx as cx
from tfcommx import checkpoint
from tfcommx.checkpoint import lock
from tfcommx.collectives import process
from tfcommx.core import ConfigurationError, Topology
from tfcommx.optim import automatic, requested_plan
from tfcommx.recipes.recipe import Recipe
from tfcommx.recipes.tasks.classify import Classification
from tfcommx.training import callbacks, save_and_stop, steps
from tfcommx.training import run as the_run
from tfcommx.training.profile import measure_recipe
from tfcommx.training.run import Run
from tfcommx.training.steps import Position
from tfcommx.training.stop_requests import StopRequests
from tfcommx.training.train import TrainOptions, first_position, make_context, print_stop, train

SAMPLES = 40
SPARSE = {"route": "hitopk", "selection": "mstopk", "density": 0.1, "dense_below": 8}


@pytest.fixture
def pictures(tmp_path: Path) -> Path:
    random = np.random.default_rng(0)
    images = random.integers(0, 256, [SAMPLES, 8, 8, 1], np.uint8)
    arrays = {
        f"{part}_{what}": values
        for part in ("train", "test")
        for what, values in (("images", images), ("labels", np.arange(SAMPLES) % 3))
    }
    np.savez(tmp_path / "pictures.npz", **arrays)
    return tmp_path / "pictures.npz"


def recipe(file: Path, batch: int, **more: Any) -> Recipe:
    return Recipe(
        **{
            "name": "small",
            "data": {"name": "arrays", "file": file, "memory": file.parent},
            "model": {"name": "small_cnn", "filters": [4], "residual": 0},
            "batch_per_rank": batch,
            "phases": [
                {"epochs": 4, "resolution": 8, "scheme": SPARSE, "warm_up": [0.5, 0.4, 0.3]}
            ],
            "learning_rate": {"peak": 0.05, "warm_up_epochs": 0},
            "target": {"score": "accuracy", "at_least": 0},
            **more,
        }
    )


def run(folder: Path, asked: Recipe, stop: Position | None, monkeypatch: Any) -> dict[str, Any]:
    """Train in `folder`, from its checkpoint if it has one; stop after the step `stop`."""
    plain = callbacks.rate_at
    keras.utils.clear_session()

    def rate_at(the_run: Run, phase: int, position: Position) -> float:
        if position == stop:
            (folder / "stop").touch()
        return plain(the_run, phase, position)

    with monkeypatch.context() as patched:
        patched.setattr(save_and_stop, "ASK_STEPS", 1)
        patched.setattr(callbacks, "rate_at", rate_at)
        return train(asked, folder, TrainOptions(resume=True))


@pytest.mark.extended
def test_a_run_is_stopped_and_goes_on_with_another_batch(
    pictures: Path, tmp_path: Path, monkeypatch: Any, capsys: Any, caplog: Any
) -> None:
    """At an epoch's end; then in mid-epoch, whose row covers the steps of both processes."""
    folder = tmp_path / "run"
    with caplog.at_level(logging.WARNING, "tfcommx"):
        first = run(folder, recipe(pictures, batch=4), Position(0, 9), monkeypatch)
    # A mistyped folder would otherwise train anew without a word
    assert f"no checkpoint in {folder}" in caplog.text
    caplog.clear()
    assert first["stopped"]["epoch"] == 1 and first["stopped"]["step"] == 0
    shown = capsys.readouterr().out
    assert "epoch  1/4" in shown and "accuracy >= 0 in epoch 1 after" in shown
    (events,) = (folder / "tensorboard").iterdir()
    assert b"test_accuracy" in events.read_bytes()

    with caplog.at_level(logging.WARNING, "tfcommx"):
        second = run(folder, recipe(pictures, batch=4), Position(1, 5), monkeypatch)
    assert "other settings" not in caplog.text and "no checkpoint" not in caplog.text
    assert second["stopped"]["epoch"] == 1 and second["stopped"]["step"] == 6

    told: list[tuple[int | None, bool]] = []

    def executor_for(*given: Any) -> Any:
        told.append((given[-1].steps, given[-1].whole_run))
        return automatic.executor_for(*given)

    monkeypatch.setattr(requested_plan, "executor_for", executor_for)
    with caplog.at_level(logging.WARNING, "tfcommx"):
        third = run(folder, recipe(pictures, batch=8), Position(2, 0), monkeypatch)
    assert third["stopped"]["epoch"] == 2 and third["stopped"]["step"] == 1
    assert (
        "saved after step 6 of 10; with 1 ranks and a global batch of 8 the epoch has 5 steps, "
        "and continues after step 3"
    ) in caplog.text
    assert "with other settings: batch_per_rank 4 -> 8." in caplog.text
    # Each density of the warm-up has a separate plan, for the steps of one epoch
    assert told == [(5, True)] * 2

    # One step of 5 is none of 1: the epoch begins afresh, and so do its loss and its accuracy
    counted: list[set[float]] = []
    plain = steps.StepCounter.on_train_batch_end

    def on_train_batch_end(self: Any, batch: int, logs: Any = None) -> None:
        kept = self.model.metrics_variables
        counted.append({float(one.numpy()) for one in kept if one.name == "count"})
        plain(self, batch, logs)

    monkeypatch.setattr(steps.StepCounter, "on_train_batch_end", on_train_batch_end)
    rows = run(folder, recipe(pictures, batch=40), None, monkeypatch)["rows"]
    assert counted == [{40.0}, {40.0}] and told == [(5, True)] * 2 + [(1, True)] * 2
    assert [row["steps"] for row in rows] == [10, 5, 1, 1]
    # Each process traced; so did the last epoch, where the density changes under way. Of the
    # second's 6 steps, which count as 3, its first one counts as none
    assert [row["first_steps"] for row in rows] == [1, 1, 1, 1]
    assert all(row["seconds"]["first_step"] > 5 * row["seconds"]["data"] for row in rows)


@pytest.mark.extended
def test_a_finished_run_without_a_report_writes_it_when_it_is_resumed(
    pictures: Path, tmp_path: Path
) -> None:
    """It was refused, "needs epochs left to train", and so was each next call of `compare`."""
    phases = [{"epochs": 2, "resolution": 8, "scheme": SPARSE}]
    short, folder = recipe(pictures, batch=20, phases=phases), tmp_path / "run"
    losses = [row["loss"] for row in train(short, folder)["rows"]]
    (folder / "summary.json").unlink()
    finished = train(short, folder, TrainOptions(resume=True))
    assert [row["loss"] for row in finished["rows"]] == losses
    with pytest.raises(ConfigurationError, match=r"2 of 2\. .*tfcommx report"):
        train(short, folder, TrainOptions(resume=True))


def test_a_profile_needs_no_folder_of_a_run(pictures: Path, monkeypatch: Any) -> None:
    """`tfcommx profile --output FILE` was refused where the current folder cannot be written."""
    monkeypatch.setattr("tfcommx.training.run.why_not_writable", lambda folder: "read-only")
    dense = [{"epochs": 1, "resolution": 8}]
    assert measure_recipe(recipe(pictures, batch=20, phases=dense), 1).profile.variables


def test_a_folder_of_a_running_run_is_refused_before_the_first_step(
    pictures: Path, tmp_path: Path, monkeypatch: Any
) -> None:
    """The second run trained until its third save failed, which may be after hours."""
    folder = tmp_path / "run" / "checkpoint"
    folder.mkdir(parents=True)
    other = {"run": "other", "generation": 0, "host": "node1", "pid": 4711}
    monkeypatch.setattr(lock, "WAIT_SECONDS", 0.1)
    monkeypatch.setattr("tfcommx.training.train.fit_phases", None)
    with (folder / lock.LOCK).open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.write(json.dumps(other))
        file.flush()
        with pytest.raises(checkpoint.SaveError, match="process 4711 on node1"):
            train(recipe(pictures, batch=4), folder.parent)


def test_a_run_whose_last_save_fails_ends_with_an_error(
    pictures: Path, tmp_path: Path, monkeypatch: Any
) -> None:
    """It ended with status 0, and its last epochs were lost."""
    saved = []

    def save(model: keras.Model, folder: Path, epoch: int, *more: Any, **options: Any) -> None:
        saved.append(epoch)
        raise checkpoint.SaveError("no room")

    monkeypatch.setattr(checkpoint, "save", save)
    phases = [{"epochs": 2, "resolution": 8, "scheme": SPARSE}]
    with pytest.raises(checkpoint.SaveError):
        train(recipe(pictures, batch=20, phases=phases), tmp_path / "run")
    assert saved == [0, 1]


@pytest.mark.extended
def test_a_diverged_run_that_is_stopped_names_the_save_that_stays(
    pictures: Path, tmp_path: Path, monkeypatch: Any, capsys: Any
) -> None:
    """It printed "and saved", although the finite save before had been kept."""
    folder = tmp_path / "run"
    run(folder, recipe(pictures, batch=4), Position(0, 9), monkeypatch)
    assert "before step 1 of 10 of epoch 2/4, and saved. Add --res" in capsys.readouterr().out
    diverges = recipe(pictures, batch=4, learning_rate={"peak": 1e38, "warm_up_epochs": 0})
    run(folder, diverges, Position(1, 5), monkeypatch)
    printed = capsys.readouterr().out
    assert "before step 7 of 10 of epoch 2/4, which was not saved." in printed
    assert "--resume continues before step 1 of 10 of epoch 2/4." in printed
    # After the last epoch there is no step that it could name
    ended = SimpleNamespace(
        comm=SimpleNamespace(rank=0),
        checkpoint=tmp_path,
        recipe=recipe(pictures, batch=4),
        steps_of=lambda epoch: 10,
    )
    print_stop(ended, {"epoch": 4, "step": 0, "reason": "a signal"})  # type: ignore[arg-type]
    assert "Stopped by a signal, after the last epoch, which was" in capsys.readouterr().out


@pytest.mark.extended
def test_weights_are_made_equal_at_each_epochs_end(
    pictures: Path, tmp_path: Path, monkeypatch: Any
) -> None:
    """Before they are compared and evaluated; also in the second call of `fit`."""
    equal: list[bool] = []
    plain = callbacks.Evaluation.on_epoch_end

    def on_epoch_end(self: Any, epoch: int, logs: Any = None) -> None:
        (strategy,) = self.model.optimizer.exchanger.runs.values()
        equal.append(bool(strategy.weights_are_equal()))
        plain(self, epoch, logs)

    monkeypatch.setattr(callbacks.Evaluation, "on_epoch_end", on_epoch_end)
    asked = recipe(
        pictures,
        batch=4,
        phases=[{"epochs": 1, "resolution": 8}, {"epochs": 1, "resolution": 12}],
        strategy={"name": "weight_averaging", "every": 7, "outer": {}, "fragments": 2},
    )
    assert len(run(tmp_path / "run", asked, None, monkeypatch)["rows"]) == 2
    assert equal == [True] * 2


def test_what_was_measured_is_scaled_and_never_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Step 1 of 10, with batches five times as large, is step 0 of 2: its time still counts."""
    asked = recipe(tmp_path / "none.npz", batch=20)
    comm = SimpleNamespace(rank=0, topology=Topology(1, 1))
    monkeypatch.setattr(process, "_current", comm)
    task = Classification(1, 3)
    here = Run(asked, tmp_path, comm, None, task, (2,))  # type: ignore[arg-type]
    for step, expected in ((1, (0, 0)), (7, (1, 0)), (10, (2, 0))):
        under_way = {"seconds": {"compute": 3.0}, "steps": step, "first_steps": 1}
        saved = checkpoint.Head(
            save=1, epoch=1, step=step, steps=10, ranks=1, notes={"under_way": under_way}
        )
        first = first_position(here, saved)
        assert first == Position(2, expected[0])
        totals = SimpleNamespace(seconds=float, so_far=dict, bytes_between=int)
        requests, snapshots = StopRequests(None), SimpleNamespace(supervised=None)
        made = make_context(here, first, saved, TrainOptions(), requests, None, totals, snapshots)
        made.counter.on_epoch_begin(2)
        made.timing.on_epoch_begin(2)
        assert (made.counter.measured, made.timing.first_steps) == expected
        assert made.timing.seconds["compute"] == 3.0


def test_another_number_of_steps_is_said_also_at_the_same_step(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Step 1 of 16 is step 1 of 21, after fewer samples: some came twice without a word."""
    asked = recipe(tmp_path / "none.npz", batch=3)
    comm = SimpleNamespace(rank=0, topology=Topology(1, 1))
    here = Run(asked, tmp_path, comm, None, Classification(1, 3), (21,))  # type: ignore[arg-type]
    for before, warned in ((21, False), (16, True)):
        saved = checkpoint.Head(save=1, epoch=0, step=1, steps=before, ranks=1)
        with caplog.at_level(logging.WARNING, "tfcommx"):
            assert first_position(here, saved) == Position(1, 1)
        assert ("some samples come twice" in caplog.text) == warned


def test_a_run_resumed_with_fewer_epochs_has_ended(tmp_path: Path) -> None:
    """After a save in the middle of an epoch, rank 0 alone ended with an IndexError."""
    asked = recipe(tmp_path / "none.npz", batch=20)
    comm = SimpleNamespace(rank=0, topology=Topology(1, 1))
    here = Run(asked, tmp_path, comm, None, Classification(1, 3), (2,))  # type: ignore[arg-type]
    for epoch in (asked.epochs, asked.epochs + 1):
        saved = checkpoint.Head(save=1, epoch=epoch - 1, step=7, steps=10, ranks=1)
        assert first_position(here, saved) == Position(epoch)


@pytest.mark.parametrize("name", ["pictures.npz", "pictures.npz/run"])
def test_an_output_that_cannot_be_a_folder_is_refused_first(
    name: str, pictures: Path, tmp_path: Path
) -> None:
    """Training ended at the first save, which may be hours later."""
    with pytest.raises(ConfigurationError, match=r"pictures\.npz.* rank 0 "):
        train(recipe(tmp_path / "missing.npz", 8), tmp_path / name)


def test_a_restart_without_room_does_not_lose_its_snapshots(
    tmp_path: Path, monkeypatch: Any, caplog: Any
) -> None:
    """A full disk ended a supervised run at its restart, and the snapshots in memory with it."""
    folder = tmp_path / "run"
    folder.touch()  # No folder can be made there
    with pytest.raises(ConfigurationError, match=re.escape(str(folder))):
        the_run._require_writable(cx.init(), folder)
    monkeypatch.setattr(the_run, "continues_from_memory", lambda checkpoints: True)
    the_run._require_writable(cx.init(), folder)
    assert [str(folder) in record.message for record in caplog.records] == [True]

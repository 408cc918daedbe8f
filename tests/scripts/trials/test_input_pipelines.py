"""The trial of input pipelines: its loop sees wrong feeding, and its counts include workers."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from launching import ROOT

sys.path.insert(0, str(ROOT / "scripts" / "trials"))
import input_pipelines
import input_pipelines_run as run

BUSY = "import time\nwhile time.process_time() < 0.2: pass\nprint(flush=True); input()"


@pytest.fixture
def task(tmp_path: Path) -> run.Task:
    """128 photographs in two classes; nothing decodes them."""
    photos = tmp_path / "photos"
    for place in range(130):
        file = photos / f"class{place % 2}" / f"{place}.jpg"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(b"x")
    copied = tmp_path / "copied"
    input_pipelines.photographs(photos, copied, None)
    return run.Task("any", str(copied), "", "", size=8, store=9, epochs=2)


def feed(labels: list[int], low: float = 0.0, kind: str = "float32") -> run.Epoch:
    """Feed these labels in each epoch, with pixels from `low` to 1."""
    images = np.linspace(low, 1, run.BATCH * 8 * 8 * 3).reshape(run.BATCH, 8, 8, 3).astype(kind)

    def epoch() -> Iterator[run.Batch]:
        for part in np.split(np.array(labels), len(labels) // run.BATCH):
            yield images, part

    return epoch


def test_photographs_are_whole_batches_of_all_workers(task: run.Task) -> None:
    assert len(task.files(task.photos)) == run.BATCH * run.WORKERS
    assert sorted(task.mixed(task.photos)) == sorted(task.files(task.photos))


def test_right_feeding_is_verified(task: run.Task) -> None:
    labels = [label for _, label in task.mixed(task.photos)]
    row = run.measure(task, lambda _: feed(labels))
    assert row["verified"] and row["layout"] == "NHWC" and row["images"] == 128
    assert row["lowest"] <= row["images_per_cpu_second"] <= row["highest"]
    np.testing.assert_allclose(row["means"], 0.5, atol=0.01)


@pytest.mark.parametrize("wrong", [{"low": 0.5}, {"low": -1.0}, {"kind": "float64"}])
def test_wrong_pixels_are_not_verified(task: run.Task, wrong: dict) -> None:
    labels = [label for _, label in task.files(task.photos)]
    assert not run.measure(task, lambda _: feed(labels, **wrong))["verified"]


def test_a_sample_in_place_of_another_is_not_verified(task: run.Task) -> None:
    labels = [label for _, label in task.files(task.photos)]
    labels[labels.index(0)] = 1
    assert not run.measure(task, lambda _: feed(labels))["verified"]


def test_cpu_time_and_memory_include_a_worker_before_and_after_it_ends() -> None:
    seconds, memory = run.cpu_seconds(), input_pipelines.proportional_bytes(os.getpid())
    words = [sys.executable, "-c", BUSY]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as worker:
        worker.stdout.readline()
        assert list(run.descendants(os.getpid())).count(worker.pid) == 1
        assert run.cpu_seconds() - seconds >= 0.2
        assert input_pipelines.proportional_bytes(os.getpid()) > memory
        worker.communicate(b"\n")
    time.sleep(0.01)
    assert run.cpu_seconds() - seconds >= 0.2


def test_the_best_of_the_others_is_named_and_other_colours_are_wrong() -> None:
    rows = [
        {"name": name, "n": 224, "images_per_cpu_second": rate, "means": means, "verified": True}
        for name, rate, means in (
            ("datacache", 9000, [0.5, 0.45, 0.4]),
            ("ffcv pixels", 3000, [0.5, 0.45, 0.4]),
            ("dali", 1000, [0.4, 0.45, 0.5]),
        )
    ]
    input_pipelines.judge(rows)
    assert [row["verified"] for row in rows] == [True, True, False]
    assert [row["datacache_is"] for row in rows] == [1, 3, 9]
    assert "3.0 times ffcv pixels" in input_pipelines.note(rows)

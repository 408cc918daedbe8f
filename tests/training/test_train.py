"""One process trains a shipped recipe, cut short, through the command line.

It writes all that a report needs.
"""

import json
import os
import re
import subprocess
import sys

import keras
import numpy as np
import pytest
import warm_ranks
from launching import QUICK, ROOT, horovodrun

from tfcommx import report

pytestmark = pytest.mark.long_wait
SHORT = [
    "batch_per_rank=1000",
    "data.limit=20000",
    "model.filters=[4, 8]",
    "phases.0.epochs=1",
    "phases.0.resolution=8",
    "phases.1.epochs=1",
    "phases.1.resolution=8",
    "phases.2.epochs=1",
    "phases.2.resolution=10",
    "phases.2.scheme={route: torus}",  # A change of scheme
    "node_size=1",
    "target={score: top5, at_least: 0.6}",
]

# A program that does not import tfcommx, because a checkpoint must outlive the library that wrote
# it.
LOAD = """
import sys, keras
model = keras.saving.load_model(sys.argv[1])
print(model.count_params(), type(model.optimizer).__name__, model.optimizer.iterations.numpy())
assert not any(name.startswith("tfcommx") for name in sys.modules)
"""


def start(folder, *options, stderr=None):
    words = [word for setting in SHORT for word in ("--set", setting)]
    command = [
        sys.executable,
        "-m",
        "tfcommx.cli.main",
        "train",
        "configs/fashion_mnist.yaml",
        "--output",
        str(folder),
        *words,
        *options,
    ]
    return subprocess.Popen(
        command,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": QUICK, **warm_ranks.environment(alone=True)},
        text=True,
        stdout=subprocess.PIPE,
        stderr=stderr,
    )


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    process = start(folder)
    printed, _ = process.communicate()
    assert process.returncode == 0
    return folder, printed


def saved_model(folder):
    return max((folder / "checkpoint").glob("tfcommx-*.keras"))  # Three are kept


@pytest.mark.extended
def test_a_killed_run_resumes_to_the_same_weights(run, tmp_path):
    """kill -9 in the second epoch, then --resume: as the run that was not killed.

    Weights and accuracy are equal.

    The checkpoint of an earlier run is reported before it is replaced, and its summary is removed.
    """
    (tmp_path / "checkpoint").mkdir()
    (tmp_path / "checkpoint" / "checkpoint.json").write_text('{"save": 4, "epoch": 4, "ranks": 1}')
    (tmp_path / "summary.json").write_text("{}")
    process, printed = start(tmp_path, stderr=subprocess.STDOUT), ""
    for line in process.stdout:
        printed += line
        if line.startswith("epoch  1/3"):
            process.kill()
    process.wait()
    assert f"replaces the checkpoint of 5 epochs in {tmp_path}" in printed
    assert not (tmp_path / "summary.json").exists()
    process = start(tmp_path, "--resume")
    printed, _ = process.communicate()
    assert process.returncode == 0 and "epoch  1/3" not in printed
    assert report.read(tmp_path)["test_accuracy"] == report.read(run[0])["test_accuracy"]
    for one, other in zip(
        *(keras.saving.load_model(saved_model(folder)).variables for folder in (run[0], tmp_path)),
        strict=True,
    ):
        np.testing.assert_array_equal(one.numpy(), other.numpy())


@pytest.mark.exhaustive
def test_a_recipe_reshuffles_samples_between_nodes(tmp_path):
    """A half of each node's 10,000 images is offered before an epoch, a half of that comes back.

    So 2,500 come from the memory of the other node.
    """
    words = [
        word for setting in [*SHORT, "data.reshuffle_fraction=0.5"] for word in ("--set", setting)
    ]
    ended = horovodrun(
        2,
        [
            "-m",
            "tfcommx.cli.main",
            "train",
            "configs/fashion_mnist.yaml",
            "--output",
            str(tmp_path),
            *words,
        ],
    )
    assert ended.status == 0, ended.output[-4000:]
    summary = report.read(tmp_path)
    loaders = [row["loader"] for row in summary["rows"]]
    assert summary["nodes"] == 2 and summary["replicas_identical"]
    assert [loader["samples"] for loader in loaders] == [10_000] * 3
    assert loaders[0]["arrived"] == 0 and all(
        2_300 < loader["arrived"] < 2_700 for loader in loaders[1:]
    )
    assert all(loader["hit_memory"] == 1 for loader in loaders[1:])


def test_the_summary(run):
    folder, printed = run
    summary = report.read(folder)
    assert (summary["ranks"], summary["nodes"], summary["epochs"]) == (1, 1, 3)
    assert (
        summary["bytes_between_nodes"] == summary["bytes_between_nodes_dense"] == 0
        and summary["replicas_identical"] is True
    )
    # Guessing gives 0.1
    assert summary["test_accuracy"] == summary["rows"][-1]["test_accuracy"] > 0.3
    right = summary["test_accuracy"] * 10_000
    assert round(right) == pytest.approx(right)  # counted over all 10,000
    assert [row["route"] for row in summary["rows"]] == ["hitopk", "hitopk", "torus"]
    assert all(value >= 0 for row in summary["rows"] for value in row["seconds"].values())
    assert sum(sum(row["seconds"].values()) for row in summary["rows"]) < summary["seconds"]
    assert (
        len(re.findall(r"^epoch .* s remaining$", printed, re.M)) == 3 and str(folder) in printed
    )  # no terminal: a line per epoch
    assert json.loads((folder / "summary.json").read_text()) == summary


def test_the_time_to_the_target(run):
    folder, printed = run
    summary = report.read(folder)
    rows, target = summary["rows"], summary["target"]
    first = next(row for row in rows if row["test_top5"] >= 0.6)
    assert (target["epoch"], target["seconds"]) == (first["epoch"], first["clock_seconds"])
    said = f"top5 >= 0.6 in epoch {first['epoch']} after {first['clock_seconds']:.1f} s"
    # When it was reached, and in the report
    assert printed.count(said) == 2
    clock = [row["clock_seconds"] for row in rows]
    untimed = sum(row["seconds"][kind] for row in rows for kind in ("evaluation", "saving"))
    assert clock == sorted(clock) and clock[0] > 0 and clock[-1] < summary["seconds"] - untimed + 1


def test_the_checkpoint_loads_without_tfcommx(run):
    done = subprocess.run(
        [sys.executable, "-c", LOAD, str(saved_model(run[0]))],
        cwd=run[0],
        env={**os.environ, "PYTHONPATH": QUICK, **warm_ranks.environment(alone=True)},
        text=True,
        capture_output=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    count, kind, steps = done.stdout.split()
    assert (
        int(count) == report.read(run[0])["parameters"] and kind == "SGD" and int(steps) == 3 * 20
    )

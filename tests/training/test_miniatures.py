"""The miniatures survive kill -9 of all ranks, and the whole ImageNet recipe its dry run."""

from __future__ import annotations

import contextlib
import io
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import keras
import matplotlib
import numpy as np
import pytest
import tensorflow as tf
from launching import ROOT
from PIL import Image

# Custom layers of the saved models register themselves

pytestmark = [pytest.mark.exhaustive, pytest.mark.long_wait]

RANKS = 4
# Few steps, in all phases: four an epoch, and about twenty
SHORT = {
    "dawnbench_miniature": [
        "data.limit=512",
        "data.test_limit=400",
        "model.width=4",
        "phases.0.epochs=2",
        "phases.1.epochs=1",
        "phases.2.epochs=1",
        "learning_rate.warm_up_epochs=1",
    ],
    "translate_miniature": [
        "batch_per_rank=2048",
        "model.blocks=1",
        "model.width=16",
        "model.inner=32",
        "phases.0.epochs=2",
        "phases.0.resolution=12",
        "phases.0.warm_up=[0.25]",
        "phases.1.epochs=1",
        "phases.1.resolution=12",
        "task.bleu_sentences=8",
    ],
}


def start(name: str, folder: Path, *words: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "tfcommx.cli.main", "train", f"configs/{name}.yaml"]
    command += ["--processes", str(RANKS), "--output", str(folder), *words]
    return subprocess.Popen(
        command,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )


def finished(process: subprocess.Popen[str]) -> str:
    printed, _ = process.communicate(timeout=1500)
    assert process.returncode == 0, printed[-6000:]
    return printed


def settings(name: str) -> list[str]:
    changes = [*SHORT[name], "checkpoint.every_steps=3"]
    return [word for change in changes for word in ("--set", change)]


def saves(folder: Path) -> int:
    """Return the number of the newest checkpoint; -1 without one."""
    file = folder / "checkpoint" / "checkpoint.json"
    return int(json.loads(file.read_text())["save"]) if file.exists() else -1


def kill_ranks(folder: Path) -> int:
    """Kill all processes of a run at once; return how many there were."""
    killed = 0
    for place in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            words = (place / "cmdline").read_bytes().split(b"\0")
            if str(folder).encode() in words and b"--no-report" in words:
                os.kill(int(place.name), signal.SIGKILL)
                killed += 1
    return killed


def left(folder: Path) -> dict[str, np.ndarray]:
    """Return the content of the last checkpoint: weights, optimizer, and each rank's own state."""
    files = folder / "checkpoint"
    save = saves(folder)
    model = keras.saving.load_model(files / f"tfcommx-{save:04d}.keras")
    variables = [*model.variables, *model.optimizer.variables]
    found = {f"{at} {one.name}": one.numpy() for at, one in enumerate(variables)}
    # Keras does not save the seeds, which are part of each rank's own state
    found = {name: value for name, value in found.items() if "seed_generator" not in name}
    for rank in range(RANKS):
        with np.load(files / f"residuals-{save:04d}-rank-{rank:04d}.npz") as kept:
            # A head has the number of its save, and a tag that is drawn for it
            arrays = {name: kept[name] for name in kept.files if name != "head"}
        found |= {f"rank {rank} {name}": array for name, array in arrays.items()}
    return found


@pytest.mark.parametrize("name", SHORT)
def test_killed_miniatures_are_resumed_bit_for_bit(name: str, tmp_path: Path) -> None:
    """Twice, at a random time after a checkpoint in mid-epoch or at an epoch's end."""
    finished(start(name, tmp_path / "whole", *settings(name)))
    folder, resume = tmp_path / "killed", ()
    for _ in range(2):
        process, before = start(name, folder, *settings(name), *resume), saves(folder)
        wanted = before + random.randint(1, 3)
        while saves(folder) < wanted:
            assert process.poll() is None, process.communicate()[0][-6000:]
            time.sleep(0.05)
        time.sleep(random.uniform(0, 0.5))
        assert kill_ranks(folder) >= RANKS
        process.communicate()
        resume = ("--resume",)
    finished(start(name, folder, *settings(name), *resume))
    whole, killed = left(tmp_path / "whole"), left(folder)
    assert whole.keys() == killed.keys()
    differ = [name for name in whole if whole[name].tobytes() != killed[name].tobytes()]
    assert not differ
    rows = [
        [(row["loss"], row["test_accuracy"]) for row in json.loads(file.read_text())["rows"]]
        for file in (tmp_path / "whole" / "summary.json", folder / "summary.json")
    ]
    assert rows[0] == rows[1]


def write_shards(folder: Path, split: str, count: int, shards: int) -> None:
    """Write crops of a photograph as ImageNet's shards have them."""
    photo = Image.open(Path(matplotlib.get_data_path()) / "sample_data" / "grace_hopper.jpg")
    for shard in range(shards):
        with tf.io.TFRecordWriter(str(folder / f"{split}-{shard:05}-of-{shards:05}")) as writer:
            for number in range(shard, count, shards):
                out = io.BytesIO()
                photo.crop((number, 0, number + 450, 380 + number)).save(out, "JPEG")
                image = tf.train.BytesList(value=[out.getvalue()])
                label = tf.train.Int64List(value=[1 + 37 * number % 1000])
                feature = {
                    "image/encoded": tf.train.Feature(bytes_list=image),
                    "image/class/label": tf.train.Feature(int64_list=label),
                }
                whole = tf.train.Example(features=tf.train.Features(feature=feature))
                writer.write(whole.SerializeToString())


def test_the_whole_imagenet_recipe_passes_its_dry_run(tmp_path: Path) -> None:
    """All phases, schemes and switches, in half precision; the network with fewer blocks, filters.

    docs/laboratory/miniatures.md has the real one.
    """
    write_shards(tmp_path, "train", 24, 3)
    write_shards(tmp_path, "validation", 8, 2)
    changes = [f"data.folder={tmp_path}", f"data.memory={tmp_path}", "batch_per_rank=2"]
    changes += ["phases.3.batch=1", "model.blocks=[1, 1, 1, 1]", "model.width=4"]
    changes += ["node_size=2", "threads=1"]
    words = [word for change in changes for word in ("--set", change)]
    printed = finished(start("dawnbench_resnet50", tmp_path / "dry", "--dry-run", *words))
    found = json.loads((tmp_path / "dry" / "dry_run.json").read_text())
    assert (found["ranks"], found["nodes"], len(found["phases"])) == (RANKS, 2, 4)
    sizes = [(one["epochs"], one["resolution"], one["global_batch"]) for one in found["phases"]]
    assert sizes == [(13, 96, 8), (11, 128, 8), (3, 224, 8), (1, 288, 4)]
    routes = [set(one["bytes_by_route"]) for one in found["phases"]]
    assert "hitopk" in routes[0] and all(one == {"torus"} for one in routes[1:])
    assert [one["steps"] for one in found["phases"]] == [3, 3, 3, 6]
    assert "the whole run:" in printed and not (tmp_path / "dry" / "checkpoint").exists()

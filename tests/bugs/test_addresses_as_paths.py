"""Addresses of object stores were taken for paths: all was written to a local folder `./gs:/`.

A training on a preemptible machine saved for hours into a disk that went with the machine.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import pytest

import tfcommx as cx
from tfcommx.checkpoint.snapshots import Snapshots
from tfcommx.cli.main import main
from tfcommx.core import Links, MeasuredStep, Profile, local_path
from tfcommx.data.sources import Folder
from tfcommx.launch.launcher import cache_folder
from tfcommx.recipes.reader import RecipeError
from tfcommx.recipes.recipe import read as read_recipe
from tfcommx.routes import read_plan

CONFIG = Path(__file__).resolve().parents[2] / "configs" / "fashion_mnist.yaml"
ADDRESSES = ["gs://my-bucket/run", "s3://my-bucket/run", "hdfs://host/run", "file:///tmp/run"]


@pytest.fixture(autouse=True)
def empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Begin in an empty folder, which stays empty."""
    monkeypatch.chdir(tmp_path)
    yield
    assert not os.listdir(tmp_path)


@pytest.fixture
def model() -> keras.Model:
    cx.init()
    net = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    net.compile(cx.DistributedOptimizer(keras.optimizers.SGD(0.1)), "mse", jit_compile=False)
    return net


@pytest.mark.parametrize("address", ADDRESSES)
def test_checkpoints(address: str, model: keras.Model) -> None:
    takers: list[Callable[[], Any]] = [
        lambda: cx.checkpoint.Checkpoint(address),
        lambda: cx.checkpoint.Checkpoint(Path(address)),
        lambda: cx.checkpoint.RestoreRankValues(address),
        lambda: cx.checkpoint.save(model, address, 0),
        lambda: cx.checkpoint.restore(model, address),
        lambda: cx.checkpoint.last(address),
        lambda: cx.checkpoint.next_epoch(address),
        lambda: Snapshots(model, address, 10),
    ]
    received = f"'{address.partition('/')[0]}/"
    for taker in takers:
        with pytest.raises(cx.ConfigurationError, match=f"`folder` .*{received}"):
            taker()


@pytest.mark.parametrize("address", ADDRESSES)
def test_data_and_files(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = {"topology": cx.Topology(1, 1), "rank": 0}
    takers: list[Callable[[], Any]] = [
        lambda: cx.DataCache(address, **cluster),
        lambda: cx.DataCache("photos", disk=address, **cluster),
        lambda: cx.DataCache("photos", memory=Path(address), **cluster),
        lambda: Folder(address),
        lambda: Profile.read(address),
        lambda: Links.read(address),
        lambda: MeasuredStep.read(address, read_plan),
        cache_folder,
    ]
    monkeypatch.setenv("TFCOMMX_CACHE", address)
    received = f"'{address.partition('/')[0]}/"
    for taker in takers:
        with pytest.raises(cx.TfcommxError, match=received):
            taker()
    monkeypatch.delenv("TFCOMMX_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", address)
    with pytest.raises(cx.ConfigurationError, match="XDG_CACHE_HOME"):
        cache_folder()


@pytest.mark.parametrize("path", ["/scratch/$USER/run", "runs/job-${SLURM_JOB_ID}", "~/${X:-y}"])
def test_variables_within_a_path_are_refused(path: str) -> None:
    """All jobs and users shared a folder that was named after the variable."""
    with pytest.raises(cx.ConfigurationError, match="without variables"):
        cx.checkpoint.Checkpoint(path)
    assert local_path("folder", "prices in US$/us$.json").name == "us$.json"


@pytest.mark.parametrize("address", ["gs://my-bucket/run", "$SCRATCH/run"])
@pytest.mark.parametrize("key", ["links", "data.memory", "data.disk", "data.folder"])
def test_recipes(key: str, address: str) -> None:
    with pytest.raises(RecipeError, match=f"{key}: .*`{key.split('.')[-1]}`"):
        read_recipe(CONFIG, [f"{key}={address}"])


@pytest.mark.parametrize(
    "words",
    [
        ["train", str(CONFIG), "--output", "gs://my-bucket/run"],
        ["train", "gs://my-bucket/recipe.yaml"],
        ["report", "gs://my-bucket/run"],
        ["report", "s3://my-bucket/run"],
        ["compare", str(CONFIG), "--output", "gs://my-bucket/run"],
        ["probe", "--output", "gs://my-bucket/links.json"],
        ["profile", str(CONFIG), "--output", "gs://my-bucket/profile.json"],
        ["plan", "resnet50", "--links", "gs://my-bucket/links.json"],
        ["simulate", "--json", "gs://my-bucket/rows.json"],
        ["explain", "gs://my-bucket/timeline.json"],
        ["machines", "gs://my-bucket/machines.yaml"],
        ["schema", "gs://my-bucket/recipe.schema.json"],
        ["run", "-np", "2", "--min-np", "1", "--generations", "gs://my-bucket/t.json", "true"],
        ["cache", "status", "--disk", "gs://my-bucket/cache"],
    ],
    ids=" ".join,
)
def test_commands(
    words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["tfcommx", *words])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    assert re.search("'(gs|s3):/", capsys.readouterr().err)


def test_a_variable_that_is_not_set(model: keras.Model) -> None:
    """`save(model, os.environ.get("RUN", ""))` saved into the working directory."""
    with pytest.raises(cx.ConfigurationError, match=r"`folder` .*''"):
        cx.checkpoint.save(model, "", 0)

"""Files that were cut, emptied or changed are refused by an error that names them.

Of 400 damaged files of residuals, 366 ended a restart with BadZipFile, EOFError, OverflowError or
KeyError, and no file name. An empty build.json blocked both the import and the rebuild.
"""

from __future__ import annotations

import json
import random
import runpy
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
from drawing import case

import tfcommx as cx
from tfcommx import routes
from tfcommx.checkpoint.files import residuals_name
from tfcommx.checkpoint.records import read_own, read_residuals
from tfcommx.comparison.step_times import measure
from tfcommx.comparison.trainings import Setup, TrainingError, trained
from tfcommx.core import (
    NOMINAL,
    Bucket,
    DataError,
    Links,
    MeasuredStep,
    NoOptions,
    Plan,
    Profile,
    Timeline,
    Topology,
    VariableProfile,
)
from tfcommx.core.files import crc_of
from tfcommx.kernels import loader
from tfcommx.measure.horovod_timeline import read_timeline
from tfcommx.recipes.datasets.picture_files import ArrayFile
from tfcommx.recipes.families import DataRank
from tfcommx.recipes.reader import RecipeError
from tfcommx.recipes.recipe import read as read_recipe
from tfcommx.recipes.text import corpus
from tfcommx.report.dry_run import read_alone
from tfcommx.report.summary import ReportError

ROOT = Path(__file__).resolve().parents[2]


def damages(data: bytes, count: int = 60) -> Iterator[bytes]:
    """Yield an empty file, cut ones, and ones in which bytes are others."""
    chance = random.Random(len(data))
    yield from (b"", b"{", b"[]", b"null", b"[" * 100_000, b'{"a": 1e999}')
    for _ in range(count // 3):
        yield data[: chance.randrange(len(data))]
    for number in range(count - count // 3):
        changed = bytearray(data)
        for _ in range(1 + number % 5):
            at = chance.randrange(len(data))
            changed[max(at, len(data) - 200) if number % 2 else at] = chance.randrange(256)
        yield bytes(changed)


def check(path: Path, read: Callable[[], Any], error: type[Exception], count: int = 60) -> None:
    """Check that a damaged file is read, or refused by an error of this class that names it."""
    whole, refused = path.read_bytes(), 0
    read()
    for data in damages(whole, count):
        path.write_bytes(data)
        try:
            read()
        except error as problem:
            assert str(path) in str(problem)
            refused += 1
    assert refused > count // 4
    path.write_bytes(whole)
    read()


@pytest.fixture
def model() -> keras.Model:
    cx.init()
    keras.utils.set_random_seed(1)
    net = keras.Sequential([keras.Input((8,)), keras.layers.Dropout(0.1), keras.layers.Dense(4)])
    net.compile(cx.DistributedOptimizer(keras.optimizers.SGD(0.1, 0.9)), "mse", jit_compile=False)
    net.fit(np.ones((8, 8)), np.ones((8, 4)), verbose=0)
    return net


@pytest.mark.parametrize("read", [read_residuals, read_own])
def test_the_file_of_a_rank(
    read: Callable[[Path], Any], model: keras.Model, tmp_path: Path
) -> None:
    cx.checkpoint.save(model, tmp_path, 0)
    path = tmp_path / residuals_name(0, 0)
    check(path, lambda: read(path), cx.CheckpointError, 400)


def test_a_checkpoint_whose_files_are_damaged_names_them(
    model: keras.Model, tmp_path: Path
) -> None:
    cx.checkpoint.save(model, tmp_path, 0)
    check(
        tmp_path / "tfcommx-0000.keras",
        lambda: cx.checkpoint.restore(model, tmp_path),
        cx.CheckpointError,
        30,
    )
    path = tmp_path / "checkpoint.json"
    check(path, lambda: cx.checkpoint.last(tmp_path), cx.CheckpointError)


def test_exact_variables_that_are_damaged_name_their_file(
    model: keras.Model, tmp_path: Path
) -> None:
    """Only the records of the file were checked: a BadZipFile that named no file."""
    cx.checkpoint.save(model, tmp_path, 0)
    path = tmp_path / residuals_name(0, 0)
    with np.load(path) as stored:
        arrays = dict(stored)
    np.savez(path, **{**arrays, "exact": np.array("{")})
    with pytest.raises(cx.CheckpointError, match=path.name):
        cx.checkpoint.restore(model, tmp_path)


@pytest.mark.parametrize(
    "name", ["tfcommx-0001.keras", "residuals-0001-rank-0000.npz", case("missing", kept=False)]
)
def test_an_older_save_that_is_whole_is_taken(
    name: str, model: keras.Model, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for epoch in (0, 1):
        cx.checkpoint.save(model, tmp_path, epoch, keep=2)
    assert cx.checkpoint.next_epoch(tmp_path) == 2
    copy = shutil.copytree(tmp_path, tmp_path / "copy")
    if name == "missing":
        (copy / "tfcommx-0001.keras").unlink()
    else:
        (copy / name).write_bytes((copy / name).read_bytes()[:-30])
    assert cx.checkpoint.restore(model, copy) == 1
    assert cx.checkpoint.next_epoch(copy) == 1
    assert [
        record.message for record in caplog.records if "is taken in its place" in record.message
    ]
    cx.checkpoint.save(model, copy, 1, keep=2)
    assert cx.checkpoint.restore(model, copy) == 2
    # The damaged save was kept beside the new one, and the whole one deleted
    head = cx.checkpoint.last(copy)
    assert head and [older.save for older in head.older] == [0]


LOCAL: dict[str, tuple[str, Callable[[Path], Any], type[Exception]]] = {
    "profile": (
        Profile("tiny", (VariableProfile("a", (8, 10)),), 0.01, 0.02, batch=32).to_json(),
        Profile.read,
        cx.DataError,
    ),
    "links": (json.dumps({"links": NOMINAL.to_dict(), "points": {}}), Links.read, cx.DataError),
    "step": (
        MeasuredStep(
            Profile("tiny", (VariableProfile("a", (80,)),), 0.01, 0.02, batch=32),
            Plan(
                (Bucket("b", ("a",), (80,), "float32", "allreduce", options=NoOptions()),),
                Topology(1, 2),
            ),
            Timeline((), 0.0, 0.0, 32, 2),
        ).to_json(),
        lambda path: MeasuredStep.read(path, routes.read_plan),
        cx.DataError,
    ),
    "alone": (
        json.dumps({"ranks": 1, "phases": [{"throughput": 12.0}]}),
        lambda path: read_alone(path.parent),
        ReportError,
    ),
}


@pytest.mark.parametrize("name", LOCAL)
def test_files_that_a_command_wrote(name: str, tmp_path: Path) -> None:
    text, read, error = LOCAL[name]
    path = tmp_path / "dry_run.json"
    path.write_text(text)
    check(path, lambda: read(path), error)


def test_a_timeline(tmp_path: Path) -> None:
    path = tmp_path / "timeline.json"
    shutil.copy(ROOT / "tests/measure/horovod_timeline.json", path)
    check(path, lambda: read_timeline(path), cx.DataError)
    text = path.read_text()
    events = json.loads(text[: text.rfind("},") + 1] + "]")[:60]
    for event in events:
        for key in event:
            path.write_text(
                json.dumps([{**one, key: None} if one is event else one for one in events])
            )
            try:
                read_timeline(path)
            except cx.DataError as problem:  # Most have too few steps; none may raise another
                assert str(path) in str(problem)


def test_a_plan_that_was_damaged() -> None:
    whole = Plan(
        (Bucket("b", ("a",), (80,), "float32", "allreduce", options=NoOptions()),), Topology(1, 2)
    ).to_json()
    for data in damages(whole.encode(), 200):
        try:
            routes.read_plan(data.decode(errors="replace"))
        except cx.PlanError:
            continue


@pytest.mark.parametrize(
    "change",
    [
        *({"sizes": [-80]}, {"sizes": [80, 2]}, {"sizes": [8.5]}, {"sizes": ["80"]}),
        *({"dtype": "float8"}, {"k": 0}, {"k": 81}, {"k": True}, {"padding": -1}),
        *({"momentum": 1.5}, {"momentum": "0.9"}, {"clip_norm": 0}, {"shapes": [[3, 3]]}),
        *({"variables": [7]}, {"seed": None}, {"wire": 3}, {"route": "toruss"}),
    ],
    ids=str,
)
def test_a_plan_that_was_edited(change: dict[str, Any]) -> None:
    """Its numbers were taken as they were, and failed in a collective or not at all."""
    bucket = Bucket("b", ("a",), (80,), "float32", "allreduce", options=NoOptions())
    plan = json.loads(Plan((bucket,), Topology(1, 2)).to_json())
    assert routes.read_plan(json.dumps(plan)).buckets == (bucket,)
    plan["buckets"][0] |= change
    with pytest.raises(cx.PlanError, match=f"{next(iter(change))}|toruss"):
        routes.read_plan(json.dumps(plan))


def test_files_of_a_comparison(tmp_path: Path) -> None:
    recipe = ROOT / "configs/fashion_mnist.yaml"
    setup = Setup(recipe, (), 2, 1, tmp_path)
    path = tmp_path / "trainings" / f"{setup.name('dense', ['seed=0'])}.json"
    path.parent.mkdir()
    path.write_text(json.dumps({"epochs": [], "seconds": 3.0}))
    check(path, lambda: trained(setup, "dense", ["seed=0"]), TrainingError)
    path = tmp_path / "measured" / setup.name("dense", ["node0:1"]) / "dry_run.json"
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps({"phases": [{"step_seconds": 1.0, "gradients_seconds": 0.5}]}))
    check(path, lambda: measure(setup, "dense", [], "node0:1"), TrainingError)


def test_pictures_and_sentences(tmp_path: Path) -> None:
    path = tmp_path / "pictures.npz"
    pictures, labels = np.zeros((4, 8, 8), np.uint8), np.zeros(4, np.int64)
    np.savez(
        path,
        train_images=pictures,
        train_labels=labels,
        test_images=pictures,
        test_labels=labels,
    )
    cluster = DataRank(Topology(1, 1), 0, 1, 1)
    settings = ArrayFile(file=path, memory=tmp_path)
    check(path, lambda: settings.build(cluster).close(), DataError)
    np.save(tmp_path / "source.npy", np.arange(6, dtype=np.int32))
    np.save(tmp_path / "source_starts.npy", np.array([0, 2, 6]))
    for name in ("source.npy", "source_starts.npy"):
        shutil.copy(tmp_path / name, tmp_path / name.replace("source", "target"))
    vocabulary = tmp_path / "vocabulary"
    vocabulary.write_bytes(b"words")
    crcs = {path.name: crc_of(path) for path in (*tmp_path.glob("*.npy"), vocabulary)}
    (tmp_path / corpus.CHECKSUMS).write_text(json.dumps(crcs))
    check(tmp_path / "source.npy", lambda: corpus._check(tmp_path, vocabulary), DataError)


@pytest.mark.parametrize("text", ["", "\x00", "[" * 5_000, "a: 2026-13-01", "{[1]: 2}: 3", "- -"])
def test_a_recipe_that_is_no_yaml(text: str, tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(text)
    with pytest.raises(RecipeError, match=r"recipe\.yaml"):
        read_recipe(path)


@pytest.mark.parametrize("text", ["", "{", "[]", "null"])
def test_a_damaged_note_of_the_build_is_built_anew(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It raised JSONDecodeError at the import, and also in the rebuild that should have helped."""
    (tmp_path / "build.json").write_text(text)
    (tmp_path / "libtfcommx.so").write_text("")
    monkeypatch.setattr(loader, "FOLDER", tmp_path)
    assert loader.facts() == {}
    with pytest.raises(loader.NativeLibraryError, match=r"2\.21\.0"):
        loader._check_build(tmp_path / "libtfcommx.so", "2.21.0")
    monkeypatch.setattr("setuptools.setup", lambda **_: None)
    is_built = runpy.run_path(str(ROOT / "setup.py"))["is_built"]
    assert not is_built(tmp_path, {"tensorflow": "2.21.0"})

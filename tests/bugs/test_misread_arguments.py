"""Arguments that were taken for others, or for none, without a word."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfcommx as cx
from tfcommx.checkpoint.saving import save
from tfcommx.cli import main
from tfcommx.cli.simulate import _sweep
from tfcommx.collectives import process
from tfcommx.core import DataError, Link, require_equal
from tfcommx.data.cache import find_position
from tfcommx.data.sources import Arrays, TFRecords
from tfcommx.data.sources.source import SampleError
from tfcommx.recipes.datasets import fashion_mnist
from tfcommx.recipes.datasets.translations import Catalogues

GREY = Arrays(np.zeros((8, 8, 8), np.uint8), np.arange(8) % 2)


@pytest.mark.parametrize("take", [cx.checkpoint.restore, lambda _, path: cx.checkpoint.last(path)])
def test_a_file_is_not_a_folder_without_a_checkpoint(take: Any, tmp_path: Path) -> None:
    """`restore(model, "run/tfcommx-0000.keras")` returned epoch 0, and the run began anew."""
    cx.init()
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile(cx.DistributedOptimizer(keras.optimizers.SGD(0.1)), "mse", jit_compile=False)
    save(model, tmp_path, 0)
    (file,) = tmp_path.glob("*.keras")
    with pytest.raises(cx.CheckpointError, match=rf"{file.name}.*{tmp_path}\b"):
        take(model, file)
    assert cx.checkpoint.restore(model, tmp_path) == 1


@pytest.mark.parametrize("kind", [cx.optimizers.LARS, cx.optimizers.LAMB])
def test_patterns_of_a_generator_exclude(kind: Any) -> None:
    """The check consumed them: no variable was excluded."""
    optimizer = kind(0.1, exclude=(f"*{name}" for name in ("bias", "gamma")))
    assert optimizer.exclude == ("*bias", "*gamma")


@pytest.mark.parametrize("field", ["alpha_s", "beta_s_per_byte", "gamma_s_per_byte"])
@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), -1.0])
def test_a_price_is_a_finite_number(field: str, wrong: float) -> None:
    """With a latency of NaN an exchange was free, and every cluster scaled perfectly."""
    prices = {"alpha_s": 0.0, "beta_s_per_byte": 1e-9, "gamma_s_per_byte": 0.0, field: wrong}
    with pytest.raises(cx.ConfigurationError, match=field):
        Link(**prices)


def test_a_topology_of_several_ranks_needs_the_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every rank served the samples of rank 0; for the launch's topology its rank is taken."""
    pair = cx.Topology(2, 1)
    monkeypatch.setattr(process, "_current", SimpleNamespace(topology=pair, rank=1))
    assert find_position(pair, None) == (pair, 1) and find_position(pair, 0) == (pair, 0)
    for topology in (cx.Topology(1, 3), cx.Topology(3, 1)):
        with pytest.raises(cx.ConfigurationError, match=r"`rank` .* 3 "):
            cx.DataCache(GREY, topology=topology)


@pytest.mark.parametrize("name", ["mean", "std"])
@pytest.mark.parametrize("values", [(0.5, 0.5, 0.5), (0.5, 0.5)])
def test_normalization_has_a_number_for_each_channel(name: str, values: tuple[float, ...]) -> None:
    """It was an error of TensorFlow when the first batch was asked for."""
    cache = cx.DataCache(GREY, topology=cx.Topology(1, 1), rank=0)
    with pytest.raises(cx.ConfigurationError, match=f"`{name}`.* 1 "):
        cache.dataset(cx.BatchSpec(4, **{name: values}))
    cache.close()


def test_one_number_for_all_channels_is_written_as_a_tuple() -> None:
    with pytest.raises(cx.ConfigurationError, match=r"`mean`.*0\.5"):
        cx.BatchSpec(4, mean=0.5)  # type: ignore[arg-type]


@pytest.mark.parametrize("label", [np.uint64(2**64 - 1), 1e300, 0.5, np.nan])
def test_a_label_that_is_no_integer_of_64_bits_is_refused(label: Any) -> None:
    """2^64 - 1 became -1."""
    with pytest.raises(DataError, match=str(np.asarray(label).dtype)):
        Arrays(np.zeros((1, 8, 8), np.uint8), np.array([label]))


def test_a_record_s_features_are_those_that_it_has(tmp_path: Path) -> None:
    """The message also listed the missing ones, because a look-up adds an empty feature."""
    feature = tf.train.Feature(int64_list=tf.train.Int64List(value=[3]))
    example = tf.train.Example(features=tf.train.Features(feature={"cls": feature}))
    with tf.io.TFRecordWriter(str(tmp_path / "a")) as writer:
        writer.write(example.SerializeToString())
    with pytest.raises(SampleError, match=r" cls \(1 int64\)$"):
        TFRecords(tmp_path / "a").read(0)


@pytest.mark.parametrize(
    ("open_it", "field"),
    [
        (fashion_mnist.fetch, "data.folder"),
        (Catalogues().fetch, "data.folder"),
        (lambda: Catalogues().open([], [], None), "data.kept"),  # type: ignore[arg-type]
    ],
    ids=["pictures", "catalogues", "vocabulary"],
)
def test_a_user_without_a_home_is_told_which_folder_to_give(
    open_it: Any, field: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a container whose user has no entry in /etc/passwd it was a RuntimeError."""

    def unknown(_: int) -> Any:
        raise KeyError("uid not found")

    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.setattr("pwd.getpwuid", unknown)
    with pytest.raises(cx.ConfigurationError, match=field):
        open_it()


def run(capsys: pytest.CaptureFixture[str], monkeypatch: Any, *words: str) -> tuple[int, str]:
    monkeypatch.setattr("sys.argv", ["tfcommx", *words])
    with pytest.raises(SystemExit) as ended:
        main.main()
    return int(ended.value.code or 0), "".join(capsys.readouterr())


@pytest.mark.parametrize(
    ("sweep", "values"),
    [
        ("nodes=8,4,...,1", [8, 4, 2, 1]),
        ("nodes=3,2,1", [3, 2, 1]),
        ("nodes=1,2,...,8", [1, 2, 4, 8]),
        ("slots=7,5,3,...,1", [7, 5, 3, 1]),
    ],
)
def test_a_sweep_falls_as_it_rises(sweep: str, values: list[int]) -> None:
    """The numbers between falling ones were left out."""
    assert _sweep(sweep)[1] == values


@pytest.mark.parametrize("sweep", ["nodes=1,2,3,...,inf", "nodes=1,2,nan", "nodes=1,2,3,...,1e12"])
def test_a_sweep_ends(sweep: str, capsys: pytest.CaptureFixture[str], monkeypatch: Any) -> None:
    """The first and the last filled the memory."""
    status, text = run(capsys, monkeypatch, "simulate", "--sweep", sweep)
    assert status == 2 and sweep.partition("=")[2] in text


@pytest.mark.parametrize(
    ("option", "name"),
    [
        *(("--json", "."), ("--json", "file/rows"), ("--trace", "locked/rows")),
        *(("--png", "picture"), ("--png", "picture.xyz"), ("--json", "gs://bucket/rows")),
    ],
)
def test_a_file_that_cannot_be_written_is_refused_at_once(
    option: str, name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any
) -> None:
    """`tfcommx compare --json` trained for hours, and ended with a traceback."""
    if name.startswith("locked") and os.geteuid() == 0:
        monkeypatch.setattr(os, "access", lambda path, mode: Path(path).name != "locked")
    (tmp_path / "file").touch()
    (tmp_path / "locked").mkdir(mode=0o500)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("tfcommx.cli.simulate.simulated_step", None)
    status, text = run(capsys, monkeypatch, "simulate", option, name)
    assert status == 2 and Path(name).name in text


def test_a_file_may_be_a_pipe(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any
) -> None:
    """`tfcommx machines FILE --csv /dev/stdout` was a FileNotFoundError."""
    (tmp_path / "offers.yaml").write_text("machines: {large: {slots: 2, nodes: 2}}\n")
    source, target = os.pipe()
    words = ["machines", str(tmp_path / "offers.yaml"), "--csv", f"/proc/self/fd/{target}"]
    status, _ = run(capsys, monkeypatch, *words)
    os.close(target)
    with os.fdopen(source) as written:
        assert status == 0 and written.readline().startswith("machine,model,")


def test_a_warm_up_begins_at_a_number() -> None:
    """A text was refused in the first step, by TensorFlow."""
    with pytest.raises(cx.ConfigurationError, match="`start`"):
        cx.callbacks.WarmUp(0.4, steps=5, start="0.1")


def test_a_norm_without_limit_is_refused() -> None:
    """The plan could be made, and its JSON could not be read."""
    with pytest.raises(cx.PlanError, match="`clip_norm`"):
        cx.Scheme("hitopk", "mstopk", 0.1, clip_norm=np.inf)


def test_nan_on_all_ranks_is_equal() -> None:
    """The error named "nan on rank 0 and nan on rank 1"."""
    require_equal("loss", [np.nan, float("nan")])
    with pytest.raises(cx.ConfigurationError, match=r"\bnan\b.*rank 0\b.*rank 1\b"):
        require_equal("loss", [np.nan, 1])

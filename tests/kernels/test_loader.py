"""The native library: the right version or a clear refusal; without it the definitions work."""

from __future__ import annotations

import json
import re

import numpy as np
import pytest
import tensorflow as tf

from tfcommx.kernels import device, loader, select, sparse
from tfcommx.kernels.build import digest


@pytest.fixture(autouse=True)
def fresh():
    library = loader.library
    library.cache_clear()
    yield
    library.cache_clear()


def selected():
    return list(select.select(tf.constant([1.0, -5.0, 3.0, 0.0]), 2, 0, "exact").indices.numpy())


def test_a_library_for_another_tensorflow_is_refused_before_loading(tmp_path, monkeypatch):
    (tmp_path / "libtfcommx.so").write_text("not a library: loading it would fail in another way")
    (tmp_path / "build.json").write_text(json.dumps({"tensorflow": "2.16.1"}))
    monkeypatch.setattr(loader, "FOLDER", tmp_path)
    with pytest.raises(
        loader.NativeLibraryError, match=r"2\.16\.1\b.*setup\.py build_ext --inplace"
    ):
        loader.library()


def test_a_wheel_for_another_tensorflow_names_both_and_what_to_install(tmp_path, monkeypatch):
    (tmp_path / "libtfcommx.so").write_text("not a library")
    (tmp_path / "build.json").write_text(json.dumps({"tensorflow": "2.16.1"}))
    monkeypatch.setattr(loader, "FOLDER", tmp_path)
    monkeypatch.setattr(loader, "SOURCES", tmp_path / "ops")
    found = (
        rf"{tf.__version__}\b.*\b2\.16\.1\b.*TensorFlow 2\.16\.1\b"
        r".*pip install --no-build-isolation.*python3 scripts/setup"
    )
    with pytest.raises(loader.NativeLibraryError, match=found):
        loader.library()


def test_a_library_of_other_sources_is_refused_before_loading(tmp_path, monkeypatch):
    """If its sources are beside it, it must be built from them; if not, nothing can differ."""
    loaded = []
    library, kernel, facts = (
        tmp_path / "tfcommx" / "lib",
        tmp_path / "ops" / "kernels" / "a.cc",
        {"tensorflow": tf.__version__},
    )
    for folder in (library, kernel.parent):
        folder.mkdir(parents=True)
    kernel.write_text("int one() { return 1; }")
    (library / "libtfcommx.so").write_text("not a library")
    monkeypatch.setattr(loader, "FOLDER", library)
    monkeypatch.setattr(loader, "SOURCES", tmp_path / "ops")
    monkeypatch.setattr(tf, "load_op_library", lambda path: loaded.append(path) or len(loaded))

    def opened(sources: str | None) -> int:
        loader.library.cache_clear()
        (library / "build.json").write_text(
            json.dumps(facts | ({"sources": sources} if sources else {}))
        )
        return loader.library()

    assert opened(None) == 1  # no setup.py: not a source tree, whatever lies in ops/
    (tmp_path / "setup.py").write_text("")
    current = digest(tmp_path / "ops")
    assert opened(current) == 2
    (kernel.parent / "a.cc~").write_text("an editor's file is no source")
    assert opened(current) == 3
    kernel.write_text("int one() { return 2; }")
    for old in (current, None):
        with pytest.raises(
            loader.NativeLibraryError,
            match=rf"{re.escape(str(tmp_path / 'ops'))}\b.*setup\.py build_ext --inplace",
        ):
            opened(old)
    kernel.rename(kernel.with_name("b.cc"))
    assert digest(tmp_path / "ops") != current and len(loaded) == 3


def test_no_library_is_announced_once_and_the_definition_works(tmp_path, monkeypatch, recwarn):
    monkeypatch.setattr(loader, "FOLDER", tmp_path)
    assert selected() == selected() == [1, 2]
    assert len([w for w in recwarn if "no native library" in str(w.message)]) == 1


def test_the_environment_keeps_the_library_from_being_loaded(monkeypatch):
    monkeypatch.setenv("TFCOMMX_NATIVE", "0")
    monkeypatch.setattr(tf, "load_op_library", lambda path: pytest.fail("loaded"))
    assert loader.library() is None
    assert selected() == [1, 2]
    residual = tf.Variable([0.0, 1.0, 0.0, 2.0])
    select.select_with_residual(tf.zeros(4), residual, 1, 0, "mstopk")
    np.testing.assert_array_equal(residual, [0, 1, 0, 0])
    np.testing.assert_array_equal(sparse.merge(tf.constant([1]), tf.ones(1), 2), [0, 1])


@pytest.mark.parametrize("gpus", [[], ["GPU:0"]])
@pytest.mark.parametrize("devices", ["CPU", "CPU and CUDA"])
def test_residuals_are_with_the_gradients_if_the_kernels_are(tmp_path, monkeypatch, gpus, devices):
    (tmp_path / "build.json").write_text(
        json.dumps({"tensorflow": tf.__version__, "devices": devices})
    )
    monkeypatch.setattr(loader, "FOLDER", tmp_path)
    monkeypatch.setattr(loader, "library", lambda: object())
    monkeypatch.setattr(tf.config, "list_logical_devices", lambda kind: gpus)
    compared = []
    monkeypatch.setattr(device, "compare_with_cpu", compared.append)
    expected = "/gpu:0" if gpus and devices == "CPU and CUDA" else "/cpu:0"
    assert device.residual_device.__wrapped__() == expected  # without its memory
    assert compared == ["/gpu:0"] * (expected == "/gpu:0")


def test_kernels_of_another_device_must_give_the_same_bits(monkeypatch):
    device.compare_with_cpu("/cpu:0")
    real, calls = sparse.merge, []

    def off_by_one_bit(*arguments):
        calls.append(arguments)
        return real(*arguments) + (1e-30 if len(calls) == 1 else 0)

    monkeypatch.setattr(sparse, "merge", off_by_one_bit)
    with pytest.raises(loader.NativeLibraryError, match=r"\bmerged\b.*TFCOMMX_CUDA=0"):
        device.compare_with_cpu("/cpu:0")
    assert len(calls) == 2

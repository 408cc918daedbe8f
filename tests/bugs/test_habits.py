"""Habits of users of Horovod and Keras: other names, a name or a model in place of an object."""

from __future__ import annotations

import sys
from types import ModuleType

import horovod.tensorflow as hvd
import keras
import pytest

import tfcommx as cx
from tfcommx.collectives.horovod import import_horovod


def test_names_of_horovod_are_explained() -> None:
    of_keras = {"load_model", "PartialDistributedOptimizer"}
    assert {name for name in cx._HOROVODS if not hasattr(hvd, name)} == of_keras
    for name in cx._HOROVODS:
        with pytest.raises(AttributeError, match="move-from-horovod"):
            getattr(cx, name)
    for name, instead in cx.callbacks._HOROVODS.items():
        with pytest.raises(AttributeError, match=instead.split("(")[0]):
            getattr(cx.callbacks, name)


@pytest.mark.parametrize("module", [cx, cx.callbacks])
def test_other_unknown_names_are_errors_as_ever(module: object) -> None:
    assert not hasattr(module, "nothing")
    with pytest.raises(AttributeError, match="'nothing'"):
        _ = module.nothing


def test_init_registers_the_classes_that_files_of_models_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """`load_model` did not know LARS in a process that had not used `cx.optimizers` yet."""
    monkeypatch.delitem(sys.modules, "tfcommx.optimizers", raising=False)
    _ = cx.init
    assert "tfcommx.optimizers" in sys.modules
    for name in ("LARS", "LAMB", "OneBitAdam", "SyncBatchNormalization"):
        assert keras.saving.get_registered_object(f"tfcommx>{name}").__name__ == name


def test_the_name_of_a_route_is_refused_with_its_scheme() -> None:
    cx.init()
    with pytest.raises(cx.PlanError, match=r"Scheme\('torus'\)"):
        cx.DistributedOptimizer(keras.optimizers.SGD(0.1), "torus")


def test_a_model_stands_for_its_optimizers_where_weights_are_consolidated() -> None:
    cx.init()
    net = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    with pytest.raises(cx.ConfigurationError, match="wrapped optimizer"):
        cx.consolidate(net)
    with pytest.raises(cx.ConfigurationError, match="Received <keras"):
        cx.consolidate(keras.optimizers.SGD(0.1))
    net.compile(cx.DistributedOptimizer(keras.optimizers.Adam(0.1), strategy="sharded"), "mse")
    cx.consolidate(net)


def test_one_scheme_for_no_epoch_is_refused() -> None:
    with pytest.raises(cx.ConfigurationError, match="epochs"):
        cx.callbacks.SwitchScheme(cx.Scheme())


def test_a_script_that_hides_horovod_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Horovod's version and build were blamed for a horovod.py beside the script."""
    script = ModuleType("horovod")
    script.__file__ = "/home/me/horovod.py"
    monkeypatch.setitem(sys.modules, "horovod", script)
    monkeypatch.delitem(sys.modules, "horovod.tensorflow")
    with pytest.raises(cx.LaunchError, match=r"/home/me/horovod\.py.*Rename"):
        import_horovod()


def test_a_model_of_keras_2_is_refused_in_words() -> None:
    """As transformers' models for TensorFlow: BroadcastState lacked a private method of Keras 2."""
    model = type("TFBert", (), {"__module__": "tf_keras.src.engine.training"})()
    with pytest.raises(cx.ConfigurationError, match=r"Received TFBert, .*tf_keras"):
        cx.callbacks.BroadcastState().set_model(model)

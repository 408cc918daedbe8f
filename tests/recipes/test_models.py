"""The networks have the published numbers of parameters, and miniatures are the same code."""

import keras
import numpy as np
import pytest
from drawing import extended

from tfcommx.core import ConfigurationError
from tfcommx.recipes.models.resnet import ResNet
from tfcommx.recipes.models.small_cnn import SmallCnn
from tfcommx.recipes.models.transformer import Transformer
from tfcommx.recipes.models.vgg19 import Vgg19
from tfcommx.simulator import models as tables


def trained(model: keras.Model) -> int:
    return sum(int(np.prod(variable.shape)) for variable in model.trainable_variables)


@pytest.fixture(autouse=True)
def _build_no_arrays(monkeypatch):
    """Counts need no weights: VGG-19's take 575 MB, and the big Transformer's 840 MB."""
    monkeypatch.setattr(keras.initializers.VarianceScaling, "__call__", _zeros)
    monkeypatch.setattr(keras.initializers.RandomNormal, "__call__", _zeros)


def _zeros(self, shape, dtype=None):
    import tensorflow as tf

    return tf.zeros(shape, dtype or "float32")


@pytest.mark.parametrize(
    ("model", "inputs", "outputs", "parameters"),
    [
        # As torchvision's models, which have no biases before the normalisation either
        extended(ResNet(depth=18), 3, 1000, 11_689_512),
        pytest.param(ResNet(depth=34), 3, 1000, 21_797_672, marks=pytest.mark.exhaustive),
        (ResNet(depth=50), 3, 1000, 25_557_032),
        pytest.param(ResNet(depth=101), 3, 1000, 44_549_160, marks=pytest.mark.exhaustive),
        pytest.param(ResNet(depth=152), 3, 1000, 60_192_808, marks=pytest.mark.exhaustive),
        extended(Vgg19(), 3, 1000, 143_667_240),
        (SmallCnn(filters=(16, 32, 64)), 1, 10, 61_050),
        (SmallCnn(filters=(16, 32, 64)), 3, 10, 61_050 + 2 * 9 * 16),
        (Transformer(), 37_000, 37_000, tables.get("transformer_base").parameters),
        extended(Transformer(size="big"), 37_000, 37_000, tables.get("transformer_big").parameters),
    ],
    ids=lambda value: value.name if hasattr(value, "build") else None,
)
def test_parameters(model, inputs, outputs, parameters):
    assert trained(model.build(inputs, outputs)) == parameters


def test_the_tensors_are_those_of_the_simulators_table():
    """As many, and of the same sizes in the same order, so that plans for one fit the other."""
    model = ResNet().build(3, 1000)
    table = tables.get("resnet50")
    assert len(model.trainable_variables) == table.tensors == 161


def test_a_transformer_of_pictures_is_refused_with_a_remedy():
    """It was a ValueError with a traceback."""
    with pytest.raises(ConfigurationError, match=r"\b1 and 10\b.* translate\b"):
        Transformer().build(1, 10)


def test_transformers_published_sizes():
    """Table 3: 65 and 213 million, of one shared embedding."""
    assert tables.get("transformer_base").parameters == pytest.approx(65e6, rel=0.04)
    assert tables.get("transformer_big").parameters == pytest.approx(213e6, rel=0.02)
    assert Transformer(size="big", heads=8).heads == 8 and Transformer(size="big").dropout == 0.3

"""The networks' results: any size, identity blocks, no access to padding or future words."""

import keras
import numpy as np
import pytest

from tfcommx.recipes.models.resnet import ResNet
from tfcommx.recipes.models.transformer import Transformer
from tfcommx.recipes.models.vgg19 import Vgg19


@pytest.mark.parametrize("depth", [18, 50])
def test_a_miniature_takes_pictures_of_any_size(depth):
    model = ResNet(depth=depth, blocks=(1, 1), width=4).build(1, 7)
    for side in (24, 33):
        assert model(np.zeros((2, side, side, 1), np.float32)).shape == (2, 7)


@pytest.mark.parametrize(("stem_stride", "sides"), [(1, 9), (2, 5), (4, 3)])
def test_a_stem_decides_how_much_of_the_picture_a_pixel_sees(stem_stride, sides):
    """72 pixels a side before the stem and three more stages of stride 2."""
    model = ResNet(blocks=(1, 1, 1, 1), width=2, stem_stride=stem_stride).build(1, 7)
    ends = keras.Model(model.input, model.get_layer("stage4_block1_relu").output)
    assert ends(np.zeros((1, 72, 72, 1), np.float32)).shape[1:3] == (sides, sides)


def test_blocks_begin_as_the_identity():
    """With zero_gamma a branch adds nothing at the start: more blocks change nothing."""
    pictures = np.random.default_rng(0).normal(size=(2, 32, 32, 3)).astype(np.float32)
    layers = {}
    for zero in (True, False):
        keras.utils.set_random_seed(1)
        model = ResNet(depth=50, blocks=(2,), width=4, zero_gamma=zero).build(3, 5)
        ends = [model.get_layer(f"stage1_block{number}_relu").output for number in (1, 2)]
        first, second = keras.Model(model.input, ends)(pictures)
        layers[zero] = np.array_equal(first, second)
    assert layers == {True: True, False: False}


def test_vgg19_in_miniature():
    model = Vgg19(resolution=32, width=2, hidden=8).build(1, 10)
    assert model(np.zeros((3, 32, 32, 1), np.float32)).shape == (3, 10)


@pytest.mark.parametrize("norm", ["post", "pre"])
def test_a_transformer_sees_neither_padding_nor_the_future(norm):
    keras.utils.set_random_seed(0)
    model = Transformer(blocks=2, width=8, inner=16, heads=2, norm=norm).build(20, 20)
    source, target = np.array([[5, 6, 7, 0]]), np.array([[2, 9, 8, 4]])
    logits = model({"source": source, "target": target}).numpy()
    assert logits.shape == (1, 4, 20) and logits.dtype == np.float32
    padded = {"source": np.array([[5, 6, 7, 0, 0, 0]]), "target": target}
    np.testing.assert_allclose(model(padded).numpy(), logits, atol=1e-5)
    later = model({"source": source, "target": np.array([[2, 9, 3, 3]])}).numpy()
    np.testing.assert_allclose(later[:, :2], logits[:, :2], atol=1e-5)
    assert not np.allclose(later[:, 2:], logits[:, 2:])
    other = model({"source": np.array([[6, 5, 7, 0]]), "target": target}).numpy()
    assert not np.allclose(other, logits)  # it reads the source, and knows positions


def test_logits_are_float32_in_mixed_precision():
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy("mixed_bfloat16")
    try:
        cnn = ResNet(depth=18, blocks=(1,), width=4).build(3, 5)
        text = Transformer(blocks=1, width=8, inner=16, heads=2).build(20, 20)
    finally:
        keras.config.set_dtype_policy(before)
    assert cnn(np.zeros((1, 16, 16, 3), np.float32)).dtype == "float32"
    one = np.array([[1, 2]])
    assert text({"source": one, "target": one}).dtype == "float32"
    assert cnn.dtype_policy.name == "mixed_bfloat16"


def test_sizes_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match=r"width\b.*heads\b.*\b10\b.*\b4\b"):
        Transformer(width=10, heads=4)
    with pytest.raises(ValueError, match=r"\b20\b.*\b21\b"):
        Transformer(blocks=1, width=8, heads=2).build(20, 21)

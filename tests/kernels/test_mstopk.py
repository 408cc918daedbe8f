"""Rule mstopk selects all entries above its band, most of the magnitude, and a fair window."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf
from selection_helpers import (
    IMPLEMENTATIONS,
    RULES,
)
from vectors import make

from tfcommx.kernels import select
from tfcommx.recipes.datasets import fashion_mnist
from tfcommx.recipes.models.small_cnn import small_cnn

pytestmark = pytest.mark.usefixtures("library")


@pytest.mark.parametrize("kind", ["normal", "laplace"])
@pytest.mark.parametrize("density", [0.0001, 0.001, 0.01, 0.1])
def test_mstopk_takes_all_above_the_band_and_captures_the_magnitude(kind, density):
    n = 400_000
    k = max(1, int(n * density))
    gradient = tf.constant(make(kind, n, 2))
    size = np.abs(gradient.numpy())
    indices = select.select(gradient, k, 11, "mstopk").indices.numpy()
    exact = select.select(gradient, k, 11, "exact").indices.numpy()
    assert size[indices].sum() >= 0.99 * size[exact].sum()
    upper = np.sort(size)[-k] * (1 + 2.0**-12)  # the band is not wider
    assert np.isin(np.flatnonzero(size > upper), indices).all()
    assert (size[indices] >= np.sort(size)[-k] / (1 + 2.0**-12)).all()


def real_gradients() -> np.ndarray:
    """Compute one gradient of the demo's model after a few steps of training: float32 [61,050]."""
    images, labels, *_ = fashion_mnist.load(fashion_mnist.fetch())
    keras.utils.set_random_seed(1)
    model = small_cnn((16, 32, 64), 1, 10)
    optimizer = keras.optimizers.SGD(0.05)
    for step in range(5):
        batch = slice(128 * step, 128 * (step + 1))
        with tf.GradientTape() as tape:
            logits = model(
                images[batch].astype(np.float32)[..., None].reshape(-1, 28, 28, 1), training=True
            )
            loss = tf.reduce_mean(
                keras.losses.sparse_categorical_crossentropy(
                    labels[batch], logits, from_logits=True
                )
            )
        found = tape.gradient(loss, model.trainable_variables)
        optimizer.apply(found, model.trainable_variables)
    return np.concatenate([gradient.numpy().ravel() for gradient in found])


@pytest.mark.parametrize("density", [0.001, 0.01, 0.1])
def test_mstopk_captures_the_magnitude_of_real_gradients(density):
    gradient = real_gradients()
    assert gradient.size == 61_050 and np.isfinite(gradient).all()
    k = int(gradient.size * density)
    chosen = {
        rule: np.abs(select.select(tf.constant(gradient), k, 3, rule).values.numpy()).sum()
        for rule in RULES
    }
    assert chosen["exact"] > 0 and chosen["mstopk"] >= 0.99 * chosen["exact"]


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_the_window_is_fair(implementation):
    """12 equal entries in the band, 5 wanted: each of the 8 windows is equally likely."""
    gradient = np.zeros(30, np.float32)
    gradient[5:29:2] = 1.0
    gradient[[0, 3]] = -4.0
    band = list(range(5, 29, 2))
    draws = 800
    counts = np.zeros(8)
    choose = tf.function(
        lambda seed: (
            IMPLEMENTATIONS[implementation].select(tf.constant(gradient), 7, seed, "mstopk").indices
        ),
        autograph=False,
    )
    for seed in range(draws):
        indices = choose(tf.constant(seed, tf.int64)).numpy()
        assert indices[0] == 0 and indices[1] == 3
        start = band.index(indices[2])
        assert list(indices[2:]) == band[start : start + 5]
        counts[start] += 1
    # chi-square with 7 degrees of freedom: 29.9 is exceeded once in 10,000 fair draws
    assert ((counts - draws / 8) ** 2 / (draws / 8)).sum() < 29.9, counts


def test_splitmix64_is_the_published_one():
    assert int(select.splitmix64(0)) == 0xE220A8397B1DCDAF
    assert int(select.splitmix64(1)) == 0x910A2DEC89025CC1

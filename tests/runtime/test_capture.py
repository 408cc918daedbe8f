"""The share of real gradients that mstopk captures.

They are gradients of the demo's network on its pictures, at the start and after some steps.
"""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf

from tfcommx import selection
from tfcommx.recipes.datasets import fashion_mnist
from tfcommx.recipes.models.small_cnn import SmallCnn


@pytest.fixture(scope="module")
def gradients() -> list[tf.Tensor]:
    """The flat gradient, float32 [61402], before and after 20 steps of training."""
    keras.utils.set_random_seed(0)
    pictures, labels, _, _ = fashion_mnist.load(fashion_mnist.fetch())
    model, optimizer = SmallCnn().build(1, 10), keras.optimizers.SGD(0.1, momentum=0.9)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)

    @tf.function
    def step(x: tf.Tensor, y: tf.Tensor) -> list[tf.Tensor]:
        with tf.GradientTape() as tape:
            value = loss(y, model(x, training=True))
        grads = tape.gradient(value, model.trainable_variables)
        optimizer.apply(grads, model.trainable_variables)
        return grads

    optimizer.build(model.trainable_variables)
    flat = [
        tf.concat(
            [
                tf.reshape(grad, [-1])
                for grad in step(tf.cast(pictures[i : i + 32], tf.float32), labels[i : i + 32])
            ],
            0,
        )
        for i in range(0, 32 * 21, 32)
    ]
    return [flat[0], flat[-1]]


@pytest.mark.parametrize("density", [0.001, 0.01, 0.05, 0.1])
def test_mstopk_captures_what_exact_does(gradients: list[tf.Tensor], density: float) -> None:
    for gradient in gradients:
        k = round(density * gradient.shape[0])
        captured = {
            name: float(np.abs(selection.rule(name).select(gradient, k, 3).values).sum())
            for name in ("exact", "mstopk", "random")
        }
        assert captured["mstopk"] >= 0.99 * captured["exact"]
        assert captured["random"] < 0.5 * captured["exact"]  # the measure tells good from bad

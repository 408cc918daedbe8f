"""The network of the image recipes."""

from __future__ import annotations

from collections.abc import Sequence

import keras
from keras import layers

MEAN, DEVIATION = 0.286, 0.353  # of Fashion-MNIST's training pixels, as parts of 255


def small_cnn(filters: Sequence[int], residual: int, classes: int) -> keras.Model:
    """Build a convolutional network that takes pictures of any size, because it averages over all
    positions at its end.

    Args:
        filters: of each 3x3 convolution; after the first two, max pooling halves the sides.
        residual: number of 3x3 convolutions with a short cut that follow, with as many filters as
            the last.
        classes: number of outputs, which are logits.

    Returns: a model of float32 [n, h, w, 1] in [0, 255] -> float32 [n, classes].
    """
    inputs = keras.Input((None, None, 1))
    flow = layers.Rescaling(1 / (255 * DEVIATION), -MEAN / DEVIATION)(inputs)
    for place, count in enumerate(filters):
        flow = layers.Conv2D(count, 3, padding="same", use_bias=False)(flow)
        if place < 2:
            flow = layers.MaxPooling2D()(flow)  # before the normalisation: a quarter of its work
        flow = layers.ReLU()(_normalised(flow))
    for _ in range(residual):
        branch = layers.Conv2D(filters[-1], 3, padding="same", use_bias=False)(flow)
        flow = layers.Add()([flow, layers.ReLU()(_normalised(branch))])
    return keras.Model(
        inputs, layers.Dense(classes)(layers.GlobalAveragePooling2D()(flow)), name="small_cnn"
    )


def _normalised(flow: keras.KerasTensor) -> keras.KerasTensor:
    # runs are short: Keras's 0.99 would lag behind by an epoch
    return layers.BatchNormalization(momentum=0.9)(flow)

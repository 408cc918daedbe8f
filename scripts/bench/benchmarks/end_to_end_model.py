"""The network of end_to_end_fashion.yaml."""

from __future__ import annotations

from collections.abc import Sequence

import keras
from keras import layers


def network(inputs: int, outputs: int, filters: Sequence[int], units: int) -> keras.Model:
    """Make a convolutional network for 28 x 28 pixels, most of whose weights are one dense layer.

    Args:
        inputs: channels of the pictures.
        outputs: classes.
        filters: of the 3 x 3 convolutions; after each of the first two, pooling halves the sides.
        units: of the dense layer.
    """
    pictures = keras.Input((28, 28, inputs))
    flow = layers.Rescaling(1 / 255)(pictures)
    for position, count in enumerate(filters):
        flow = layers.Conv2D(count, 3, padding="same", use_bias=False)(flow)
        if position < 2:
            flow = layers.MaxPooling2D()(flow)
        flow = layers.ReLU()(layers.BatchNormalization(momentum=0.9)(flow))
    flow = layers.Dense(units, activation="relu")(layers.Flatten()(flow))
    return keras.Model(pictures, layers.Dense(outputs)(flow), name="end_to_end")

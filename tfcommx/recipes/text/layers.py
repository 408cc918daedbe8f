"""Position encoding, which Keras does not have."""

from __future__ import annotations

import math

import keras
import numpy as np
from keras import ops


@keras.saving.register_keras_serializable("tfcommx")
class Positions(keras.layers.Layer):
    """Scales embeddings by the square root of their width, and adds a wave for each position.

    >>> [round(float(one), 3) for one in Positions()(ops.zeros([1, 2, 2]))[0, 1]]
    [0.841, 0.54]

    **Source:** Vaswani et al., "Attention Is All You Need" (2017), sections 3.4 and 3.5. There
    sines and cosines alternate; here all sines come first.
    """

    def call(self, embeddings: keras.KerasTensor) -> keras.KerasTensor:
        width = embeddings.shape[-1]
        rates = 1e4 ** (-np.arange((width + 1) // 2, dtype=np.float32) * 2 / width)
        places = ops.arange(ops.shape(embeddings)[1], dtype="float32")
        angles = places[:, None] * rates[None, :]
        waves = ops.concatenate([ops.sin(angles), ops.cos(angles)], axis=1)[:, :width]
        return embeddings * math.sqrt(width) + ops.cast(waves, embeddings.dtype)

    def compute_output_shape(self, shape: tuple[int | None, ...]) -> tuple[int | None, ...]:
        return shape

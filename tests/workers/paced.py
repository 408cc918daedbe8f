"""A recipe's parts for test_slurm.py: steps take long until the job is requeued."""

from __future__ import annotations

import os
import time

import keras
import numpy as np
import tensorflow as tf

from tfcommx.recipes.datasets.picture_files import open_arrays
from tfcommx.recipes.families import Data, DataRank

# Of a step, the first time
SECONDS = (
    0.0 if "SLURM_RESTART_COUNT" in os.environ else float(os.environ.get("PACED_SECONDS", "0.5"))
)


class Pace(keras.layers.Layer):
    """Returns its input, after some time."""

    def call(self, inputs: tf.Tensor) -> tf.Tensor:
        outputs = tf.numpy_function(self.wait, [inputs], inputs.dtype, stateful=True)
        outputs.set_shape(inputs.shape)
        # The gradient does not pass through a Python function
        return inputs + tf.stop_gradient(outputs - inputs)

    def wait(self, inputs: np.ndarray) -> np.ndarray:
        time.sleep(SECONDS)
        return inputs


def build_net(inputs: int, outputs: int) -> keras.Model:
    """Build a very small network, with dropout, whose seeds must be restored."""
    pictures = keras.Input((None, None, inputs))
    flow = keras.layers.Conv2D(8, 3, 2, "same", activation="relu")(Pace()(pictures))
    flow = keras.layers.Dropout(0.2)(keras.layers.GlobalMaxPooling2D()(flow))
    return keras.Model(pictures, keras.layers.Dense(outputs)(flow))


def open_noise(place: DataRank, count: int = 1664) -> Data:
    """Make pictures and labels that have nothing to do with each other."""
    random = np.random.default_rng(0)
    images = random.integers(0, 255, (count, 8, 8), np.uint8)
    labels = random.integers(0, 3, count)
    train, test = (images[64:], labels[64:]), (images[:64], labels[:64])
    return open_arrays(train, test, place, classes=("a", "b", "c"), flip=False)

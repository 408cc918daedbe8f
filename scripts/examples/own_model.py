"""A custom model, data set and optimizer, for own_model.yaml.

cd scripts/examples; tfcommx train own_model.yaml --processes 4
"""

from __future__ import annotations

import keras
import numpy as np

from tfcommx.recipes.datasets.picture_files import open_arrays
from tfcommx.recipes.families import Data, DataRank


def build_net(inputs: int, outputs: int, width: int = 16) -> keras.Model:
    """Build a network for pictures of `inputs` channels, with `outputs` logits."""
    pictures = flow = keras.Input((None, None, inputs))
    for factor in (1, 2):
        flow = keras.layers.Conv2D(factor * width, 3, 2, "same", activation="relu")(flow)
    flow = keras.layers.GlobalMaxPooling2D()(flow)
    return keras.Model(pictures, keras.layers.Dense(outputs)(flow))


def open_stripes(place: DataRank, count: int = 2000) -> Data:
    """Make pictures of stripes, which lie, stand or lean."""
    random = np.random.default_rng(0)
    labels = random.integers(0, 3, count)
    down, across = np.mgrid[:16, :16]
    directions = np.stack([down, across, down + across])[labels]
    shifts = random.integers(0, 8, (count, 1, 1))
    stripes = np.where((directions + shifts) // 4 % 2, 200, 50)
    images = (stripes + random.integers(0, 50, (count, 16, 16))).astype(np.uint8)
    part = count // 5
    return open_arrays(
        (images[part:], labels[part:]),
        (images[:part], labels[:part]),
        place,
        classes=("lying", "standing", "leaning"),
        flip=False,
    )


def make_optimizer(momentum: float = 0.9) -> keras.optimizers.Optimizer:
    """Make an optimizer; the recipe sets its learning rate in every step."""
    return keras.optimizers.SGD(0.0, momentum=momentum, clipnorm=5.0)

"""The models of the benchmark of training: of equal weights, with a batch of each rank."""

from __future__ import annotations

from collections.abc import Callable

import keras
import numpy as np

WORDS, LENGTH, CLASSES = 2000, 32, 10
Batch = tuple[np.ndarray, np.ndarray]


def convolutional(images: int, numbers: np.random.Generator) -> tuple[keras.Model, Batch]:
    """Make a network of four convolutions for 32 x 32 pixels."""
    inputs = keras.Input((32, 32, 3))
    value = inputs
    for number, width in enumerate((32, 64, 128, 128)):
        value = keras.layers.Conv2D(width, 3, padding="same", activation="relu")(value)
        if number:
            value = keras.layers.MaxPooling2D()(value)
    value = keras.layers.Dense(320, activation="relu")(keras.layers.Flatten()(value))
    outputs = keras.layers.Dense(CLASSES)(value)
    return keras.Model(inputs, outputs, name="convolutional"), _images(32, images, numbers)


def transformer(sentences: int, numbers: np.random.Generator) -> tuple[keras.Model, Batch]:
    """Make an encoder of three layers that predicts each next word."""
    inputs = keras.Input((LENGTH,), dtype="int32")
    value = keras.layers.Embedding(WORDS, 128)(inputs)
    for _ in range(3):
        attended = keras.layers.MultiHeadAttention(4, 32)(value, value, use_causal_mask=True)
        value = keras.layers.LayerNormalization()(value + attended)
        hidden = keras.layers.Dense(512, activation="relu")(value)
        value = keras.layers.LayerNormalization()(value + keras.layers.Dense(128)(hidden))
    outputs = keras.layers.Dense(WORDS)(value)
    words = numbers.integers(0, WORDS, (sentences, LENGTH + 1), dtype=np.int32)
    return keras.Model(inputs, outputs, name="transformer"), (words[:, :-1], words[:, 1:])


def embedding(texts: int, numbers: np.random.Generator) -> tuple[keras.Model, Batch]:
    """Make a classifier of bags of words, nearly all of whose parameters are an embedding."""
    words = 20 * WORDS
    inputs = keras.Input((LENGTH,), dtype="int32")
    value = keras.layers.GlobalAveragePooling1D()(keras.layers.Embedding(words, 32)(inputs))
    outputs = keras.layers.Dense(CLASSES)(keras.layers.Dense(256, activation="relu")(value))
    found = numbers.integers(0, words, (texts, LENGTH), dtype=np.int32)
    labels = numbers.integers(0, CLASSES, texts)
    return keras.Model(inputs, outputs, name="embedding"), (found, labels)


def resnet50(images: int, numbers: np.random.Generator) -> tuple[keras.Model, Batch]:
    """Make the ResNet-50 of keras.applications for 64 x 64 pixels."""
    model = keras.applications.ResNet50(
        weights=None, input_shape=(64, 64, 3), classes=CLASSES, classifier_activation=None
    )
    return model, _images(64, images, numbers)


def _images(pixels: int, count: int, numbers: np.random.Generator) -> Batch:
    shape = (count, pixels, pixels, 3)
    return numbers.standard_normal(shape, np.float32), numbers.integers(0, CLASSES, count)


_MODELS: dict[str, Callable[[int, np.random.Generator], tuple[keras.Model, Batch]]] = {
    make.__name__: make for make in (convolutional, transformer, embedding, resnet50)
}


def make(
    name: str, optimizer: keras.optimizers.Optimizer, samples: int, rank: int
) -> tuple[keras.Model, Batch]:
    """Make a compiled model, with the same weights on every rank, and a batch of this rank.

    Args:
        name: of the model.
        optimizer: that it is compiled with.
        samples: of the batch.
        rank: seeds the batch, so every rank has a different one.
    """
    keras.utils.set_random_seed(1)
    model, batch = _MODELS[name](samples, np.random.default_rng(rank))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer, loss, jit_compile=False)
    return model, batch

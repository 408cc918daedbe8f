"""Layers, seed generators and non-trained statistics of a Keras model."""

from __future__ import annotations

import keras


def layers_of(model: keras.Model) -> list[keras.layers.Layer]:
    """Return the model itself and all its layers, also those inside of others."""
    return list(model._flatten_layers())


def seed_generators(model: keras.Model) -> list[keras.random.SeedGenerator]:
    """Return the generators of a model's layers, such as dropout's. Keras saves none of them."""
    found = {
        id(generator): generator
        for layer in layers_of(model)
        for generator in layer._seed_generators
    }
    return list(found.values())


def statistics_of(model: keras.Model) -> list[keras.Variable]:
    """Return the float variables that layers update without training, such as batch norm's means.

    Trained weights of frozen layers are not among them.
    """
    return [
        variable
        for layer in layers_of(model)
        for variable in layer._non_trainable_variables
        if keras.backend.is_float_dtype(keras.backend.standardize_dtype(variable.dtype))
    ]

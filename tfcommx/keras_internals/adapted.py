"""Preprocessing layers whose state comes from data, also those that no model has."""

import functools
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import keras
import tensorflow as tf

# In the order of the first call -> True if the layer was adapted. Normalization is here from its
# build on, because a rank that does not adapt it computes with a mean of 0
_LAYERS: weakref.WeakKeyDictionary[keras.layers.Layer, bool] = weakref.WeakKeyDictionary()
# Normalizations whose constants were derived again while traced functions may hold the old ones
FINALIZED: weakref.WeakSet[keras.layers.Layer] = weakref.WeakSet()


@functools.cache
def record_adapted_layers() -> None:
    """Record Keras's layers that are adapted, and that normalize, until the process ends."""

    def recording(method: Callable[..., None], record: Callable[[Any], object]) -> Any:
        @functools.wraps(method)
        def recorded(self: keras.layers.Layer, *args: Any, **kwargs: Any) -> None:
            method(self, *args, **kwargs)
            record(self)

        return recorded

    def record_adapted(layer: keras.layers.Layer) -> None:
        _LAYERS[layer] = True

    normalization = keras.layers.Normalization
    for layer_class in (
        normalization,
        keras.layers.Discretization,
        keras.layers.IntegerLookup,
        keras.layers.StringLookup,
        keras.layers.TextVectorization,
    ):
        layer_class.adapt = recording(layer_class.adapt, record_adapted)
    # Normalization calls it at the end of its build, too
    normalization.finalize_state = recording(
        normalization.finalize_state, lambda layer: _LAYERS.setdefault(layer, False)
    )


def recorded_layers() -> dict[keras.layers.Layer, bool]:
    """Return the recorded layers that still exist, in order, and True for those adapted."""
    return dict(_LAYERS)


def finalize_normalizations(variables: Iterable[keras.Variable | tf.Variable]) -> None:
    """Derive the constants of recorded Normalization layers again that have these variables."""
    assigned = {id(variable) for variable in variables}
    for layer in recorded_layers():
        if isinstance(layer, keras.layers.Normalization) and any(
            id(variable) in assigned for variable in layer.variables
        ):
            layer.finalize_state()
            FINALIZED.add(layer)

"""Layers, names, seed generators, statistics, calls and saved values of a Keras model."""

import contextlib
import functools
import hashlib
import itertools
import random
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

import keras
import numpy as np
import tensorflow as tf
from keras.src.random.seed_generator import global_seed_generator
from keras.src.saving import saving_lib
from keras.src.utils.naming import to_snake_case

from tfcommx.keras_internals.adapted import FINALIZED

T = TypeVar("T")


def layers_of(model: keras.Model) -> list[keras.layers.Layer]:
    """Return the model itself and all its layers, including nested ones."""
    return list(model._flatten_layers())


def seed_generators(model: keras.Model) -> list[keras.random.SeedGenerator]:
    """Return the generators of a model's layers, such as dropout's. Keras saves none of them."""
    generators = {
        # By identity, because layers may share a generator
        id(generator): generator
        for layer in layers_of(model)
        for generator in layer._seed_generators
    }
    return list(generators.values())


def seeds_among(variables: Iterable[Any]) -> list[keras.Variable]:
    """Return the states of seed generators, which `model.variables` includes."""
    return [
        variable
        for variable in variables
        if isinstance(variable, keras.Variable) and variable.name == "seed_generator_state"
    ]


def all_generators(model: keras.Model) -> list[keras.random.SeedGenerator]:
    """Return `seed_generators`, and Keras's own, which serves draws without a seed."""
    # Keras makes its own by a draw of Python's, which would change the script's next draws, among
    # them the initial weights of the next model
    state = random.getstate()
    generators = [*seed_generators(model), global_seed_generator()]
    random.setstate(state)
    return generators


def statistics_of(model: keras.Model) -> list[keras.Variable]:
    """Return the floats that layers update without training, such as batch norm's means."""
    return _untrained_floats(layers_of(model))


def users_statistics_of(model: keras.Model) -> list[keras.Variable]:
    """Return `statistics_of` the layers that the user wrote, which may train with them."""
    return _untrained_floats(
        layer
        for layer in layers_of(model)
        if not isinstance(layer, keras.layers.BatchNormalization)
        and not type(layer).__module__.startswith("keras.")
    )


def _untrained_floats(layers: Iterable[keras.layers.Layer]) -> list[keras.Variable]:
    return [
        variable
        for layer in layers
        # Not `non_trainable_variables`, which has the trained weights of frozen layers, too
        for variable in layer._non_trainable_variables
        if keras.backend.is_float_dtype(keras.backend.standardize_dtype(variable.dtype))
    ]


def recurrent_states(model: keras.Model) -> list[keras.Variable]:
    """Return the states of recurrent layers with `stateful=True`, which Keras lists nowhere."""
    return [
        state
        for layer in layers_of(model)
        if isinstance(layer, keras.layers.RNN) and layer.stateful
        for state in tf.nest.flatten(layer.states)
        if state is not None
    ]


def assigns_weights(model: keras.Model) -> bool:
    """Return True if a layer of Keras assigns its trained weights when it is called in training."""
    return any(isinstance(layer, keras.layers.SpectralNormalization) for layer in layers_of(model))


def untracked_variables(model: keras.Model) -> list[str]:
    """Return the names, such as `codebook.table`, of TensorFlow's variables in layers of the user.

    Keras 2 trained and saved these; Keras 3 lists its own variables alone.
    """
    names = []
    for layer in layers_of(model):
        if type(layer).__module__.startswith("keras."):
            continue
        for attribute, value in vars(layer).items():
            parts = value.values() if isinstance(value, dict) else value
            several = parts if isinstance(value, dict | list | tuple) else [value]
            if any(isinstance(part, tf.Variable) for part in several):
                names.append(f"{layer.name}.{attribute}")
    return names


def given_name(layer: keras.layers.Layer) -> str | None:
    """Return the name that the user gave a layer; None for a name that Keras made and numbered.

    >>> import keras
    >>> given_name(keras.layers.Dense(2, name="head")), given_name(keras.layers.Dense(2))
    ('head', None)
    """
    made_by_keras = re.compile(re.escape(to_snake_case(type(layer).__name__)) + r"(_\d+)?")
    return None if made_by_keras.fullmatch(layer.name) else layer.name


@functools.cache
def numbered_stem(name: str) -> str:
    """Return a layer's name without its number, if Keras could have generated the name.

    >>> numbered_stem("dense_12"), numbered_stem("tower_2")
    ('dense', 'tower_2')
    """
    stem, _, number = name.rpartition("_")
    return stem if number.isdigit() and stem in _layer_stems() else name


def _layer_stems() -> set[str]:
    """Return the stems of Keras's generated names, for all layer classes that exist now."""
    stems, pending = set(), [keras.layers.Layer]
    while pending:
        cls = pending.pop()
        stems.add(_stem(cls.__name__))
        pending += cls.__subclasses__()
    return stems


_stem = functools.cache(to_snake_case)


def finalize_layers(model: keras.Model) -> bool:
    """Recompute the constants that layers derive from their weights; return True if one changed.

    Such as the mean that Normalization subtracts. Call it wherever weights are assigned, because
    Keras does it only after `adapt` and `load_weights`.
    """
    changed = False
    for layer in layers_of(model):
        finalize = getattr(layer, "finalize_state", None)
        # Not lookup layers, which have no weights, because it would end their `adapt`
        if callable(finalize) and layer.built and layer.variables:
            before = constants_of(layer)
            finalize()
            changed |= constants_of(layer) != before or layer in FINALIZED
            FINALIZED.discard(layer)
    # Traces of `fit`, `evaluate` and `predict` hold the old constants
    if changed:
        for name in ("train", "test", "predict"):
            if getattr(model, f"{name}_function", None) is not None:
                trace_again(model, name)
    return changed


def trace_again(model: keras.Model, name: str = "train") -> None:
    """Make a new function of steps, so that the next one is traced; also within `fit`.

    Without `force=True`, because a user's model may override `make_train_function` without that
    argument, which Keras never passes. Replacements by `replace_train_function` stay in force, and
    call the new function.

    Args:
        name: "train", "test" or "predict".
    """
    attribute = f"{name}_function"
    outermost: Any = getattr(model, attribute, None)
    called, replacements = outermost, []
    while hasattr(called, "replaces"):
        replacements.append(called)
        called = called.replaces
    setattr(model, attribute, None)
    getattr(model, f"make_{attribute}")()
    if replacements:
        replacements[-1].replaces = getattr(model, attribute)
        setattr(model, attribute, outermost)


def constants_of(layer: keras.layers.Layer) -> dict[str, str]:
    """Return a layer's attributes, without variables: tensors (digests), numbers, words, lists."""
    constants = {}
    for name, value in vars(layer).items():
        if isinstance(value, keras.Variable):
            continue
        if isinstance(value, np.ndarray | tf.Variable) or (
            tf.is_tensor(value) and hasattr(value, "numpy")
        ):
            constants[name] = hashlib.sha256(bytes_of(np.asarray(value))).hexdigest()
        elif _is_plain(value):
            constants[name] = repr(value)
    return constants


def bytes_of(array: np.ndarray) -> bytes | memoryview:
    """Return the entries of an array, also of text, for a digest; numbers without a copy."""
    # Objects are pointers, which differ between processes
    if array.dtype.hasobject:
        return repr(array.tolist()).encode()
    # As bytes, because Python knows no buffers of bfloat16
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data


def _is_plain(value: object) -> bool:
    if isinstance(value, list | tuple):
        return all(_is_plain(part) for part in value)
    return isinstance(value, bool | int | float | str | bytes | np.generic)


def call_alike(
    model: keras.Model,
    inputs: Any,
    then: Callable[[Any], T],
    seed: int = 0,
    training: bool = False,
) -> T:
    """Call a built model without changing any variable; return `then(outputs)`.

    `then` is called before the variables have their own values again. Ranks with equal variables
    and an equal `seed` compute the same.
    """
    # Ranks have unequal seeds
    generators = all_generators(model)
    states = [
        (generator.state, np.array([seed, position], "uint32"))
        for position, generator in enumerate(generators)
    ]
    # Each rank's continue the sequences in its batches
    states += [(state, np.zeros(state.shape)) for state in recurrent_states(model)]
    # Keras adds the penalties of these to the loss by their values in the scope
    states += [
        (variable, variable.value)
        for variable in model.trainable_variables
        if variable.regularizer is not None
    ]
    with keras.StatelessScope(state_mapping=states):
        options = {"training": training} if model._call_has_training_arg else {}
        return then(model(inputs, **options))


def loss_of(model: keras.Model, inputs: Any, labels: Any, outputs: Any, weights: Any) -> Any:
    """Return the loss of a compiled model in inference mode."""
    return model._compute_loss(inputs, labels, outputs, weights, False)


def own_variables(layer: keras.layers.Layer) -> list[keras.Variable]:
    """Return the weights of a layer without those of its nested layers."""
    return [*layer._trainable_variables, *layer._non_trainable_variables]


@contextlib.contextmanager
def _own_attributes_kept(layers: Sequence[keras.layers.Layer], *names: str) -> Iterator[None]:
    """Restore the layers' own attributes of these names after the block, or their absence."""
    own = [{name: vars(layer)[name] for name in names if name in vars(layer)} for layer in layers]
    try:
        yield
    finally:
        for layer, values in zip(layers, own, strict=True):
            for name in names:
                vars(layer).pop(name, None)
            vars(layer).update(values)


@contextlib.contextmanager
def calls_recorded(
    model: keras.Model, digest: Callable[[Any], T]
) -> Iterator[list[tuple[keras.layers.Layer, T, T]]]:
    """Yield a list that receives (layer, digest of inputs, digest of outputs) at each layer's call.

    Layers that contain layers, and calls in traced code, are left out.
    """
    calls: list[tuple[keras.layers.Layer, T, T]] = []
    leaves = [layer for layer in layers_of(model) if not layer._layers]

    def recording(layer: keras.layers.Layer, call: Callable[..., Any]) -> Callable[..., Any]:
        def recorded(*args: Any, **kwargs: Any) -> Any:
            before = digest((args, kwargs))
            outputs = call(*args, **kwargs)
            if tf.executing_eagerly():
                calls.append((layer, before, digest(outputs)))
            return outputs

        return recorded

    with _own_attributes_kept(leaves, "call"):
        for layer in leaves:
            # Not by Keras's `__setattr__`, which tracks the attributes of layers
            object.__setattr__(layer, "call", recording(layer, layer.call))
        yield calls


@contextlib.contextmanager
def statistics_averaged(layers: Sequence[keras.layers.BatchNormalization]) -> Iterator[None]:
    """Let batch normalizations take the plain average of each statistic over all their calls.

    Only calls that update the statistics count. A layer may be called several times in a model.
    """

    def averaging(call: Callable[..., Any], layer: Any) -> Callable[..., Any]:
        calls = itertools.count()

        # Keras passes `training` by its name, wherever the user gave it
        def averaged(*args: Any, **kwargs: Any) -> Any:
            if kwargs.get("training"):
                count = next(calls)
                layer.momentum = layer.renorm_momentum = count / (count + 1)
            return call(*args, **kwargs)

        return averaged

    with _own_attributes_kept(layers, "call", "momentum", "renorm_momentum"):
        for layer in layers:
            object.__setattr__(layer, "call", averaging(layer.call, layer))
        yield


def saved_values(model: keras.Model) -> list[keras.Variable | tf.Tensor]:
    """Return the variables and tensors that `model.save` would write, without its optimizer."""
    store = saving_lib.NpzIOStore("unwritten", mode="w")  # Its file is written by close()
    # The optimizer counts as visited, so it is left out; only `compile` gives a model one
    saving_lib._save_state(model, store, None, "", {id(getattr(model, "optimizer", None))})
    return [value for part in store.contents.values() for value in part.values()]


def variables_with_own_files(model: keras.Model) -> list[keras.Variable]:
    """Return the variables of layers whose class, not Keras's, overrides saving or loading them."""
    usual = keras.layers.Layer
    return [
        variable
        for layer in layers_of(model)
        if not type(layer).__module__.startswith("keras.")
        and (
            type(layer).save_own_variables is not usual.save_own_variables
            or type(layer).load_own_variables is not usual.load_own_variables
        )
        for variable in own_variables(layer)
    ]


class OwnMoments(keras.layers.BatchNormalization):
    """Batch normalization whose subclass computes the mean and variance of a batch.

    The rest is Keras's: moving averages, scale and offset, renorm, float32 for inputs of 16 bits.
    """

    def moments(
        self, inputs: tf.Tensor, axes: list[int], mask: tf.Tensor | None
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """Return the mean and variance of each channel, [channels], in the dtype of the inputs.

        Args:
            inputs: float32 or float64, any shape.
            axes: all but the channels'.
            mask: True for entries that count, in the inputs' shape without its last axis; None:
                all count.
        """
        raise NotImplementedError

    def _moments(self, inputs: tf.Tensor, mask: tf.Tensor | None) -> tuple[tf.Tensor, tf.Tensor]:
        return self.moments(inputs, self._reduction_axes, mask)

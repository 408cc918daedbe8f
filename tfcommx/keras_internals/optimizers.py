"""Copy Keras optimizers with a mixin, and read the state that Keras does not list."""

import contextlib
import functools
import inspect
import types
from collections.abc import Iterator, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfcommx.core import ConfigurationError

# Keras leaves them out of the config
_NOT_IN_CONFIG = ("_exclude_from_weight_decay", "_exclude_from_weight_decay_pattern")
# Attributes that a copy shares, because a subclass may leave them out of its config
_PLAIN = (bool, int, float, str, type(None), np.generic, types.FunctionType)
_DATA = (*_PLAIN, np.ndarray, tf.Tensor)
_CONTAINERS = (dict, list, tuple, set, frozenset)


@functools.cache
def wrapped_class(base: type, mixin: type) -> type[Any]:
    """Create a subclass of an optimizer's class with a mixin, which Keras saves as its base."""
    # With the base's name and module, so that a saved model holds the plain optimizer
    wrapped = type(
        base.__name__,
        (mixin, base),
        {"__module__": base.__module__, "__qualname__": base.__qualname__},
    )
    package, _, name = keras.saving.get_registered_name(base).rpartition(">")
    if package:
        for cls in (wrapped, base):  # The base last: the name loads it
            keras.saving.register_keras_serializable(package, name)(cls)
    return wrapped


def mix_into(mixin: type, optimizer: keras.optimizers.Optimizer) -> None:
    """Turn an optimizer itself into an instance of the subclass with the mixin."""
    optimizer.__class__ = wrapped_class(optimizer.__class__, mixin)


def inner_optimizer(optimizer: keras.optimizers.Optimizer) -> keras.optimizers.Optimizer:
    """Return the optimizer inside a LossScaleOptimizer; any other optimizer itself."""
    # By class, because a user's optimizer may have an attribute of this name, as Lookahead has
    scales_loss = isinstance(optimizer, keras.optimizers.LossScaleOptimizer)
    return optimizer.inner_optimizer if scales_loss else optimizer


def copy_with(
    mixin: type, optimizer: keras.optimizers.Optimizer, **changed: Any
) -> keras.optimizers.Optimizer:
    """Copy an optimizer, without its state, as an instance of the subclass with the mixin.

    `changed` has constructor arguments that replace those of its config.
    **Raises:** ConfigurationError if the optimizer cannot be made from its own config.
    """
    cls = wrapped_class(optimizer.__class__, mixin)
    try:
        copy = _from_config(cls, optimizer, changed)
    except (TypeError, ValueError, NotImplementedError) as error:
        copy = None if changed else _copy_without_surplus(cls, optimizer)
        if copy is None:
            raise ConfigurationError(
                f"The optimizer {optimizer.name!r} ({type(optimizer).__name__}) is wrapped by a "
                f"copy made from its get_config(), which failed: {error} "
                f"{_odd_arguments(optimizer)}Let get_config() return all arguments of its "
                "constructor, and nothing else."
            ) from error
    _copy_attributes(copy, optimizer)
    return copy


def _copy_attributes(
    copy: keras.optimizers.Optimizer, optimizer: keras.optimizers.Optimizer
) -> None:
    """Copy attributes that the config may lack: excluded variables, and those of a user's class."""
    for name, value in vars(optimizer).items():
        if name in _NOT_IN_CONFIG:
            setattr(copy, name, value)
        # Keras's own are in the config, or state
        elif name not in _attributes_of_keras() and not _has_state(value, optimizer):
            own = getattr(copy, name, None)
            # Any other object, such as a helper with a reference to its optimizer, only in place of
            # a constructor's default
            is_default = own is None or (isinstance(own, _CONTAINERS) and not len(own))
            if is_default or _is_data(value):
                setattr(copy, name, value)


@functools.cache
def _attributes_of_keras() -> frozenset[str]:
    plain = vars(keras.optimizers.SGD(0.1))
    return frozenset(name for name, value in plain.items() if not isinstance(value, _PLAIN)) | {
        "built",
        "exchanger",
    }


def _parts_of(value: Any) -> list[Any]:
    """Return the entries of a dict, list, tuple or set, at any depth; any other object itself."""
    if not isinstance(value, _CONTAINERS):
        return [value]
    parts = value.values() if isinstance(value, dict) else value
    return [leaf for part in parts for leaf in _parts_of(part)]


def _is_data(value: Any) -> bool:
    """Return True for numbers, words, functions and arrays, and for containers of some."""
    parts = _parts_of(value)
    return bool(parts) and all(isinstance(part, _DATA) for part in parts)


def _has_state(value: Any, optimizer: keras.optimizers.Optimizer) -> bool:
    """Return True if an attribute holds variables, optimizers or methods of its optimizer."""
    kinds = (keras.Variable, tf.Variable, keras.optimizers.Optimizer)
    return any(
        isinstance(part, kinds) or getattr(part, "__self__", None) is optimizer
        for part in _parts_of(value)
    )


def _from_config(
    cls: type[Any], optimizer: keras.optimizers.Optimizer, changed: dict[str, Any]
) -> Any:
    """Create an optimizer of a class from another's config, some arguments changed."""
    holder = inner_optimizer(optimizer)
    rate = holder._learning_rate
    if not callable(rate) or (holder is not optimizer and not changed):
        config = optimizer.get_config() | changed
    else:
        # Keras may be unable to serialize a schedule or function for the rate. It is passed as an
        # object; that of an inner optimizer is left out, because `changed` replaces the optimizer
        holder._learning_rate = None
        try:
            config = optimizer.get_config() | changed
        finally:
            holder._learning_rate = rate
        if holder is optimizer:
            config |= {"learning_rate": rate}
    # By the constructor, because LossScaleOptimizer's `from_config` takes a serialized optimizer
    return cls(**config) if changed else cls.from_config(config)


def _named_arguments(cls: type[Any]) -> tuple[dict[str, inspect.Parameter], bool]:
    """Return a constructor's named parameters, and True if it also takes `**kwargs`."""
    _, *taken = inspect.signature(cls.__init__).parameters.values()
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    named = {parameter.name: parameter for parameter in taken if parameter.kind in kinds}
    return named, any(parameter.kind == parameter.VAR_KEYWORD for parameter in taken)


def _copy_without_surplus(
    cls: type[Any], optimizer: keras.optimizers.Optimizer
) -> keras.optimizers.Optimizer | None:
    """Copy without arguments unknown to the constructor; None if the copy's config differs."""
    try:
        config, (named, takes_all) = optimizer.get_config(), _named_arguments(type(optimizer))
        if takes_all:
            # A constructor that takes any argument has failed for another reason
            return None
        copy = cls(**{name: value for name, value in config.items() if name in named})
        copy.name = optimizer.name  # Otherwise Keras may number the name
        # With another config the copy would train differently
        return copy if copy.get_config() == config else None
    except (TypeError, ValueError, NotImplementedError):
        return None


def _odd_arguments(optimizer: keras.optimizers.Optimizer) -> str:
    """Name the arguments that only the config or only the constructor of an optimizer has."""
    try:
        config, (named, takes_all) = optimizer.get_config(), _named_arguments(type(optimizer))
    except (TypeError, ValueError, NotImplementedError):
        return ""
    # With `**kwargs`, the error of the constructor that refuses an argument names it
    too_many = [] if takes_all else map(repr, sorted(config.keys() - named.keys()))
    missing = [
        repr(name)
        for name, parameter in named.items()
        if parameter.default is parameter.empty and name not in config
    ]
    explanation = ""
    if listed := ", ".join(too_many):
        explanation += f"The config has {listed}, which the constructor does not take. "
    if missing:
        explanation += f"The config lacks {', '.join(missing)}, which the constructor needs. "
    return explanation


def kinds_of(optimizer: keras.optimizers.Optimizer) -> list[str]:
    """Return the names of an optimizer's class and its bases, without those of all optimizers.

    >>> kinds_of(keras.optimizers.AdamW())
    ['AdamW', 'Adam']
    """
    package, general = __name__.rpartition(".")[0], keras.optimizers.Optimizer.__mro__
    names = (
        cls.__name__
        for cls in type(inner_optimizer(optimizer)).__mro__
        if cls not in general and not cls.__module__.startswith(package)
    )
    return list(dict.fromkeys(names))


def plain_copy(optimizer: keras.optimizers.Optimizer) -> keras.optimizers.Optimizer:
    """Create the plain optimizer of a wrapped one, without its state."""
    package = __name__.rpartition(".")[0]
    # The first class after the generated subclass and the mixins
    plain_class: type[Any] = next(
        cls for cls in type(optimizer).__mro__[1:] if not cls.__module__.startswith(package)
    )
    plain = _from_config(plain_class, optimizer, {})
    _copy_attributes(plain, optimizer)
    if (inner := inner_optimizer(optimizer)) is not optimizer:
        _copy_attributes(inner_optimizer(plain), inner)
    return plain


def copy_state(copy: keras.optimizers.Optimizer, optimizer: keras.optimizers.Optimizer) -> None:
    """Copy an optimizer's state into its copy, if the original was built."""
    inner = inner_optimizer(optimizer)
    if not optimizer.built:
        if inner is not optimizer:
            copy_state(copy.inner_optimizer, inner)
        return
    # The outer optimizer builds the inner one, because otherwise Keras lists other variables
    copy.build(optimizer._trainable_variables)
    pairs = [(unlisted(copy)[name], value) for name, value in unlisted(optimizer).items()]
    sharded = inner_optimizer(copy)
    if hasattr(sharded, "import_state"):
        sharded.import_state(inner)
        if inner is not optimizer:
            pairs += zip(copy._variables, optimizer._variables, strict=True)
    else:
        pairs += zip(copy.variables, optimizer.variables, strict=True)
    for variable, original in pairs:
        variable.assign(original)


def unlisted(optimizer: keras.optimizers.Optimizer) -> dict[str, keras.Variable]:
    """Return by attribute the state that Keras neither lists nor saves, as Nadam's product."""
    optimizer = inner_optimizer(optimizer)
    listed = {id(variable) for variable in optimizer.variables}
    return {
        name: value
        for name, value in vars(optimizer).items()
        if isinstance(value, keras.Variable) and id(value) not in listed
    }


def has_schedule(optimizer: keras.optimizers.Optimizer) -> bool:
    """Return True if an optimizer's learning rate is a schedule or a function, not a number."""
    return callable(inner_optimizer(optimizer)._learning_rate)


def trainable_variables(optimizer: keras.optimizers.Optimizer) -> list[keras.Variable]:
    """Return the variables that an optimizer was built for, in its order; never shards."""
    optimizer = inner_optimizer(optimizer)
    whole_variables = getattr(optimizer, "whole_variables", None)
    return list(optimizer._trainable_variables if whole_variables is None else whole_variables)


def values_of(variables: Sequence[keras.Variable | tf.Variable]) -> list[tf.Variable]:
    """Return TensorFlow's variables behind Keras's; those of TensorFlow as they are."""
    return [var if isinstance(var, tf.Variable) else var.value for var in variables]


def array_of(value: Any) -> np.ndarray:
    """Return the entries of an array, a variable or a tensor, whose memory it may share."""
    # TensorFlow gives NumPy a number in place of an array for a scalar of bfloat16 or float8
    if tf.is_tensor(value) and value.dtype != tf.string:
        value = value.numpy()
    return np.asarray(value)


def entries_of(variable: keras.Variable | tf.Variable | tf.Tensor) -> np.ndarray:
    """Return a copy of the entries of a variable or tensor."""
    # Not by Keras's `convert_to_numpy`, which warns for variables under NumPy 2, and so ends tests
    # and scripts in which warnings are errors
    return np.array(array_of(variable))


def accumulated_gradients(optimizer: keras.optimizers.Optimizer) -> list[keras.Variable]:
    """Return the sums of gradients that a rank accumulates, in the order of the variables."""
    # There are none without gradient_accumulation_steps
    sums: list[keras.Variable] = getattr(inner_optimizer(optimizer), "_accumulated_gradients", [])
    return sums


def steps_of(optimizer: keras.optimizers.Optimizer) -> int:
    """Return the number of steps that an optimizer has taken, including accumulating ones."""
    return int(inner_optimizer(optimizer)._iterations)


def slots_of(
    optimizer: keras.optimizers.Optimizer,
) -> dict[str, list[keras.Variable | None]]:
    """Return an optimizer's state of each variable that it was built for, by attribute.

    Such as momentum; in the order of these variables. Includes moving averages of the weights, but
    not accumulated gradients.
    """
    listed = {id(variable) for variable in optimizer.variables}
    count = len(optimizer._trainable_variables)
    # None for a variable without this state, as Muon and Adafactor have
    slots = {
        name: [variable if id(variable) in listed else None for variable in value]
        for name, value in vars(optimizer).items()
        if name not in ("_variables", "_accumulated_gradients")
        and isinstance(value, list)
        and len(value) == count
    }
    return {name: slot for name, slot in slots.items() if any(part is not None for part in slot)}


def state_kinds(optimizer: keras.optimizers.Optimizer) -> list[str]:
    """Return the kinds of state that an optimizer's options have given it, once it is built.

    >>> sgd = keras.optimizers.SGD(momentum=0.9, use_ema=True)
    >>> sgd.build([keras.Variable([1.0])])
    >>> state_kinds(sgd)
    ['learning_rate', 'model_variables_moving_average', 'momentums']
    """
    optimizer = inner_optimizer(optimizer)
    kinds = {name.lstrip("_") for name in slots_of(optimizer)}
    kinds |= {"schedule" if has_schedule(optimizer) else "learning_rate"}
    return sorted(kinds | {"accumulated_gradients"} if accumulated_gradients(optimizer) else kinds)


@contextlib.contextmanager
def rate_as_saved(optimizer: keras.optimizers.Optimizer, kinds: Sequence[str]) -> Iterator[None]:
    """Give an optimizer the kind of learning rate that it was saved with, while its state loads.

    Args:
        kinds: `state_kinds` of the saved optimizer.
    """
    # Keras loads state by position, and only a fixed rate is a variable. By `vars`, because Keras
    # lists a variable that is assigned
    inner = inner_optimizer(optimizer)
    before = {name: getattr(inner, name) for name in ("_learning_rate", "_variables")}
    rate, variables = before.values()
    if "schedule" in kinds and not callable(rate):
        rest = [variable for variable in variables if variable is not rate]
        vars(inner).update(_learning_rate=lambda: rate, _variables=rest)
    elif "learning_rate" in kinds and callable(rate):
        rate = keras.Variable(0.0, trainable=False)
        steps, *rest = variables
        vars(inner).update(_learning_rate=rate, _variables=[steps, rate, *rest])
    try:
        yield
    finally:
        vars(inner).update(before)


def moving_averages(optimizer: keras.optimizers.Optimizer) -> list[keras.Variable]:
    """Return the moving averages that an optimizer keeps of its weights; none without `use_ema`."""
    averages = getattr(inner_optimizer(optimizer), "_model_variables_moving_average", [])
    return [average for average in averages if average is not None]


def state_of_weights(optimizer: keras.optimizers.Optimizer) -> list[tf.Variable]:
    """Return an optimizer's state for each entry of the weights, such as momentum."""
    slots = slots_of(optimizer)
    slots.pop("_model_variables_moving_average", None)
    return [variable.value for slot in slots.values() for variable in slot if variable is not None]


def require_one_replica(optimizer: keras.optimizers.Optimizer) -> None:
    """Refuse a tf.distribute strategy of several replicas. **Raises:** ConfigurationError."""
    replicas = tf.distribute.get_strategy().num_replicas_in_sync
    if replicas > 1:
        raise ConfigurationError(
            f"{type(optimizer).__name__} updates one replica in a process. Received a "
            f"tf.distribute strategy of {replicas}. Start one process for each GPU: "
            "horovodrun, cx.init(), cx.DistributedOptimizer."
        )

"""Copy Keras optimizers with a mixin, and read the state that Keras does not list."""

from __future__ import annotations

import functools
import inspect
from typing import Any

import keras
import tensorflow as tf

from tfcommx.core import ConfigurationError

# Keras keeps them out of the config.
_NOT_IN_CONFIG = ("_exclude_from_weight_decay", "_exclude_from_weight_decay_pattern")


@functools.cache
def wrapped_class(base: type, mixin: type) -> type[Any]:
    """Make the subclass of an optimizer's class with a mixin, which Keras saves as its base.

    It has its base's name and module, so a saved model holds the plain optimizer.
    """
    made = type(
        base.__name__,
        (mixin, base),
        {"__module__": base.__module__, "__qualname__": base.__qualname__},
    )
    package, _, name = keras.saving.get_registered_name(base).rpartition(">")
    if package:
        for cls in (made, base):  # The last one is what the name loads.
            keras.saving.register_keras_serializable(package, name)(cls)
    return made


def mix_into(mixin: type, optimizer: keras.optimizers.Optimizer) -> None:
    """Make an optimizer an instance of the subclass with the mixin, where a copy would not do."""
    optimizer.__class__ = wrapped_class(optimizer.__class__, mixin)


def inner_optimizer(optimizer: keras.optimizers.Optimizer) -> keras.optimizers.Optimizer:
    """Return the optimizer inside of a LossScaleOptimizer; any other one itself."""
    return getattr(optimizer, "inner_optimizer", optimizer)


def copy_with(
    mixin: type, optimizer: keras.optimizers.Optimizer, **changed: Any
) -> keras.optimizers.Optimizer:
    """Make the same optimizer, without its state, as an instance of the subclass with the mixin.

    Args:
        mixin: goes before the optimizer's class.
        optimizer: any Keras optimizer.
        changed: arguments of its constructor that replace those of its config.

    **Raises:** ConfigurationError if the optimizer cannot be made from its own config.
    """
    cls = wrapped_class(optimizer.__class__, mixin)
    rate = None if changed else optimizer._learning_rate
    try:
        # A schedule or a function goes over as it is: Keras need not know how to write it down.
        if callable(rate):
            optimizer._learning_rate = None
        config = optimizer.get_config() | changed
        if callable(rate):
            config |= {"learning_rate": rate}
        copy = cls(**config) if changed else cls.from_config(config)
    except (TypeError, ValueError, NotImplementedError) as error:
        copy = None if changed else _copy_without_surplus(cls, optimizer)
        if copy is None:
            raise ConfigurationError(
                f"The optimizer {optimizer.name!r} ({type(optimizer).__name__}) is wrapped by a "
                f"copy made from its get_config(), which failed: {error} "
                f"{_odd_arguments(optimizer)}Let get_config() return all arguments of its "
                "constructor, and nothing else."
            ) from error
    finally:
        if callable(rate):
            optimizer._learning_rate = rate
    for name in _NOT_IN_CONFIG:
        if hasattr(optimizer, name):
            setattr(copy, name, getattr(optimizer, name))
    return copy


def _named_arguments(cls: type[Any]) -> tuple[dict[str, inspect.Parameter], bool]:
    """Return what a constructor takes by name, and whether it takes anything else."""
    _, *taken = inspect.signature(cls.__init__).parameters.values()
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    named = {one.name: one for one in taken if one.kind in kinds}
    return named, any(one.kind == one.VAR_KEYWORD for one in taken)


def _copy_without_surplus(
    cls: type[Any], optimizer: keras.optimizers.Optimizer
) -> keras.optimizers.Optimizer | None:
    """Make the copy without what its constructor does not take, if its config is the same then."""
    try:
        config, (named, takes_all) = optimizer.get_config(), _named_arguments(type(optimizer))
        if takes_all:
            return None
        copy = cls(**{name: value for name, value in config.items() if name in named})
        copy.name = optimizer.name  # Keras numbers those that it names
        return copy if copy.get_config() == config else None
    except (TypeError, ValueError, NotImplementedError):
        return None


def _odd_arguments(optimizer: keras.optimizers.Optimizer) -> str:
    """Name what an optimizer's config has and its constructor does not take, and the reverse."""
    try:
        config, (named, takes_all) = optimizer.get_config(), _named_arguments(type(optimizer))
    except (TypeError, ValueError, NotImplementedError):
        return ""
    # What a `**rest` takes is named in the error of whoever refuses it.
    too_many = [] if takes_all else map(repr, sorted(config.keys() - named.keys()))
    missing = [
        repr(name) for name, one in named.items() if one.default is one.empty and name not in config
    ]
    said = ""
    if listed := ", ".join(too_many):
        said += f"The config has {listed}, which the constructor does not take. "
    if missing:
        said += f"The config lacks {', '.join(missing)}, which the constructor needs. "
    return said


def plain_copy(optimizer: keras.optimizers.Optimizer) -> keras.optimizers.Optimizer:
    """Make a wrapped optimizer as it was before the wrap, without its state."""
    here = __name__.rpartition(".")[0]
    # After the subclass that was made, and the mixins
    plain_class: type[Any] = next(
        cls for cls in type(optimizer).__mro__[1:] if not cls.__module__.startswith(here)
    )
    return plain_class.from_config(optimizer.get_config())


def copy_state(copy: keras.optimizers.Optimizer, optimizer: keras.optimizers.Optimizer) -> None:
    """Give a copy of an optimizer the state of the original, if that was built."""
    inner = getattr(optimizer, "inner_optimizer", None)
    if inner is not None and not optimizer.built:
        copy_state(copy.inner_optimizer, inner)
        return
    if not optimizer.built:
        return
    # The inner one through the outer one: Keras does not list the same variables otherwise.
    copy.build(optimizer._trainable_variables)
    sharded = inner_optimizer(copy)
    if hasattr(sharded, "import_state"):
        sharded.import_state(inner_optimizer(optimizer))
        if inner is not None:
            for ours, theirs in zip(copy._variables, optimizer._variables, strict=True):
                ours.assign(theirs)
        return
    pairs = list(zip(copy.variables, optimizer.variables, strict=True))
    pairs += [(unlisted(copy)[name], value) for name, value in unlisted(optimizer).items()]
    for ours, theirs in pairs:
        ours.assign(theirs)


def unlisted(optimizer: keras.optimizers.Optimizer) -> dict[str, keras.Variable]:
    """Return, by attribute, the state that Keras neither lists nor saves.

    Such as a product that Nadam keeps.
    """
    optimizer = inner_optimizer(optimizer)
    listed = {id(variable) for variable in optimizer.variables}
    return {
        name: value
        for name, value in vars(optimizer).items()
        if isinstance(value, keras.Variable) and id(value) not in listed
    }


def has_schedule(optimizer: keras.optimizers.Optimizer) -> bool:
    """Tell whether an optimizer's learning rate is a schedule or a function, and no number."""
    return callable(inner_optimizer(optimizer)._learning_rate)


def trainable_variables(optimizer: keras.optimizers.Optimizer) -> list[keras.Variable]:
    """Return the variables that an optimizer was built for, in its order; whole ones, no shards."""
    optimizer = inner_optimizer(optimizer)
    whole = getattr(optimizer, "whole_variables", None)
    return list(optimizer._trainable_variables if whole is None else whole)


def accumulated_gradients(optimizer: keras.optimizers.Optimizer) -> list[keras.Variable]:
    """Return the sums of gradients that a rank accumulates, in the order of the variables.

    Empty without `gradient_accumulation_steps`.
    """
    sums: list[keras.Variable] = getattr(inner_optimizer(optimizer), "_accumulated_gradients", [])
    return sums


def steps_of(optimizer: keras.optimizers.Optimizer) -> int:
    """Return how many steps an optimizer has taken; each one counts that accumulates."""
    return int(inner_optimizer(optimizer)._iterations)


def slots_of(
    optimizer: keras.optimizers.Optimizer,
) -> dict[str, list[keras.Variable | None]]:
    """Return what an optimizer keeps of each variable that it was built for, by attribute.

    Such as momentum; in the order of these variables, None where it keeps nothing (Muon and
    Adafactor do so for some). Moving averages of the weights are among them, accumulated gradients
    are not.
    """
    listed = {id(variable) for variable in optimizer.variables}
    count = len(optimizer._trainable_variables)
    found = {
        name: [one if id(one) in listed else None for one in value]
        for name, value in vars(optimizer).items()
        if name not in ("_variables", "_accumulated_gradients")
        and isinstance(value, list)
        and len(value) == count
    }
    return {name: slot for name, slot in found.items() if any(one is not None for one in slot)}


def moving_averages(optimizer: keras.optimizers.Optimizer) -> list[keras.Variable]:
    """Return the moving averages that an optimizer keeps of its weights; none without `use_ema`."""
    averages = getattr(inner_optimizer(optimizer), "_model_variables_moving_average", [])
    return [one for one in averages if one is not None]


def state_of_weights(optimizer: keras.optimizers.Optimizer) -> list[tf.Variable]:
    """Return what an optimizer keeps for each entry of the weights, such as momentum."""
    slots = slots_of(optimizer)
    slots.pop("_model_variables_moving_average", None)
    return [one.value for slot in slots.values() for one in slot if one is not None]


def require_one_replica(optimizer: keras.optimizers.Optimizer) -> None:
    """Refuse a tf.distribute strategy of several replicas. **Raises:** ConfigurationError."""
    replicas = tf.distribute.get_strategy().num_replicas_in_sync
    if replicas > 1:
        raise ConfigurationError(
            f"{type(optimizer).__name__} updates one replica in a process. Received a "
            f"tf.distribute strategy of {replicas}. Start one process for each GPU: "
            "horovodrun, cx.init(), cx.DistributedOptimizer."
        )

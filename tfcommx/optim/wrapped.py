"""Find the wrapped optimizers of a model, and their exchangers."""

import functools
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Set
from typing import Any

import keras

from tfcommx.collectives import process
from tfcommx.core import ConfigurationError
from tfcommx.keras_internals.models import users_statistics_of
from tfcommx.keras_internals.names import path_of
from tfcommx.keras_internals.optimizers import (
    accumulated_gradients,
    inner_optimizer,
    mix_into,
    steps_of,
    trainable_variables,
    unlisted,
    values_of,
)
from tfcommx.keras_internals.step import AgreedLossScale
from tfcommx.optim.exchanger import Exchanger, last_exchanger

# Packages whose objects hold no optimizers, except layers, optimizers and containers
_LIBRARIES = (
    *("builtins", "horovod", "inspect", "keras"),
    *("ml_dtypes", "numpy", "tensorflow", "tfcommx"),
)
# Largest length of a container that is searched; larger ones are data
_MOST_PARTS = 10_000
# Id of a model -> its optimizers, while a hook of `searching_once` runs
_SEARCHED: dict[int, list[keras.optimizers.Optimizer]] = {}

NOT_WRAPPED = (
    "A wrapped optimizer is required. Compile the model with "
    "tfcommx.DistributedOptimizer(optimizer, ...)."
)


def optimizers_in(model: keras.Model) -> list[keras.optimizers.Optimizer]:
    """Return the wrapped optimizers that a model holds, in an order that is the same on all ranks.

    The one of `compile`, those that are attributes of the model or of its layers, as a GAN has two,
    and those in dicts, lists, tuples and sets, in other optimizers and in objects of the user's
    that are such attributes, to any depth. Each call outside of `searching_once` searches anew:
    they may be made late.

    **Ranks:** local. **Cost:** some 25 microseconds a layer.
    """
    if id(model) in _SEARCHED:
        return list(_SEARCHED[id(model)])
    optimizers: dict[int, keras.optimizers.Optimizer] = {}
    # Objects may refer to each other in a circle
    seen: set[int] = set()
    # Breadth first: the model's own attributes precede nested ones
    queue = deque([getattr(model, "optimizer", None), *vars(model).values()])
    while queue:
        value = queue.popleft()
        # Not type(value): TensorFlow puts proxies around some tuples and dicts
        parts_of = _look_into(value.__class__)
        if parts_of is None or id(value) in seen or value is model:
            continue
        seen.add(id(value))
        if isinstance(value, keras.optimizers.Optimizer) and find_exchanger(value) is not None:
            optimizers[id(value)] = value
        else:
            queue.extend(parts_of(value))
    return list(optimizers.values())


def searching_once(hook: Callable[..., None]) -> Callable[..., None]:
    """Decorate a callback's hook, in which nothing makes optimizers: search its model only once."""

    @functools.wraps(hook)
    def searched(callback: keras.callbacks.Callback, *args: Any, **kwargs: Any) -> None:
        key = id(callback.model)
        _SEARCHED[key] = optimizers_in(callback.model)
        try:
            hook(callback, *args, **kwargs)
        finally:
            _SEARCHED.pop(key, None)

    return searched


@functools.cache
def _look_into(cls: type) -> Callable[[Any], Iterable[Any]] | None:
    """Return a function from a class's object to its parts; None if they hold no optimizers."""
    if issubclass(cls, Mapping):
        return lambda holder: holder.values() if len(holder) <= _MOST_PARTS else ()
    if issubclass(cls, Set):
        # The order of a set differs between processes
        return lambda holder: sorted(
            holder if len(holder) <= _MOST_PARTS else (),
            key=lambda part: str(getattr(part, "name", "")),
        )
    if issubclass(cls, list | tuple | deque):
        return lambda holder: holder if len(holder) <= _MOST_PARTS else ()
    is_library = cls.__module__.partition(".")[0] in _LIBRARIES
    if issubclass(cls, type) or (
        is_library and not issubclass(cls, keras.Layer | keras.optimizers.Optimizer)
    ):
        return None
    slots = [name for base in cls.__mro__ for name in getattr(base, "__slots__", ())]
    slots = [name for name in slots if name not in ("__dict__", "__weakref__")]

    def parts_of(holder: Any) -> Iterable[Any]:
        parts = [getattr(holder, name, None) for name in slots]
        return [*parts, *getattr(holder, "__dict__", {}).values()]

    return parts_of


def wrapped_optimizers(model: keras.Model) -> list[keras.optimizers.Optimizer]:
    """Return `optimizers_in` of a model. **Raises:** ConfigurationError if there is none."""
    optimizers = optimizers_in(model)
    if not optimizers:
        raise ConfigurationError(NOT_WRAPPED)
    return optimizers


def optimizers_elsewhere(model: keras.Model) -> list[keras.optimizers.Optimizer]:
    """Return wrapped optimizers that have trained the model, and that it does not hold now."""
    held = {id(exchanger_in(optimizer)) for optimizer in optimizers_in(model)}
    last = filter(None, map(last_exchanger, model.trainable_variables))
    exchangers = {id(exchanger): exchanger for exchanger in last}
    optimizers = [exchanger.optimizer() for key, exchanger in exchangers.items() if key not in held]
    return [optimizer for optimizer in optimizers if optimizer is not None]


def find_exchanger(optimizer: keras.optimizers.Optimizer | None) -> Exchanger | None:
    """Return the exchanger of an optimizer; None if it is not wrapped."""
    exchanger = getattr(optimizer, "exchanger", None)
    if exchanger is None and optimizer is not None:  # Inside of a LossScaleOptimizer by Keras
        exchanger = getattr(inner_optimizer(optimizer), "exchanger", None)
    return exchanger


def exchanger_in(optimizer: keras.optimizers.Optimizer | None) -> Exchanger:
    """Return the exchanger of a wrapped optimizer. **Raises:** ConfigurationError for any other."""
    exchanger = find_exchanger(optimizer)
    if exchanger is None:
        raise ConfigurationError(f"{NOT_WRAPPED} Received {optimizer!r}.")
    return exchanger


def exchanger_of(model: keras.Model) -> Exchanger:
    """Return the exchanger of a model's optimizer. **Raises:** ConfigurationError without one."""
    return exchanger_in(getattr(model, "optimizer", None))


def trains_alone(model: keras.Model | None) -> bool:
    """Return True if each rank trains the model at its own pace, so no call may wait for others."""
    if model is None:  # A callback outside of `fit`
        return False
    return any(
        not exchanger_in(optimizer).settings.strategy.in_lock_step
        for optimizer in optimizers_in(model)
    )


def accumulated(optimizer: keras.optimizers.Optimizer) -> dict[str, keras.Variable]:
    """Return the sums of gradients that each rank is accumulating, by variable; or none."""
    sums = accumulated_gradients(optimizer)
    if not sums:  # No gradient_accumulation_steps
        return {}
    names = exchanger_in(optimizer).names.of(trainable_variables(optimizer))
    return dict(zip(names, sums, strict=True))


def steps_of_update(optimizer: keras.optimizers.Optimizer) -> int:
    """Return the steps for each update of the weights: more than 1 if gradients accumulate."""
    return inner_optimizer(optimizer).gradient_accumulation_steps or 1


def shared_state(model: keras.Model, root: int) -> list[keras.Variable]:
    """Return the variables of a model's optimizers to broadcast; share loaded state of shards.

    **Ranks:** all, outside of traced code.
    """
    state: list[keras.Variable] = []
    for optimizer in wrapped_optimizers(model):
        if sharding := exchanger_in(optimizer).sharding:
            sharding.share_loaded(root, steps_of(optimizer))
        state += [*optimizer.variables, *unlisted(optimizer).values()]
    return state


def agree_on_names(model: keras.Model, root: int) -> None:
    """Name a model's variables, in plans and checkpoints, as rank `root` does. **Ranks:** all."""
    # Keras gives other paths to a model that is loaded than to one that is built, and one rank
    # alone may have loaded it
    for optimizer in wrapped_optimizers(model):
        names = exchanger_in(optimizer).names
        of_root = process.current().gather_objects(names.of(model.weights))[root]
        # broadcast_variables refuses other weights than the root's
        if len(of_root) == len(model.weights):
            names.rename(model.weights, of_root)


def difference_of_replicas(model: keras.Model) -> str:
    """Return the difference between the ranks' weights; empty if they are equal.

    Compared are trained weights, and floats that the user's layers assign.

    **Ranks:** all, after the same step.
    """
    differences, state = [], users_statistics_of(model)
    for optimizer in optimizers_in(model):
        exchanger = exchanger_in(optimizer)
        trained = [part for part in model.trainable_variables if last_exchanger(part) is exchanger]
        weights = exchanger.names.weights_of(trained)
        replicas, steps = exchanger.guard.replicas, steps_of(optimizer)
        differences.append(replicas.compare_now(weights, steps))
        if state:
            values = dict(zip(map(path_of, state), values_of(state), strict=True))
            differences.append(replicas.compare_now(values, steps, "state"))
            state = []  # Once, with the first optimizer
    return " ".join(filter(None, differences))


def agree_on_loss_scale(optimizer: keras.optimizers.LossScaleOptimizer) -> None:
    """Make a LossScaleOptimizer that Keras put around a wrapped optimizer agree with other ranks.

    Keras makes it in `model.compile` under a float16 policy.
    """
    # Unchanged, it decides from its own rank's gradients whether to take the step, and ranks that
    # decide differently would wait for each other forever
    if not isinstance(optimizer, AgreedLossScale):
        mix_into(AgreedLossScale, optimizer)
    optimizer.exchanger = optimizer.inner_optimizer.exchanger
    optimizer.exchanger.guard.loss_scale = "agreed"

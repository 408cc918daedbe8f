"""Find the wrapped optimizers of a model, and their exchangers."""

from __future__ import annotations

import keras

from tfcommx.comm import process
from tfcommx.optim.exchanger import Exchanger
from tfcommx.optim.keras_internals import (
    AgreedLossScale,
    accumulated_gradients,
    inner_optimizer,
    trainable_variables,
    wrapped_class,
)

NOT_WRAPPED = (
    "A wrapped optimizer is required. Compile the model with "
    "tfcommx.DistributedOptimizer(optimizer, ...)."
)


def wrapped_optimizers(model: keras.Model) -> list[keras.optimizers.Optimizer]:
    """Return the model's wrapped optimizers: that of `compile`, and those that are its attributes.

    A GAN has two, for example.

    **Raises:** RuntimeError if there is none.
    """
    held = {
        id(value): value
        for value in (getattr(model, "optimizer", None), *vars(model).values())
        if isinstance(value, keras.optimizers.Optimizer)
    }
    found = [optimizer for optimizer in held.values() if find_exchanger(optimizer) is not None]
    if not found:
        raise RuntimeError(NOT_WRAPPED)
    return found


def find_exchanger(optimizer: keras.optimizers.Optimizer | None) -> Exchanger | None:
    """Return the exchanger of an optimizer; None if it is not wrapped."""
    found = getattr(optimizer, "exchanger", None)
    if found is None and optimizer is not None:  # Inside of a LossScaleOptimizer that Keras made
        found = getattr(inner_optimizer(optimizer), "exchanger", None)
    return found


def exchanger_in(optimizer: keras.optimizers.Optimizer | None) -> Exchanger:
    """Return the exchanger of a wrapped optimizer.

    **Raises:** RuntimeError if it is not wrapped.
    """
    found = find_exchanger(optimizer)
    if found is None:
        raise RuntimeError(NOT_WRAPPED)
    return found


def exchanger_of(model: keras.Model) -> Exchanger:
    """Return the exchanger of the optimizer that the model was compiled with.

    **Raises:** RuntimeError if it is not wrapped.
    """
    return exchanger_in(model.optimizer)


def trains_alone(model: keras.Model | None) -> bool:
    """Tell whether each rank trains the model at its own pace: nothing may wait for the others."""
    if model is None:  # A callback outside of `fit`
        return False
    held = (getattr(model, "optimizer", None), *vars(model).values())
    found = [find_exchanger(one) for one in held if isinstance(one, keras.optimizers.Optimizer)]
    return any(one is not None and not one.in_lock_step for one in found)


def accumulated(optimizer: keras.optimizers.Optimizer) -> dict[str, keras.Variable]:
    """Return the sums of gradients that each rank is accumulating, by variable.

    Empty without `gradient_accumulation_steps`.
    """
    sums = accumulated_gradients(optimizer)
    if not sums:
        return {}
    names = exchanger_in(optimizer).names.of(trainable_variables(optimizer))
    return dict(zip(names, sums, strict=True))


def steps_of_update(optimizer: keras.optimizers.Optimizer) -> int:
    """Return the steps for each update of the weights: more than 1 if gradients accumulate."""
    return inner_optimizer(optimizer).gradient_accumulation_steps or 1


def agree_on_names(model: keras.Model, root: int) -> None:
    """Call a model's variables, in plans and checkpoints, what rank `root` calls them.

    Keras gives other paths to a model that is loaded than to one that is built, and one rank alone
    may have loaded it.

    **Ranks:** all. A model with other weights than the root's is left as it is: broadcast_variables
    refuses it.
    """
    for optimizer in wrapped_optimizers(model):
        names = exchanger_in(optimizer).names
        of_root = process.current().gather_objects(names.of(model.weights))[root]
        if len(of_root) == len(model.weights):
            names.rename(model.weights, of_root)


def agree_on_loss_scale(optimizer: keras.optimizers.LossScaleOptimizer) -> None:
    """Let a LossScaleOptimizer that Keras put around a wrapped optimizer agree with other ranks.

    Keras makes it in `model.compile` under a float16 policy. By itself it decides from the
    gradients of its own rank whether to take the step, and ranks that decide differently would wait
    for each other forever. Nothing else changes.
    """
    optimizer.__class__ = wrapped_class(type(optimizer), AgreedLossScale)
    optimizer.exchanger = optimizer.inner_optimizer.exchanger
    optimizer.exchanger.loss_scale = "agreed"

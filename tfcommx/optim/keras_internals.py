"""The only module that touches private members of Keras."""

from __future__ import annotations

from typing import Any

import keras

from tfcommx.comm import process

NOT_WRAPPED = (
    "A wrapped optimizer is required. Compile the model with "
    "tfcommx.DistributedOptimizer(optimizer, ...)."
)


def wrapped_optimizers(model: keras.Model) -> list[keras.optimizers.Optimizer]:
    """Return the model's wrapped optimizers: that of `compile`, and those that are its attributes,
    as a GAN has two.

    **Raises:** RuntimeError where there is none.
    """
    held = {
        id(value): value
        for value in (model.optimizer, *vars(model).values())
        if isinstance(value, keras.optimizers.Optimizer)
    }
    found = [optimizer for optimizer in held.values() if exchanger_in(optimizer) is not None]
    if not found:
        raise RuntimeError(NOT_WRAPPED)
    return found


def exchanger_of(model: keras.Model) -> Any:
    """Return the exchanger of the optimizer that the model was compiled with. **Raises:**
    RuntimeError where it is not wrapped.
    """
    if (found := exchanger_in(model.optimizer)) is None:
        raise RuntimeError(NOT_WRAPPED)
    return found


def exchanger_in(optimizer: Any) -> Any:
    """Return the exchanger of an optimizer; None where it is not wrapped."""
    inner = getattr(optimizer, "inner_optimizer", None)  # of a LossScaleOptimizer that Keras made
    return getattr(optimizer, "exchanger", None) or getattr(inner, "exchanger", None)


def accumulated(optimizer: keras.optimizers.Optimizer) -> dict[str, keras.Variable]:
    """Return the sums of gradients that each rank is accumulating, by variable; empty without
    gradient accumulation.
    """
    optimizer = getattr(optimizer, "inner_optimizer", optimizer)
    sums = getattr(optimizer, "_accumulated_gradients", [])
    return (
        dict(zip(optimizer.exchanger.names_of(optimizer._trainable_variables), sums, strict=True))
        if sums
        else {}
    )


def agree_on_names(model: keras.Model, root: int) -> None:
    """Call a model's variables, in plans and checkpoints, what rank `root` calls them.

    Keras gives other paths to a model that is loaded than to one that is built, and one rank alone
    may have loaded it.
    **Ranks:** all. A model with other weights than the root's is left as it is: broadcast_variables
    refuses it.
    """
    for optimizer in wrapped_optimizers(model):
        exchanger = exchanger_in(optimizer)
        names = process.current().gather_objects(exchanger.names_of(model.weights))[root]
        if len(names) == len(model.weights):
            exchanger.rename_variables(model.weights, names)


def seed_generators(model: keras.Model) -> list[keras.random.SeedGenerator]:
    """Return the generators of a model's layers, such as dropout's. Keras saves none of them."""
    return list(
        {
            id(one): one for layer in model._flatten_layers() for one in layer._seed_generators
        }.values()
    )

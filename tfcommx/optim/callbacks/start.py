"""BroadcastState: all ranks start from the same point."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import keras

from tfcommx.comm import process
from tfcommx.optim import distributed_optimizer
from tfcommx.optim.broadcast import broadcast_variables
from tfcommx.optim.keras_internals import (
    accumulated,
    agree_on_names,
    exchanger_in,
    seed_generators,
    wrapped_optimizers,
)
from tfcommx.terms import PlanError

log = logging.getLogger("tfcommx")


# between the seeds of two ranks: more than models have generators, which Keras may number
SEED_STEP = 1_000_003


class BroadcastState(keras.callbacks.Callback):
    """Start all ranks from the same point: weights and optimizer state of rank `root`; no XLA, one
    loss scale.

    Seeds, as of dropout, follow from those of rank `root`, each rank's own: ranks that drop the
    same entries learn less from a batch.

    What Keras builds in the first training step only, as layers without an input shape, is
    broadcast after that step, with all
    else: it was taken with gradients from different weights, but leaves all ranks with rank
    `root`'s. To begin with the same weights, or with those that one rank alone has loaded, build
    the model before `fit`.

    Sums of gradients that are being accumulated stay, and residuals: each rank has its own. Wrapped
    optimizers that are attributes of the model, as a GAN has two, count as its optimizer does.
    **Ranks:** all. **Cost:** one broadcast per variable, once; twice where a layer was not built.
    **Raises:** PlanError where ranks would wait for each other for ever: with unequal numbers of
    steps in an epoch, unequal first epochs or unequal last ones.
    """

    def __init__(self, root: int = 0) -> None:
        super().__init__()
        self.root = root
        # something is broadcast after the first step; an epoch has begun
        self.unbuilt, self.begun = False, False

    def on_train_begin(self, logs: Any = None) -> None:
        model, params = self.model, self.params or {}
        optimizers = wrapped_optimizers(model)
        built = [layer.built for layer in model._flatten_layers()]
        steps, epochs, builts = zip(
            *process.current().gather_objects((params.get("steps"), params.get("epochs"), built)),
            strict=True,
        )
        _require_equal(
            steps,
            "take the same number of steps in an epoch",
            "Give all ranks equally many batches, or pass the same `steps_per_epoch`.",
        )
        _require_equal(epochs, "train until the same epoch", "Pass the same `epochs`.")
        self.unbuilt, self.begun = not all(map(all, builts)), False
        for optimizer in optimizers:
            if exchanger_in(optimizer).loss_scale == "local":
                distributed_optimizer.agree_on_loss_scale(optimizer)
            if optimizer is model.optimizer and not optimizer.built and not self.unbuilt:
                optimizer.build(model.trainable_variables)
        if model.jit_compile:
            log.warning(
                "jit_compile is turned off: Horovod's collectives cannot be compiled by XLA."
            )
            model.jit_compile = False
            model.make_train_function(force=True)
        if not self.unbuilt or all(theirs == built for theirs in builts):
            self._broadcast()

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        if not self.begun:
            self._compare_first(epoch)

    # not on_train_batch_end: for it, Keras waits after every step
    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        if self.unbuilt and batch:
            self._broadcast_built()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        if self.unbuilt:  # an epoch of one call
            self._broadcast_built()

    def on_train_end(self, logs: Any = None) -> None:
        if not self.begun:  # no epoch is left on this rank
            self._compare_first(None)

    def _compare_first(self, epoch: int | None) -> None:
        self.begun = True
        _require_equal(
            process.current().gather_objects(epoch),
            "begin at the same epoch",
            "Pass the same `initial_epoch`; restore the same backup or checkpoint on every rank.",
        )

    def _broadcast_built(self) -> None:
        self.unbuilt = False
        self._broadcast()

    def _broadcast(self) -> None:
        optimizers = wrapped_optimizers(self.model)
        own = {
            id(variable) for optimizer in optimizers for variable in accumulated(optimizer).values()
        }
        state = [
            variable
            for optimizer in optimizers
            for variable in (
                *optimizer.variables,
                *distributed_optimizer.unlisted(optimizer).values(),
            )
        ]
        agree_on_names(self.model, self.root)  # now, while the order is that of the whole model
        broadcast_variables(
            [variable for variable in (*self.model.variables, *state) if id(variable) not in own],
            self.root,
        )
        for generator in seed_generators(self.model) if process.rank() != self.root else ():
            seed, count = generator.state.numpy()
            generator.state.assign(
                [(int(seed) + (process.rank() - self.root) * SEED_STEP) % 2**31, count]
            )


def _require_equal(values: Sequence[Any], what: str, remedy: str) -> None:
    if len(set(values)) > 1:
        raise PlanError(
            f"Every rank must {what}. Received {list(values)} on ranks 0 to {len(values) - 1}. "
            f"{remedy}"
        )

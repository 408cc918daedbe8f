"""The learning rate of each step, from the recipe."""

from __future__ import annotations

import keras

from tfcommx.recipes.recipe import Recipe


class LearningRate(keras.callbacks.Callback):
    """Sets the learning rate of every step from the recipe.

    A callback and not a Keras schedule, so that the saved optimizer needs nothing of ours to be
    loaded.
    """

    def __init__(self, recipe: Recipe, steps_per_epoch: int, global_batch: int) -> None:
        super().__init__()
        self.rate = recipe.learning_rate
        self.sizes = (steps_per_epoch, steps_per_epoch * recipe.epochs, global_batch)
        # Steps before this epoch
        self.before = 0

    def on_epoch_begin(self, epoch: int, logs: dict | None = None) -> None:
        self.before = epoch * self.sizes[0]

    def on_train_batch_begin(self, batch: int, logs: dict | None = None) -> None:
        self.model.optimizer.learning_rate = self.rate.at(self.before + batch, *self.sizes)

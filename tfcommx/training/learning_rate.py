"""The learning rate of each step, from the recipe."""

from __future__ import annotations

import keras

from tfcommx.recipes.recipe import Recipe


class LearningRate(keras.callbacks.Callback):
    """Sets the learning rate of every step from the recipe.

    A callback and not a Keras schedule, so that the saved optimizer needs nothing of ours to be
    loaded.
    """

    def __init__(self, recipe: Recipe, steps_of_epoch: list[int], ranks: int) -> None:
        super().__init__()
        self.recipe, self.steps_of_epoch, self.ranks = recipe, steps_of_epoch, ranks
        self.epoch = 0

    def on_epoch_begin(self, epoch: int, logs: dict | None = None) -> None:
        self.epoch = epoch

    def on_train_batch_begin(self, batch: int, logs: dict | None = None) -> None:
        steps = self.steps_of_epoch[self.epoch]
        rate = self.recipe.rate(self.epoch, batch, steps, self.ranks)
        self.model.optimizer.learning_rate = rate

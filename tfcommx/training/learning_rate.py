"""The learning rate of each step, from the recipe."""

from __future__ import annotations

import keras

from tfcommx.training.position import Position, StepCounter
from tfcommx.training.run import Run


class LearningRate(keras.callbacks.Callback):
    """Sets the learning rate of every step from the recipe.

    A callback and not a Keras schedule, so that the saved optimizer needs nothing of ours to be
    loaded.
    """

    def __init__(self, run: Run, counter: StepCounter) -> None:
        super().__init__()
        self.run, self.counter = run, counter

    def on_train_batch_begin(self, batch: int, logs: dict | None = None) -> None:
        """Set the rate of the step that begins."""
        rate = rate_at(self.run, self.counter.phase, self.counter.position)
        self.model.optimizer.learning_rate = rate


def rate_at(run: Run, phase: int, position: Position) -> float:
    """Return the learning rate of a step of a phase.

    The schedule counts in steps of the first phase, of which those of a phase with another batch
    are a part.
    """
    first, ranks = run.steps[0], run.comm.topology.size
    step = position.step * first / run.steps[phase]
    return run.recipe.rate(position.epoch, step, first, ranks)

"""Callbacks that carry out a recipe: the learning rate, evaluation, and what `auto` is told."""

from __future__ import annotations

import time

import keras

from tfcommx.optim.step_boundary import consolidate
from tfcommx.optim.wrapped import exchanger_of, steps_of_update
from tfcommx.recipes.recipe import Phase
from tfcommx.training.run import Run
from tfcommx.training.steps import Position, StepCounter
from tfcommx.training.timing import Timing


class LearningRate(keras.callbacks.Callback):
    """Sets the learning rate of every step from the recipe.

    A callback and not a Keras schedule, so that a saved optimizer loads without tfcommx.
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

    The schedule counts in steps of the first phase. A phase with another batch has more or fewer
    steps, and each of them is a fraction of those.
    """
    first, ranks = run.steps[0], run.comm.topology.size
    step = position.step * first / run.steps[phase]
    return run.recipe.rate(position.epoch, step, first, ranks)


class InformAuto(keras.callbacks.Callback):
    """Tells the scheme "auto" how many steps share a scheme; comes before SwitchScheme."""

    def __init__(self, run: Run) -> None:
        super().__init__()
        self.run = run

    def on_epoch_begin(self, epoch: int, logs: dict | None = None) -> None:
        """Tell it: if the epoch has another scheme, its first step makes a new plan."""
        accumulated = steps_of_update(self.model.optimizer)
        exchanger_of(self.model).requested.expected_run = self.run.expected_run(epoch, accumulated)


class Consolidate(keras.callbacks.Callback):
    """Makes the weights whole and equal at each epoch's end, if the strategy lets them drift.

    BroadcastState does it too, but is there in a run's first phase only.
    **Ranks:** all.
    """

    def on_epoch_end(self, epoch: int, logs: dict | None = None) -> None:
        """Average what drifted."""
        consolidate(self.model.optimizer)


class Evaluation(keras.callbacks.Callback):
    """Evaluates the model on the test samples at each epoch's end, at the phase's resolution.

    Every rank takes its own part of the test set; the scores are over all of them.
    **Ranks:** all.
    """

    def __init__(self, run: Run, timing: Timing) -> None:
        super().__init__()
        self.run, self.timing = run, timing

    def start_phase(self, model: keras.Model, phase: Phase) -> None:
        """Evaluate at this phase's batch and resolution from now on."""
        self.test = self.run.data.test(self.run.recipe.batch(phase), phase.resolution)
        # Traced anew for the new resolution
        self.score = self.run.objective.scorer(model)

    def on_epoch_end(self, epoch: int, logs: dict | None = None) -> None:
        start = time.time()
        scores = self.score(self.test, self.run.comm.gather_objects)
        if logs is not None:
            logs.update(scores)
        self.timing.seconds["evaluation"] += time.time() - start

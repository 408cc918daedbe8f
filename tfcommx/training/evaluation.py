"""Evaluation: scores on the test set after each epoch."""

from __future__ import annotations

import time

import keras

from tfcommx.recipes.recipe import Phase
from tfcommx.training.run import Run
from tfcommx.training.timing import Timing


class Evaluation(keras.callbacks.Callback):
    """Evaluates the model on the test samples at each epoch's end, at the phase's resolution.

    Every rank takes its own part of the test set; the scores are over all of them.
    **Ranks:** all.
    """

    def __init__(self, run: Run, timing: Timing) -> None:
        super().__init__()
        self.run, self.timing = run, timing

    def at(self, model: keras.Model, phase: Phase) -> None:
        """Evaluate as this phase asks for from now on."""
        self.test = self.run.data.test(self.run.recipe.batch(phase), phase.resolution)
        # The new resolution is traced into it
        self.score = self.run.objective.scorer(model)

    def on_epoch_end(self, epoch: int, logs: dict | None = None) -> None:
        start = time.time()
        scores = self.score(self.test, self.run.comm.gather_objects)
        if logs is not None:
            logs.update(scores)
        self.timing.seconds["evaluation"] += time.time() - start

"""The samples, the model and the notes that all ranks under losses.py share.

Into the run's folder:

    pid-PID            one for each process of a rank
    run-RUN            empty; RUN is the supervisor's name of the run
    steps-GENERATION   by rank 0, a line after each step: time, step of the whole run, ranks
    weights-RANK       a hash of the weights at the end
    scores             by rank 0: epochs, loss and accuracy on samples that no rank trains on
"""

from __future__ import annotations

import hashlib
import os
import time
from pathlib import Path

import keras
import numpy as np

STEPS, BATCH, WIDTH, CLASSES = 40, 32, 256, 10


class Notes:
    """Writes a rank's progress into the run's folder.

    Args:
        folder: of the run.
        generation: number of the start of the ranks.
    """

    def __init__(self, folder: Path, generation: int) -> None:
        self._folder, self._generation = folder, generation
        (folder / f"pid-{os.getpid()}").write_text(str(os.getpid()))
        if "TFCOMMX_RUN" in os.environ:
            (folder / f"run-{os.environ['TFCOMMX_RUN']}").touch()

    def step(self, number: int, ranks: int) -> None:
        """Note that a step of the whole run has been taken, as rank 0."""
        with (self._folder / f"steps-{self._generation}").open("a") as file:
            print(time.time(), number, ranks, file=file)

    def next_generation(self) -> None:
        """Note that the ranks have noticed a loss, and count from here."""
        with (self._folder / "noticed").open("a") as file:
            print(time.time(), file=file)
        self._generation += 1

    def score(self, epochs: int, model: keras.Model) -> None:
        """Note how good a classifier is after so many epochs, as rank 0."""
        loss, accuracy = model.evaluate(*samples(4096, 2), batch_size=512, verbose=0)
        with (self._folder / "scores").open("a") as file:
            print(epochs, f"{loss:.4f} {accuracy:.4f}", file=file)

    def weights(self, rank: int, weights: list[np.ndarray]) -> None:
        """Note a hash of the weights at the end."""
        whole = b"".join(weight.tobytes() for weight in weights)
        found = hashlib.sha256(whole).hexdigest()[:16]
        (self._folder / f"weights-{rank}").write_text(found)


def samples(count: int, seed: object) -> tuple[np.ndarray, np.ndarray]:
    """Return inputs, and their classes by a fixed teacher."""
    teacher = np.random.default_rng(0).normal(size=(WIDTH, CLASSES)).astype("f4")
    inputs = np.random.default_rng(seed).normal(size=(count, WIDTH)).astype("f4")
    return inputs, np.argmax(inputs @ teacher, axis=1)


def classifier() -> keras.Model:
    """Return a model of 136,000 parameters."""
    layers = keras.layers
    return keras.Sequential(
        [
            layers.Input((WIDTH,)),
            layers.Dense(WIDTH, activation="relu"),
            layers.BatchNormalization(),
            layers.Dense(WIDTH, activation="relu"),
            layers.Dense(CLASSES),
        ]
    )

"""Contracts of what a recipe is made of: data set, model, task and optimizer.

A member is a frozen, checked class that a recipe's YAML is read into. It builds its part of the run
when the run starts: reading a recipe loads no TensorFlow.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np

if TYPE_CHECKING:
    import keras
    import tensorflow as tf

    from tfcommx.data.cache.batch_spec import BatchSpec
    from tfcommx.data.cache.cache import DataCache
    from tfcommx.data.sources.base import Source


@dataclass(frozen=True)
class Samples:
    """The samples of a data set."""

    # What the data cache reads for training; `count` says how many there are
    train: Source
    # All test samples, which every rank holds: inputs [n, h, w, c] and labels [n]
    test_inputs: np.ndarray
    test_labels: np.ndarray
    # Names of the classes, in the order of the labels' numbers
    classes: tuple[str, ...]


class Dataset(Protocol):
    """Which samples, how the cache holds them, and how they are varied."""

    @property
    def memory(self) -> Path:
        """Folder of shared memory."""

    @property
    def reshuffle_fraction(self) -> float:
        """Share of each node's samples that is redistributed before each epoch, in [0, 1]."""

    def fetch(self) -> Path:
        """Put the files on this machine, if they are not there; return their folder."""

    def build(self) -> Samples:
        """Read the samples. **Raises:** DataError if they are missing or damaged."""

    def serving(self, batch: int, resolution: int) -> BatchSpec:
        """Return how the cache serves a batch for training."""

    def batches(self, cache: DataCache, spec: BatchSpec, epochs: range) -> tf.data.Dataset:
        """Return the training batches (inputs, labels) of some epochs, one after the other."""

    def test_inputs(self, pictures: tf.Tensor, resolution: int) -> tf.Tensor:
        """Return test pictures as the network is trained on them."""


class Model(Protocol):
    """A network and its sizes."""

    def build(self, outputs: int) -> keras.Model:
        """Build the network with that many outputs."""


class Objective(Protocol):
    """What a network is trained for, on the samples of one data set."""

    @property
    def outputs(self) -> int:
        """Number of outputs that the network needs."""

    def loss(self) -> keras.losses.Loss:
        """Return the loss of (targets, outputs)."""

    def metrics(self) -> Sequence[str]:
        """Return the names of Keras's metrics; `accuracy` is among them."""

    def targets(self, batches: tf.data.Dataset) -> tf.data.Dataset:
        """Turn batches of (inputs, labels) into batches of (inputs, targets)."""

    def count_right(self, outputs: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
        """Return int64 []: how many of these samples the network gets right."""


class Task(Protocol):
    """What a network learns."""

    def build(self, samples: Samples) -> Objective:
        """Return the task for these samples."""


class OptimizerRecipe(Protocol):
    """An optimizer and its settings, except the learning rate."""

    @property
    def momentum(self) -> float:
        """Momentum of the optimizer, in [0, 1); 0 if it has none."""

    def build(self) -> keras.optimizers.Optimizer:
        """Build the optimizer of one process, with learning rate 0: each step sets its own."""

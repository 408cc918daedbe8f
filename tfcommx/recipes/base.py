"""Contracts of what a recipe is made of: data set, model, task and optimizer.

A member is a frozen, checked class that a recipe's YAML is read into. Its `build` makes its part of
the run when the run starts: reading a recipe loads no TensorFlow.

    Dataset --build(place)--> Data --+--> Task.build(data) --> Objective
                                     |                          | inputs, outputs
                                     |                          v
                                     |                        Model.build --> keras.Model
                                     +--> batches of every step and of the evaluation
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import keras
    import tensorflow as tf

    from tfcommx.comm.base import Comm
    from tfcommx.terms import Topology

# Gives one object of this rank, and returns those of all ranks, in their order
Gather = Callable[[Any], list[Any]]
# Evaluates a model on this rank's batches of test samples; returns the scores over all ranks
Scorer = Callable[["tf.data.Dataset", Gather], dict[str, float]]


@dataclass(frozen=True)
class Place:
    """Where a data set is opened: which ranks there are, which of them this is."""

    topology: Topology
    # In [0, topology.size)
    rank: int
    # Of the order of the samples and of their variation
    seed: int = 0
    # That prepare batches in one process; None: all processors of the process
    threads: int | None = None


class Data(Protocol):
    """A data set, open on one rank."""

    # Channels of the pictures, or words of the vocabulary
    inputs: int
    # Names of the classes in the order of their numbers; for text the words of the vocabulary
    classes: tuple[str, ...]
    # Samples for training, over all ranks
    count: int
    # Whether samples are redistributed between epochs: then nothing may read ahead over the end
    redistributes: bool

    def steps(self, batch: int, resolution: int) -> int:
        """Return the steps of an epoch, >= 0, the same on every rank and in every epoch.

        Args:
            batch: pictures, or word pieces, a step on one rank.
            resolution: pixels a side, or word pieces of the longest sentence.
        """

    def train(self, batch: int, resolution: int, epochs: range, step: int = 0) -> tf.data.Dataset:
        """Return the training batches (inputs, labels) of some epochs, one after the other.

        They are a pure function of the arguments and the place.

        Args:
            batch: as `steps` takes it.
            resolution: as `steps` takes it.
            epochs: numbers of the epochs, counted over the whole run: they decide the order.
            step: first step of the first epoch, in [0, steps]: to resume in mid-epoch.
        """

    def test(self, batch: int, resolution: int) -> tf.data.Dataset:
        """Return this rank's own part of the test samples, each once, in batches."""

    def redistribute(self, epoch: int, comm: Comm) -> None:
        """Redistribute samples before an epoch, if they are. **Ranks:** all."""

    def report(self, epoch: int) -> dict[str, float]:
        """Return numbers of the loading in an epoch; empty if there are none."""

    def close(self) -> None:
        """Give memory back."""


class Dataset(Protocol):
    """Which samples, how they are kept, and how they are varied."""

    def fetch(self) -> Path | None:
        """Put the files on this machine, if they are not there; return their folder."""

    def build(self, place: Place) -> Data:
        """Open the data set on this rank.

        **Ranks:** all; none waits for another. **Raises:** DataError, PlanError or SampleError if
        samples are missing or damaged.
        """


class Model(Protocol):
    """A network and its sizes. A field `resolution` says the only one that it takes, in pixels."""

    def build(self, inputs: int, outputs: int) -> keras.Model:
        """Build the network.

        Args:
            inputs: channels of the pictures, or words of the vocabulary.
            outputs: logits: classes, or words of the vocabulary.
        """


class Objective(Protocol):
    """What a network is trained for, on one data set."""

    @property
    def inputs(self) -> int:
        """What the network takes: channels of the pictures, or words of the vocabulary."""

    @property
    def outputs(self) -> int:
        """Number of outputs that the network needs."""

    @property
    def counted(self) -> str:
        """What a batch's size and the throughput count: "images", "word pieces", ..."""

    @property
    def scores(self) -> Sequence[str]:
        """Names of what `scorer` finds."""

    def loss(self) -> keras.losses.Loss:
        """Return the loss of (targets, outputs)."""

    def metrics(self) -> Sequence[Any]:
        """Return Keras's metrics, or their names; one has the name `accuracy`."""

    def targets(self, batches: tf.data.Dataset) -> tf.data.Dataset:
        """Turn batches of (inputs, labels) into what `fit` takes: (inputs, targets[, weights])."""

    def scorer(self, model: keras.Model) -> Scorer:
        """Return what evaluates the model as it is when it is called.

        Its scores are named `test_...`; `test_accuracy`, in [0, 1], is among them. It is made anew
        for each resolution, so that TensorFlow traces each once.
        """


class Task(Protocol):
    """What a network learns."""

    def build(self, data: Data) -> Objective:
        """Return the task for these samples."""


class OptimizerRecipe(Protocol):
    """An optimizer and its settings, except the learning rate."""

    @property
    def momentum(self) -> float:
        """Momentum of the optimizer, in [0, 1); 0 if it has none."""

    def build(self) -> keras.optimizers.Optimizer:
        """Build the optimizer of one process, with learning rate 0: each step sets its own."""

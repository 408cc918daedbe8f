"""The contracts of a recipe's families: data set, model, task and optimizer.

A member is a frozen class that validates its part of the YAML. Its `build` runs when training
starts.

    Dataset --build(place)--> Data --+--> Task.build(data) --> Objective
                                     |                          | inputs, outputs
                                     |                          v
                                     |                        Model.build --> keras.Model
                                     +--> batches of every step and of the evaluation
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import keras
    import tensorflow as tf

    from tfcommx.collectives.comm import Comm
    from tfcommx.core import Topology

# Object of this rank -> those of all ranks, in their order, as by `Comm.gather_objects`
Gather = Callable[[Any], list[Any]]
# (this rank's batches of test samples, gather) -> scores of a model over all ranks
Scorer = Callable[["tf.data.Dataset", Gather], dict[str, float]]


@dataclass(frozen=True)
class DataRank:
    """The rank that opens a data set, in a topology."""

    topology: Topology
    # This rank, in [0, topology.size)
    rank: int
    # Seed of the order of the samples and of their augmentation
    seed: int = 0
    # Number of threads that prepare batches; None: all processors of the process
    threads: int | None = None


class Data(Protocol):
    """A data set, open on one rank.

    It may have `contents`, a dictionary item -> value that must be equal on all ranks and describes
    the files read on this node, such as those of a class. If a copy differs, the error names the
    item.
    """

    # Channels of the pictures, or words of the vocabulary
    inputs: int
    # Names of the classes by number; for text the words of the vocabulary
    classes: tuple[str, ...]
    # Number of training samples over all ranks
    count: int
    # Whether samples move between nodes from epoch to epoch. If so, `train` must not read ahead
    # across the end of an epoch
    redistributes: bool

    def steps(self, batch: int, resolution: int) -> int:
        """Return the number of steps of an epoch, >= 0, equal on all ranks and in all epochs.

        Args:
            batch: number of pictures, or word pieces, per step and rank.
            resolution: pixels of a side, or word pieces of the longest sentence.
        """

    def train(self, batch: int, resolution: int, epochs: range, step: int = 0) -> tf.data.Dataset:
        """Return the training batches (inputs, labels) of some epochs, one after the other.

        They are a pure function of the arguments and of `place`.

        Args:
            batch, resolution: as in `steps`.
            epochs: numbers of the epochs in the whole run, which decide the order.
            step: first step of the first epoch, in [0, steps], to resume within an epoch.
        """

    def test(self, batch: int, resolution: int) -> tf.data.Dataset:
        """Return batches of this rank's share of the test samples, each sample once."""

    def redistribute(self, epoch: int, comm: Comm) -> None:
        """Move samples between nodes before an epoch, if `redistributes`. **Ranks:** all."""

    def report(self, epoch: int) -> dict[str, float]:
        """Return statistics of loading in an epoch; may be empty."""

    def close(self) -> None:
        """Free the memory."""


class Dataset(Protocol):
    """Settings of a data set: samples, storage and augmentation.

    A method `fetch` that downloads the files and returns their folder makes the name one that
    `python -m tfcommx.recipes.datasets NAME` takes; it needs defaults for all settings.
    """

    def build(self, place: DataRank) -> Data:
        """Open the data set on this rank.

        **Ranks:** all; none waits for another. **Raises:** DataError, ConfigurationError or
        SampleError for missing or damaged samples.
        """


class Model(Protocol):
    """A network and its sizes; a network for a single resolution has a field `resolution`."""

    def build(self, inputs: int, outputs: int) -> keras.Model:
        """Build a network of `Objective.inputs` and `Objective.outputs`."""


class Objective(Protocol):
    """A task on one data set: loss, metrics and scores."""

    @property
    def inputs(self) -> int:
        """Channels of the pictures, or words of the vocabulary."""

    @property
    def outputs(self) -> int:
        """Logits of the network: classes, or words of the vocabulary."""

    @property
    def counted(self) -> str:
        """The unit of batch size and throughput: "images", "word pieces", ..."""

    @property
    def scores(self) -> Sequence[str]:
        """Names of the scores that `scorer` computes."""

    def loss(self) -> keras.losses.Loss:
        """Return the loss, a function of targets and outputs."""

    def metrics(self) -> Sequence[str | keras.metrics.Metric]:
        """Return Keras metrics, or their names; one is called `accuracy`."""

    def targets(self, batches: tf.data.Dataset) -> tf.data.Dataset:
        """Turn batches (inputs, labels) into those of `fit`: (inputs, targets[, weights])."""

    def scorer(self, model: keras.Model) -> Scorer:
        """Return a function that scores the model's current weights.

        Names of scores begin with `test_`; `test_accuracy`, in [0, 1], is one of them. The trainer
        calls this once for each resolution, so that TensorFlow traces each once.
        """


class Task(Protocol):
    """A task for a network to learn."""

    def build(self, data: Data) -> Objective:
        """Return the objective on these samples."""


class OptimizerRecipe(Protocol):
    """An optimizer and its settings, except the learning rate."""

    @property
    def momentum(self) -> float:
        """Momentum of the optimizer, in [0, 1); 0 if it has none."""

    def build(self) -> keras.optimizers.Optimizer:
        """Build a plain Keras optimizer with learning rate 0; each step sets its rate."""

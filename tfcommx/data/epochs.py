"""The epochs of one call of `DataCache.dataset`: their batches, and counts of served samples."""

import dataclasses
import math
import warnings
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import tensorflow as tf

from tfcommx.core import ConfigurationError
from tfcommx.data import order
from tfcommx.data.options import BatchSpec


class EpochStats:
    """Counts of the samples that one dataset served, epoch by epoch."""

    def __init__(self, first_epoch: int, epochs: int) -> None:
        self.first_epoch = first_epoch
        # For each epoch: seconds waited, samples served
        with tf.device("/cpu:0"):
            self._rows = tf.Variable(tf.zeros([epochs, 2], tf.float64), trainable=False)

    def of(self, epoch: int) -> tuple[float, float]:
        """Return (seconds waited, samples served) of an epoch; zeros for an epoch out of range."""
        row = epoch - self.first_epoch
        if not 0 <= row < self._rows.shape[0]:
            return 0.0, 0.0
        waited, served = self._rows[row].numpy().tolist()
        return waited, served

    def recorded(self, batches: tf.data.Dataset) -> tf.data.Dataset:
        """Return a dataset of (images, labels) from (images, labels, epoch), and record its use."""
        clock = tf.timestamp if _has_clock() else lambda: tf.constant(math.nan, tf.float64)

        @tf.autograph.experimental.do_not_convert
        def deliver(
            requested_at: tf.Tensor, batch: tuple[tf.Tensor, tf.Tensor, tf.Tensor]
        ) -> tuple[tf.Tensor, tf.Tensor]:
            images, labels, epoch = batch
            # Not below 0, because the clock may be set meanwhile
            waited = tf.maximum(clock() - requested_at, tf.constant(0.0, tf.float64))
            row = tf.stack([waited, tf.cast(tf.shape(labels)[0], tf.float64)])
            recorded = self._rows.scatter_nd_add([[epoch - self.first_epoch]], [row])
            with tf.control_dependencies([recorded]):
                return tf.identity(images), tf.identity(labels)

        # The time precedes the batch, because `zip` reads its inputs in turn, in the thread of the
        # consumer
        times = tf.data.Dataset.range(np.iinfo(np.int64).max).map(lambda _: clock())
        return tf.data.Dataset.zip((times, batches)).map(deliver)


def _has_clock() -> bool:
    """Return False under `enable_op_determinism`, where TensorFlow refuses `tf.timestamp`."""
    try:
        tf.timestamp()
    except tf.errors.FailedPreconditionError:
        return False
    return True


class Epochs(NamedTuple):
    """Some epochs of a rank, for one dataset; the cache and its samples outlive them."""

    # Settings of the batches
    spec: BatchSpec
    # Number of the first epoch
    first: int
    # Number of epochs
    epochs: int
    # First step of the first epoch
    step: int
    # Number of batches of an epoch
    steps: int

    def to_agree_on(self) -> dict[str, str]:
        """Return argument -> value for all arguments that must be equal on all ranks."""
        arguments = {**dataclasses.asdict(self.spec), **self._asdict()}
        return {name: f"{value}" for name, value in arguments.items() if name != "spec"}

    def check(self, samples: int, ranks: int, store: int | None) -> None:
        """Refuse arguments out of range, and warn if images are enlarged.

        Args:
            store: short side of the kept images, in pixels; None: their original size.

        **Raises:** ConfigurationError.
        """
        if tf.inside_function():
            raise ConfigurationError(
                "`dataset` must be called outside of tf.function, because it makes a variable. "
                "Pass the dataset to the function."
            )
        if self.first < 0 or self.epochs < 1 or not 0 <= self.step <= self.steps:
            raise ConfigurationError(
                "`first_epoch` must be >= 0, `epochs` >= 1, `step` in "
                f"[0, {self.steps}]. Received {self.first}, {self.epochs}, {self.step}."
            )
        if self.steps == 0:
            raise ConfigurationError(
                f"At least one batch per rank is required. {samples} samples over "
                f"{ranks} ranks give none of {self.spec.batch}. Lower `batch`, or set "
                "drop_remainder=False."
            )
        resolution = self.spec.resolution
        if store is not None and resolution is not None and store < resolution:
            warnings.warn(
                f"Images are kept with a short side of store={store} pixels, and enlarged for "
                f"resolution={resolution}: details are lost. Make the DataCache with the "
                "largest resolution to come as its `store`.",
                stacklevel=3,
            )

    def indices(self, share: Callable[..., np.ndarray], length: int) -> tf.data.Dataset:
        """Return the dataset of (samples int64 [b], epoch) of every batch, in order.

        Args:
            share: epoch -> the samples of this rank, int64 [length]; called by TensorFlow.
            length: number of samples of this rank in every epoch.
        """
        bounds = tf.constant(order.batch_bounds(length, self.spec.batch, self.steps))

        @tf.autograph.experimental.do_not_convert
        def of_epoch(epoch: tf.Tensor) -> tf.data.Dataset:
            samples = tf.numpy_function(share, [epoch], tf.int64, stateful=False)
            samples.set_shape([None])
            start = tf.where(epoch == self.first, tf.constant(self.step, tf.int64), 0)
            steps = tf.data.Dataset.range(start, self.steps)
            return steps.map(lambda s: (samples[bounds[s] : bounds[s + 1]], epoch))

        return tf.data.Dataset.range(self.first, self.first + self.epochs).flat_map(of_epoch)


def warn_if_served(stats: EpochStats, epoch: int, length: int) -> None:
    """Warn if a dataset with shuffling serves an epoch of `length` samples again."""
    if length < 2 * stats.of(epoch)[1]:
        warnings.warn(
            f"Epoch {epoch} is served again, in the same order and with the same crops and flips, "
            "because its dataset is iterated again. To train, ask for all epochs at once: "
            "`dataset(spec, 0, epochs=90)` and `fit(..., steps_per_epoch=cache.steps(spec))`. To "
            "evaluate, give the spec shuffle=False.",
            stacklevel=3,
        )

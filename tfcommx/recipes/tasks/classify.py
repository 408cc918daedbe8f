"""Classification: one class for each picture."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from pydantic import Field

from tfcommx.recipes.base import Samples
from tfcommx.recipes.reader import Part

if TYPE_CHECKING:
    import keras
    import tensorflow as tf


class Classify(Part):
    """Name the class of a picture."""

    name: Literal["classify"] = "classify"
    # Part of the target that is spread over all classes: keeps the network from being too sure
    label_smoothing: float = Field(0.0, ge=0, lt=1)

    def build(self, samples: Samples) -> Classification:
        """Return the classification into the classes of these samples."""
        return Classification(len(samples.classes), self.label_smoothing)


@dataclass(frozen=True)
class Classification:
    """Classification into a number of classes."""

    # Number of classes, which is the number of logits
    outputs: int
    # In [0, 1)
    label_smoothing: float

    def loss(self) -> keras.losses.Loss:
        """Return the cross-entropy of logits with one-hot targets."""
        import keras

        return keras.losses.CategoricalCrossentropy(
            from_logits=True, label_smoothing=self.label_smoothing
        )

    def metrics(self) -> Sequence[str]:
        """Return the names of Keras's metrics."""
        return ["accuracy"]

    def targets(self, batches: tf.data.Dataset) -> tf.data.Dataset:
        """Turn batches of (pictures, labels) into (pictures, float32 one-hot [batch, classes])."""
        import tensorflow as tf

        return batches.map(lambda pictures, labels: (pictures, tf.one_hot(labels, self.outputs)))

    def count_right(self, outputs: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
        """Return int64 []: for how many pictures the largest logit is that of the label."""
        import tensorflow as tf

        return tf.math.count_nonzero(tf.argmax(outputs, axis=1) == tf.cast(labels, tf.int64))

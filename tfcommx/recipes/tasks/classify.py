"""Classification of pictures."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np
from pydantic import Field

from tfcommx.recipes.families import Data, Gather, Scorer
from tfcommx.recipes.reader import RecipePart

if TYPE_CHECKING:
    import keras
    import tensorflow as tf


class Classify(RecipePart):
    """Classify pictures."""

    name: Literal["classify"] = "classify"
    # Share of the target that is spread over all classes, against overconfidence
    label_smoothing: float = Field(0.0, ge=0, lt=1)

    def build(self, data: Data) -> Classification:
        return Classification(data.inputs, len(data.classes), self.label_smoothing)


@dataclass(frozen=True)
class Classification:
    """Classification into a number of classes."""

    # Channels of the pictures
    inputs: int
    # Number of classes, which is the number of logits
    outputs: int
    # Share of the target that is spread over all classes, in [0, 1)
    label_smoothing: float = 0.0

    counted: ClassVar[str] = "images"

    @property
    def scores(self) -> Sequence[str]:
        return ["test_accuracy", "test_top5"][: 2 if self.outputs > 5 else 1]

    def loss(self) -> keras.losses.Loss:
        """Return the cross-entropy of logits with one-hot targets."""
        import keras

        return keras.losses.CategoricalCrossentropy(
            from_logits=True, label_smoothing=self.label_smoothing
        )

    def metrics(self) -> Sequence[str | keras.metrics.Metric]:
        return ["accuracy"]

    def targets(self, batches: tf.data.Dataset) -> tf.data.Dataset:
        """Turn batches of (pictures, labels) into (pictures, float32 one-hot [batch, classes])."""
        import tensorflow as tf

        return batches.map(lambda pictures, labels: (pictures, tf.one_hot(labels, self.outputs)))

    def scorer(self, model: keras.Model) -> Scorer:
        """Return a function that computes `test_accuracy` and, above 5 classes, `test_top5`.

        It counts the pictures whose label has the largest logit, or one of the five largest. Of
        equal logits the first one is the largest, as in Keras's accuracy. The sums over the ranks
        are exact, because counts are integers.
        """
        import tensorflow as tf

        def count(pictures: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
            # In float32, so that logits of all precisions have the same operation
            logits = tf.cast(model(pictures, training=False), tf.float32)
            places = (1, 5)[: len(self.scores)]
            # Not by `in_top_k`, which counts all classes of equal logits as right, of which 16-bit
            # logits have many
            best = tf.math.top_k(logits, places[-1]).indices
            hits = best == tf.cast(labels, tf.int32)[:, tf.newaxis]
            # After a NaN no order of the classes means anything
            hits &= tf.reduce_all(tf.math.is_finite(logits), axis=1, keepdims=True)
            right = [tf.math.count_nonzero(hits[:, :place]) for place in places]
            return tf.stack([*right, tf.size(labels, tf.int64)])

        # Traced once for full batches and a smaller last one
        @functools.cache
        def counting(batch: Any) -> tf.types.experimental.PolymorphicFunction:
            return tf.function(count, batch, autograph=False)

        def score(batches: tf.data.Dataset, gather: Gather) -> dict[str, float]:
            # A rank may have no samples, for example with fewer samples than ranks
            counts = np.zeros(len(self.scores) + 1, np.int64)
            for batch in batches:
                counts += counting(batches.element_spec)(*batch).numpy()
            *right, seen = np.sum(gather(counts), axis=0)
            parts = zip(self.scores, right, strict=True)
            return {name: float(part / max(1, seen)) for name, part in parts}

        return score

"""Position encoding, which Keras lacks, and loss and accuracy of words without padding."""

import math
from typing import Any

import keras
import numpy as np
from keras import ops


@keras.saving.register_keras_serializable("tfcommx")
class Positions(keras.layers.Layer):
    """Scales embeddings by the square root of their width, and adds a wave to each position.

    >>> [round(float(value), 3) for value in Positions()(ops.zeros([1, 2, 2]))[0, 1]]
    [0.841, 0.54]

    **Source:** Vaswani et al., "Attention Is All You Need" (2017), sections 3.4 and 3.5. There
    sines and cosines alternate; here all sines precede the cosines.
    """

    def call(self, embeddings: keras.KerasTensor) -> keras.KerasTensor:
        width = embeddings.shape[-1]
        # One rate more for an odd width, whose last cosine is cut off
        rates = 1e4 ** (-np.arange((width + 1) // 2, dtype=np.float32) * 2 / width)
        # In float32, because 16-bit floats cannot number the words of a long sentence
        places = ops.arange(ops.shape(embeddings)[1], dtype="float32")
        angles = places[:, None] * rates[None, :]
        waves = ops.concatenate([ops.sin(angles), ops.cos(angles)], axis=1)[:, :width]
        return embeddings * math.sqrt(width) + ops.cast(waves, embeddings.dtype)

    def compute_output_shape(self, shape: tuple[int | None, ...]) -> tuple[int | None, ...]:
        return shape


@keras.saving.register_keras_serializable("tfcommx")
class WordLoss(keras.losses.Loss):
    """Cross-entropy, averaged over the words of the batch without padding.

    >>> logits = ops.zeros([1, 3, 4])
    >>> round(float(WordLoss()(ops.array([[3, 1, 0]]), logits)), 4)
    1.3863

    Args:
        label_smoothing: share of the target that is spread over the vocabulary, in [0, 1).

    **Ranks:** each averages over its own words, whose number differs little between ranks.
    """

    def __init__(
        self, label_smoothing: float = 0.0, name: str = "word_loss", **keras_options: Any
    ) -> None:
        # No reduction by Keras, because `call` divides by the words of the batch
        super().__init__(name=name, reduction=None, **keras_options)
        self.label_smoothing = label_smoothing

    def call(self, y_true: Any, y_pred: Any) -> Any:
        """Return float32 []: the loss of labels [n, words] and logits [n, words, vocabulary]."""
        # In float32, because 16-bit floats would round the sum over the vocabulary
        logits = ops.cast(y_pred, "float32")
        normal = ops.logsumexp(logits, axis=-1)
        # Gathered, because one-hot targets would take as much memory as the logits
        chosen = ops.take_along_axis(logits, ops.cast(y_true, "int32")[..., None], axis=-1)
        right = normal - ops.squeeze(chosen, -1)
        # Cross-entropy with a target that is uniform over the vocabulary
        spread = normal - ops.mean(logits, axis=-1)
        losses = (1 - self.label_smoothing) * right + self.label_smoothing * spread
        real = ops.cast(ops.not_equal(y_true, 0), "float32")
        # A batch of padding alone has a loss of 0, and not NaN
        return ops.sum(losses * real) / ops.maximum(ops.sum(real), 1.0)

    def get_config(self) -> dict[str, Any]:
        return {"label_smoothing": self.label_smoothing, "name": self.name}


@keras.saving.register_keras_serializable("tfcommx")
class WordAccuracy(keras.metrics.Mean):
    """Share of the words, without padding, whose logit is the largest."""

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        right, real = count_right(y_true, y_pred)
        # Weighted by the words, because batches differ in their number
        super().update_state(right / ops.maximum(real, 1.0), real)


def count_right(labels: Any, logits: Any) -> tuple[Any, Any]:
    """Return the number of correctly predicted words, and of all words; float32."""
    labels = ops.cast(labels, "int32")
    real = ops.cast(ops.not_equal(labels, 0), "float32")
    right = ops.cast(ops.equal(ops.cast(ops.argmax(logits, axis=-1), "int32"), labels), "float32")
    return ops.sum(right * real), ops.sum(real)

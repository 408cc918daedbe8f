"""RecalibrateBatchNorm: measure batch norm's statistics again after training."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any

import keras

from tfcommx.optim.keras_internals import layers_of
from tfcommx.terms import check_whole


class RecalibrateBatchNorm(keras.callbacks.Callback):
    """Measure batch norm's means and variances again at the end of `fit`, from some batches.

    For weights that no step was taken with, such as the centre of elastic averaging: put it behind
    BroadcastState. Each statistic becomes the plain average of those of the batches.

    >>> import numpy as np
    >>> import tfcommx as cx
    >>> callback = cx.callbacks.RecalibrateBatchNorm([np.zeros((8, 3))], batches=1)

    Args:
        data: yields batches of inputs, or tuples that begin with them; iterated again each time.
        batches: how many of them, >= 1.

    **Ranks:** each by itself; equal data gives equal statistics. **Cost:** that many forward
    passes, not traced.
    **Raises:** PlanError for `batches` out of range.
    """

    def __init__(self, data: Iterable[Any], batches: int = 100) -> None:
        super().__init__()
        self.data, self.batches = data, check_whole("batches", batches, least=1)

    def on_train_end(self, logs: Any = None) -> None:
        """Measure."""
        layers = [
            layer
            for layer in layers_of(self.model)
            if isinstance(layer, keras.layers.BatchNormalization) and layer.trainable
        ]
        if not layers:
            return
        usual = [layer.momentum for layer in layers]
        try:
            for count, batch in enumerate(itertools.islice(self.data, self.batches)):
                for layer in layers:
                    layer.momentum = count / (count + 1)
                self.model(batch[0] if isinstance(batch, tuple | list) else batch, training=True)
        finally:
            for layer, momentum in zip(layers, usual, strict=True):
                layer.momentum = momentum

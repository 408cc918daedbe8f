"""Scripts and test suites whose warnings are errors, as by `python -W error`."""

from __future__ import annotations

import keras
import numpy as np
import pytest

import tfcommx as cx


@pytest.mark.filterwarnings("error")
def test_a_training_warns_of_nothing() -> None:
    """Keras's `convert_to_numpy` warns for each variable under NumPy 2, as does its `save`."""
    cx.init()
    net = keras.Sequential(
        [keras.layers.Input((4,)), keras.layers.BatchNormalization(), keras.layers.Dense(1)]
    )
    optimizer = cx.DistributedOptimizer(keras.optimizers.Adam(0.01))
    net.compile(optimizer, "mse", metrics=["mae"], jit_compile=False)
    shared = [
        cx.callbacks.BroadcastState(),
        *(cx.callbacks.AverageMetrics(), cx.callbacks.AverageBatchNorm()),
        *(keras.callbacks.TerminateOnNaN(), cx.callbacks.AgreeOnStop()),
    ]
    x, y = np.ones((8, 4), np.float32), np.ones((8, 1), np.float32)
    net.fit(x, y, batch_size=4, verbose=0, callbacks=shared)
    assert net.optimizer.iterations == 2

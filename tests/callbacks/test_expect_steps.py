"""The number of following steps that "auto" is given where `fit` changes the scheme."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np

import tfcommx as cx


def test_the_steps_until_the_next_change_of_scheme_follow() -> None:
    """Of updates: every other step adds its gradients to those of the one before."""
    cx.init()
    told: dict[int, int | None] = {}

    class Watch(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            told[epoch] = self.model.optimizer.exchanger.requested.expected_run.steps

    net = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(1)])
    plain = keras.optimizers.SGD(0.1, gradient_accumulation_steps=2)
    net.compile(cx.DistributedOptimizer(plain), loss="mse", jit_compile=False)
    schemes = {0: cx.Scheme(), 2: cx.Scheme("auto"), 5: cx.Scheme("torus")}
    every = [cx.callbacks.BroadcastState(), cx.callbacks.SwitchScheme(schemes), Watch()]
    rows = np.ones((8, 4)), np.ones((8, 1))
    net.fit(*rows, batch_size=2, epochs=7, initial_epoch=1, verbose=0, callbacks=every)
    assert told == {1: 2, 2: 6, 3: 6, 4: 6, 5: 4, 6: 4}

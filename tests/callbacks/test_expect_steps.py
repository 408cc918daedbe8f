"""The number of following steps that "auto" is given where `fit` changes the scheme."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np

import tfcommx as cx
from tfcommx.callbacks import choose_again
from tfcommx.optim.automatic import ExpectedRun


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


def test_the_steps_left_count_from_the_step_at_which_their_number_was_set() -> None:
    """They counted from the first look at the network after it, or after a trace of the step."""
    cx.init()
    optimizer = cx.DistributedOptimizer(keras.optimizers.SGD(0.1))
    optimizer.iterations.assign(300)
    choose_again.expect_steps(optimizer, {"steps": 100, "epochs": 10}, epoch=2)
    requested = optimizer.exchanger.requested
    requested.expected_run = requested.expected_run._replace(batch=8)  # That of the traced step
    optimizer.iterations.assign(450)
    assert choose_again._steps_left(optimizer) == 800 - 150


def test_each_fit_counts_its_own_steps_unless_the_length_of_the_run_is_known() -> None:
    cx.init()
    net = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(1)])
    net.compile(cx.DistributedOptimizer(keras.optimizers.SGD(0.1)), "mse", jit_compile=False)
    requested, every = net.optimizer.exchanger.requested, [cx.callbacks.BroadcastState()]
    rows, options = (np.ones((8, 4)), np.ones((8, 1))), {"batch_size": 2, "verbose": 0}
    for first, epochs, steps in ((2, 5, 12), (0, 1, 4), (0, 2, 8)):
        net.fit(*rows, initial_epoch=first, epochs=epochs, callbacks=every, **options)
        assert requested.expected_run.steps == steps
        assert requested.expected_run.steps_of_epoch == 4 and not requested.expected_run.whole_run
    told = ExpectedRun(steps=1000, steps_of_epoch=4, batch=2, whole_run=True)
    requested.expected_run = told
    net.fit(*rows, callbacks=every, **options)
    assert requested.expected_run == told

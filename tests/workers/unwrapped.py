"""Short trainings by plain optimizers. Started by test_unwrapped.py on two ranks.

Each is named after the expected report at the end of the process: "named", or "quiet".
"""

from __future__ import annotations

import sys

import keras
import numpy as np

import tfcommx as cx


def compiled(name: str) -> keras.Model:
    keras.utils.set_random_seed(1)
    layers = [keras.layers.Input((3,)), keras.layers.Dense(1, name="dense")]
    net = keras.Sequential(layers, name=name)
    net.compile(keras.optimizers.SGD(0.1, name=name), loss="mse", jit_compile=False)
    return net


def fit(net: keras.Model, steps: int) -> None:
    net.fit(np.ones((steps, 3)), np.ones((steps, 1)), batch_size=1, verbose=0)


made_before = compiled("named_made_before")
cx.init()


def train_and_forget() -> None:
    wrapped = compiled("quiet_wrapped")
    wrapped.compile(cx.DistributedOptimizer(wrapped.optimizer), loss="mse", jit_compile=False)
    fit(wrapped, 2)
    copied = keras.models.clone_model(wrapped)
    optimizer = keras.optimizers.SGD(0.1, name="named_copied")
    copied.compile(optimizer, loss="mse", jit_compile=False)
    fit(copied, 2)


train_and_forget()
fit(made_before, 2)
if cx.is_chief():
    sys.exit(0)

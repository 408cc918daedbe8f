"""Shared by the tests on ranks: a small network, batches, a fit, and comparisons of ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import tfcommx as cx
from tfcommx import callbacks, checkpoint
from tfcommx.collectives.comm import Comm

SPARSE = cx.Scheme("hitopk", "mstopk", 0.2, dense_below=8)


def model(seed: int = 1) -> keras.Model:
    """Return two dense layers with batch normalization between them, not compiled."""
    keras.utils.set_random_seed(seed)
    return keras.Sequential(
        [
            keras.layers.Input((12,)),
            keras.layers.Dense(16, activation="relu", name="hidden"),
            keras.layers.BatchNormalization(name="norm"),
            keras.layers.Dense(3, name="out"),
        ],
        name="net",
    )


def batch(rank: int, step: int = 0, rows: int = 8) -> tuple[np.ndarray, np.ndarray]:
    """Return inputs and labels of a rank and a step: float32 [rows, 12], int64 [rows]."""
    numbers = np.random.default_rng([5, rank, step])
    return numbers.normal(size=(rows, 12)).astype("float32"), numbers.integers(0, 3, rows)


def gradients_of(net: keras.Model, data: tuple[np.ndarray, np.ndarray]) -> list[tf.Tensor]:
    """Return this rank's gradients, before any exchange."""
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    with tf.GradientTape() as tape:
        value = loss(data[1], net(data[0], training=True))
    return tape.gradient(value, net.trainable_variables)


def take_step(net: keras.Model, comm: Comm, step: int = 0) -> None:
    """Apply the gradients of this rank's batch, outside of `fit` and without a trace."""
    net.optimizer.apply(gradients_of(net, batch(comm.rank, step)), net.trainable_variables)


def weights(net: keras.Model) -> list[np.ndarray]:
    """Return copies of the trainable variables."""
    return [variable.numpy() for variable in net.trainable_variables]


def same_on_all_ranks(comm: Comm, net: keras.Model) -> bool:
    """Compare the bits of the trainable variables. **Ranks:** all must call it."""
    everyone = comm.gather_objects([value.tobytes() for value in weights(net)])
    return all(other == everyone[0] for other in everyone)


def compiled(optimizer: keras.optimizers.Optimizer, seed: int = 1, **options: Any) -> keras.Model:
    """Return the model, compiled without XLA if `options` do not ask for it."""
    net = model(seed)
    net.compile(
        optimizer,
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        **{"jit_compile": False, **options},
    )
    return net


def fit(
    net: keras.Model, comm: Comm, epochs: int = 2, extra: tuple = (), initial_epoch: int = 0
) -> callbacks.CompareReplicas:
    """Train on this rank's 32 rows in batches of 8; return the comparison of the replicas."""
    compare = callbacks.CompareReplicas()
    x, y = batch(comm.rank, rows=32)
    net.fit(
        x,
        y,
        batch_size=8,
        epochs=epochs,
        initial_epoch=initial_epoch,
        shuffle=False,
        verbose=0,
        callbacks=[
            callbacks.BroadcastState(),
            callbacks.AverageMetrics(),
            callbacks.AverageBatchNorm(),
            *extra,
            compare,
        ],
    )
    return compare


class SaveTheEpoch(checkpoint.Checkpoint):
    """Saves one epoch alone, counted from 1."""

    def __init__(self, folder: Path, epoch: int = 1) -> None:
        super().__init__(folder)
        self.saved = epoch

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        if epoch + 1 == self.saved:
            super().on_epoch_end(epoch, logs)


def not_zero(state: dict[str, Any]) -> bool:
    """Return True if a gradient state, such as the residuals, has other entries than 0."""
    return any(np.any(values) for values in state.values())


OPTIMIZERS = {
    "sgd": lambda: keras.optimizers.SGD(0.1, momentum=0.9),
    "adam": lambda: keras.optimizers.Adam(0.01),
    "lars": lambda: cx.optimizers.LARS(0.1, weight_decay=0.01, trust_coefficient=0.1),
    "lamb": lambda: cx.optimizers.LAMB(0.01, weight_decay=0.01),
    "clipped_sgd": lambda: keras.optimizers.SGD(0.1, global_clipnorm=0.05),
}


def one_weight(optimizer: keras.optimizers.Optimizer) -> keras.Model:
    """Return a compiled model of one weight, 0, whose gradient is the mean of its inputs."""
    weight = keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros", name="weight")
    net = keras.Sequential([keras.layers.Input((1,)), weight], name="one")
    net.compile(
        cx.DistributedOptimizer(optimizer, op="sum"),
        loss=lambda _, out: tf.reduce_mean(out),
        jit_compile=False,
    )
    return net

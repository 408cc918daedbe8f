"""A custom loop that losses.py disturbs: a GAN, whose two networks have an optimizer each.

losses_loop.py FOLDER EPOCHS STEP_SECONDS SEED
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf
from losses_rank import BATCH, STEPS, Notes

import tfcommx as cx

NOISE, REAL = 16, 256

folder, epochs = Path(sys.argv[1]), int(sys.argv[2])
step_seconds, seed = float(sys.argv[3]), int(sys.argv[4])
tf.config.threading.set_intra_op_parallelism_threads(1)
comm = cx.init()
notes = Notes(folder, int(os.environ.get("TFCOMMX_GENERATION", "0")))
keras.utils.set_random_seed(seed)
layers = keras.layers


class Gan(keras.Model):
    """Two networks that are trained against each other."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = keras.Sequential(
            [layers.Input((NOISE,)), layers.Dense(256, activation="relu"), layers.Dense(REAL)]
        )
        self.critic = keras.Sequential(
            [layers.Input((REAL,)), layers.Dense(256, activation="relu"), layers.Dense(1)]
        )
        scheme = cx.Scheme("hitopk", "mstopk", 0.05)
        self.generator_optimizer = cx.DistributedOptimizer(keras.optimizers.Adam(1e-4), scheme)
        self.critic_optimizer = cx.DistributedOptimizer(keras.optimizers.SGD(1e-3, 0.9), scheme)

    def call(self, noise: tf.Tensor) -> tf.Tensor:
        return self.critic(self.generator(noise))


gan = Gan()
gan(np.zeros((1, NOISE), np.float32))
gan.generator_optimizer.build(gan.generator.trainable_variables)
gan.critic_optimizer.build(gan.critic.trainable_variables)
cx.broadcast_variables(
    [*gan.weights, *gan.generator_optimizer.variables, *gan.critic_optimizer.variables]
)
snapshots = cx.checkpoint.Snapshots(gan, folder / "run", every=20)
first_epoch, first_step = snapshots.restore()


@tf.function(jit_compile=False)
def train(noise: tf.Tensor, real: tf.Tensor) -> None:
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(gan(noise)) - tf.reduce_mean(gan.critic(real))
    weights = gan.critic.trainable_variables
    gan.critic_optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))
    with tf.GradientTape() as tape:
        loss = -tf.reduce_mean(gan(noise))
    weights = gan.generator.trainable_variables
    gan.generator_optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))


for epoch in range(first_epoch, epochs):
    for step in range(first_step if epoch == first_epoch else 0, STEPS):
        random = np.random.default_rng([seed, comm.rank, epoch, step])
        noise, real = (random.normal(size=(BATCH, width)).astype("f4") for width in (NOISE, REAL))
        train(tf.constant(noise), tf.constant(real))
        time.sleep(step_seconds)
        if comm.rank == 0:
            notes.step(epoch * STEPS + step + 1, comm.topology.size)
        if step + 1 < STEPS:
            snapshots.after_step(epoch, step + 1, STEPS)
    snapshots.end_epoch(epoch)
notes.weights(comm.rank, gan.get_weights())

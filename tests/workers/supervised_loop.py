"""A custom loop under a supervisor: a model with two wrapped optimizers, as a GAN has.

supervised_loop.py FOLDER OPTIONS(json): faults, as in supervised_fit.py. Prints a hash of the
weights at the end.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys

import keras
import numpy as np
import tensorflow as tf

import tfcommx as cx

folder, options = sys.argv[1], json.loads(sys.argv[2])
EPOCHS, STEPS = 3, 12
GENERATION = os.environ.get("TFCOMMX_GENERATION", "0")
comm = cx.init(watch_seconds=5)
keras.utils.set_random_seed(7)


class Gan(keras.Model):
    """Two networks that are trained against each other."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(64)])
        self.critic = keras.Sequential([keras.layers.Input((64,)), keras.layers.Dense(1)])
        scheme = cx.Scheme("allgather", "mstopk", 0.1, dense_below=8)
        self.generator_optimizer = cx.DistributedOptimizer(keras.optimizers.Adam(0.01), scheme)
        self.critic_optimizer = cx.DistributedOptimizer(keras.optimizers.SGD(0.01, 0.9), scheme)

    def call(self, noise: tf.Tensor) -> tf.Tensor:
        return self.critic(self.generator(noise))


gan = Gan()
gan(np.zeros((1, 4), np.float32))
gan.generator_optimizer.build(gan.generator.trainable_variables)
gan.critic_optimizer.build(gan.critic.trainable_variables)
cx.broadcast_variables(
    [*gan.weights, *gan.generator_optimizer.variables, *gan.critic_optimizer.variables]
)
snapshots = cx.checkpoint.Snapshots(gan, folder, every=5)
first_epoch, first_step = snapshots.restore()


@tf.function(jit_compile=False)
def train(noise: tf.Tensor, real: tf.Tensor) -> None:
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(gan.critic(gan.generator(noise))) - tf.reduce_mean(gan.critic(real))
    weights = gan.critic.trainable_variables
    gan.critic_optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))
    with tf.GradientTape() as tape:
        loss = -tf.reduce_mean(gan.critic(gan.generator(noise)))
    weights = gan.generator.trainable_variables
    gan.generator_optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))


for epoch in range(first_epoch, EPOCHS):
    for step in range(first_step if epoch == first_epoch else 0, STEPS):
        random = np.random.default_rng([comm.rank, epoch, step])
        noise, real = (random.normal(size=(16, width)).astype("f4") for width in (4, 64))
        train(tf.constant(noise), tf.constant(real))
        rank, at, kind = options.get("faults", {}).get(GENERATION, (-1, 0, ""))
        if comm.rank == rank and epoch * STEPS + step + 1 == at:
            print(f"{kind} at step {at}", flush=True)
            os.kill(os.getpid(), {"kill": signal.SIGKILL, "term": signal.SIGTERM}[kind])
        if step + 1 < STEPS:
            snapshots.after_step(epoch, step + 1, STEPS)
    snapshots.end_epoch(epoch)
whole = b"".join(weight.tobytes() for weight in gan.get_weights())
bits = hashlib.sha256(whole).hexdigest()[:16]
print(f"rank {comm.rank} of {os.environ['TFCOMMX_RUN']} weights {bits}", flush=True)

"""Train two networks against each other: horovodrun -np 4 python scripts/examples/gan.py."""

import argparse

import keras
import tensorflow as tf
from keras import layers

import tfcommx as cx
from tfcommx.recipes.datasets.fashion_mnist import fetch, load

NOISE = 32


class Gan(keras.Model):
    """A generator and a discriminator, each with its own optimizer."""

    def __init__(self):
        super().__init__()
        self.generator = keras.Sequential(
            [
                layers.Input((NOISE,)),
                layers.Dense(7 * 7 * 32, activation="relu"),
                layers.Reshape((7, 7, 32)),
                layers.Conv2DTranspose(16, 4, 2, "same", activation="relu"),
                layers.Conv2DTranspose(1, 4, 2, "same", activation="sigmoid"),
            ],
            name="generator",
        )
        self.discriminator = keras.Sequential(
            [
                layers.Input((28, 28, 1)),
                layers.Conv2D(16, 4, 2, "same", activation="leaky_relu"),
                layers.Conv2D(32, 4, 2, "same", activation="leaky_relu"),
                layers.Flatten(),
                layers.Dense(1),
            ],
            name="discriminator",
        )

    def compile(self, generates, discriminates):
        super().compile(jit_compile=False)
        self.generates, self.discriminates = generates, discriminates
        self.loss_of = keras.losses.BinaryCrossentropy(from_logits=True)
        # Metrics, because their results are of the samples of all ranks
        self.right = keras.metrics.Mean(name="discriminator")
        self.deceit = keras.metrics.Mean(name="generator")
        # BroadcastState finds optimizers that are attributes, and wants them built
        generates.build(self.generator.trainable_variables)
        discriminates.build(self.discriminator.trainable_variables)

    def train_step(self, real):
        count = tf.shape(real)[0]
        noise = tf.random.normal([count, NOISE])
        with tf.GradientTape(persistent=True) as tape:
            false = self.generator(noise, training=True)
            found = self.discriminator(real, training=True)
            fooled = self.discriminator(false, training=True)
            ones, zeros = tf.ones([count, 1]), tf.zeros([count, 1])
            right = self.loss_of(ones, found) + self.loss_of(zeros, fooled)
            deceit = self.loss_of(ones, fooled)
        for optimizer, network, loss in (
            (self.discriminates, self.discriminator, right),
            (self.generates, self.generator, deceit),
        ):
            variables = network.trainable_variables
            optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
        self.right.update_state(right)
        self.deceit.update_state(deceit)
        return {metric.name: metric.result() for metric in (self.right, self.deceit)}


parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=400)
options = parser.parse_args()

cx.init()
keras.utils.set_random_seed(1 + cx.rank())  # each rank its own noise
images = load(fetch())[0][cx.rank() :: cx.size()]
data = tf.data.Dataset.from_tensor_slices(images).shuffle(10_000, seed=1).repeat()
data = data.batch(64).map(lambda pictures: tf.cast(pictures, tf.float32) / 255.0)
gan = Gan()
gan.compile(
    *(
        cx.DistributedOptimizer(
            keras.optimizers.Adam(2e-4, beta_1=0.5), scheme=cx.Scheme("hitopk", "mstopk", 0.05)
        )
        for _ in range(2)
    )
)
gan.fit(
    data,
    steps_per_epoch=options.steps,
    callbacks=[cx.callbacks.BroadcastState()],
    verbose=2 if cx.is_chief() else 0,
)

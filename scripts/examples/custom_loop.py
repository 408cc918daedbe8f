"""Train with a custom loop: horovodrun -np 4 python scripts/examples/custom_loop.py."""

import argparse

import keras
import tensorflow as tf

import tfcommx as cx
from tfcommx.recipes.datasets.fashion_mnist import fetch, load

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=400)
options = parser.parse_args()

cx.init()
keras.utils.set_random_seed(1 + cx.rank())  # each rank its own shuffling and dropout
images, labels, _, _ = load(fetch())
data = (
    tf.data.Dataset.from_tensor_slices((images, labels))
    .shard(cx.size(), cx.rank())
    .shuffle(10_000)
    .repeat()
    .batch(64)
    .map(lambda pictures, kinds: (tf.cast(pictures, tf.float32) / 255.0, kinds))
)
model = keras.Sequential(
    [
        keras.layers.Input((28, 28, 1)),
        keras.layers.Flatten(),
        keras.layers.Dense(128, activation="relu"),
        keras.layers.Dense(10),
    ]
)
loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
optimizer = cx.DistributedOptimizer(
    # Keras accumulates: gradients travel in every second step only
    keras.optimizers.Adam(0.001, gradient_accumulation_steps=2),
    scheme=cx.Scheme("allgather", "mstopk", 0.01),
)
# Everything is made and made equal before the first step
optimizer.build(model.trainable_variables)
cx.broadcast_variables([*model.weights, *optimizer.variables])


@tf.function
def step(pictures, kinds):
    with tf.GradientTape() as tape:
        loss = loss_of(kinds, model(pictures, training=True))
    gradients = tape.gradient(loss, model.trainable_variables)
    optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
    return loss


# Every rank takes the same number of steps
for number, (pictures, kinds) in enumerate(data.take(options.steps), 1):
    loss = step(pictures, kinds)
    if cx.is_chief() and (number % 100 == 0 or number == options.steps):
        print(f"step {number}: loss {float(loss):.3f} on rank 0")

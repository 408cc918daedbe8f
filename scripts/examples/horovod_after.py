"""The script of horovod_before.py with tfcommx; `diff` of the two shows what changes."""

import argparse

import keras
import tensorflow as tf

import tfcommx as cx
from tfcommx.recipes.datasets.fashion_mnist import fetch, load

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=400)
options = parser.parse_args()

cx.init()  # also gives each process its GPU, with memory growth

keras.utils.set_random_seed(0)
images, labels, _, _ = load(fetch())
data = tf.data.Dataset.from_tensor_slices((images, labels)).shard(cx.size(), cx.rank())
data = data.map(lambda image, kind: (tf.cast(image, tf.float32) / 255.0, kind)).repeat().batch(64)
model = keras.Sequential(
    [keras.layers.Input((28, 28, 1)), keras.layers.Flatten(), keras.layers.Dense(10)]
)
# The optimizer is wrapped in place of the tape; Scheme() is Horovod's allreduce
optimizer = cx.DistributedOptimizer(
    keras.optimizers.SGD(0.01 * cx.size(), momentum=0.9), scheme=cx.Scheme()
)
loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
optimizer.build(model.trainable_variables)
cx.broadcast_variables([*model.weights, *optimizer.variables])


@tf.function
def step(pictures, kinds):
    with tf.GradientTape() as tape:
        loss = loss_of(kinds, model(pictures, training=True))
    gradients = tape.gradient(loss, model.trainable_variables)
    optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
    return loss


for pictures, kinds in data.take(options.steps):
    loss = step(pictures, kinds)
if cx.is_chief():
    print(f"loss {float(loss):.3f} on rank 0")
    model.save_weights("tfcommx.weights.h5")

"""A script of Horovod alone; horovod_after.py is the same with tfcommx."""

import argparse

import horovod.tensorflow as hvd
import keras
import tensorflow as tf

from tfcommx.recipes.datasets.fashion_mnist import fetch, load

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=400)
options = parser.parse_args()

hvd.init()
gpus = tf.config.list_physical_devices("GPU")
if gpus:
    tf.config.set_visible_devices(gpus[hvd.local_rank()], "GPU")
    tf.config.experimental.set_memory_growth(gpus[hvd.local_rank()], True)

keras.utils.set_random_seed(0)
images, labels, _, _ = load(fetch())
data = tf.data.Dataset.from_tensor_slices((images, labels)).shard(hvd.size(), hvd.rank())
data = data.map(lambda image, kind: (tf.cast(image, tf.float32) / 255.0, kind)).repeat().batch(64)
model = keras.Sequential(
    [keras.layers.Input((28, 28, 1)), keras.layers.Flatten(), keras.layers.Dense(10)]
)
optimizer = keras.optimizers.SGD(0.01 * hvd.size(), momentum=0.9)
loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
optimizer.build(model.trainable_variables)
hvd.broadcast_variables([variable.value for variable in model.weights], root_rank=0)


@tf.function
def step(pictures, kinds):
    with tf.GradientTape() as tape:
        loss = loss_of(kinds, model(pictures, training=True))
    tape = hvd.DistributedGradientTape(tape)
    weights = [variable.value for variable in model.trainable_variables]
    gradients = tape.gradient(loss, weights)
    optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
    return loss


for pictures, kinds in data.take(options.steps):
    loss = step(pictures, kinds)
if hvd.rank() == 0:
    print(f"loss {float(loss):.3f} on rank 0")
    model.save_weights("horovod.weights.h5")

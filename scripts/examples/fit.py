"""Train a small network with Keras's fit: horovodrun -np 4 python scripts/examples/fit.py."""

import argparse

import keras

import tfcommx as cx
from tfcommx.recipes.datasets.fashion_mnist import fetch, load

BATCH = 64  # of one rank

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=400)
parser.add_argument("--epochs", type=int, default=1, help="in all, with those of a checkpoint")
parser.add_argument("--checkpoint", help="folder to save to, and to continue from")
options = parser.parse_args()

cx.init()
keras.utils.set_random_seed(0)
images, labels, test_images, test_labels = load(fetch())
# Every rank takes its own part of the images
mine = slice(cx.rank(), None, cx.size())
train = images[mine] / 255.0, labels[mine]
steps = min(options.steps, len(images) // cx.size() // BATCH)

model = keras.Sequential(
    [
        keras.layers.Input((28, 28, 1)),
        keras.layers.Conv2D(32, 3, activation="relu"),
        keras.layers.MaxPooling2D(),
        keras.layers.Flatten(),
        keras.layers.Dense(128, activation="relu"),
        keras.layers.Dense(10),
    ]
)
rate = 0.02 * cx.size()
optimizer = cx.DistributedOptimizer(
    keras.optimizers.SGD(rate, momentum=0.9),
    # 1 % of the entries between machines; the rest stays in residuals and is sent later
    scheme=cx.Scheme("hitopk", "mstopk", 0.01),
)
loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
model.compile(optimizer, loss, metrics=["accuracy"], jit_compile=False)
callbacks = [
    cx.callbacks.BroadcastState(),
    cx.callbacks.WarmUp(rate, steps=max(1, steps // 10)),
]
first_epoch = 0
if options.checkpoint:
    callbacks.append(cx.checkpoint.Checkpoint(options.checkpoint))
    first_epoch = cx.checkpoint.restore(model, options.checkpoint)  # 0 if nothing was saved yet
model.fit(
    *train,
    batch_size=BATCH,
    initial_epoch=first_epoch,
    epochs=options.epochs,
    steps_per_epoch=steps,
    callbacks=callbacks,
    verbose=2 if cx.is_chief() else 0,
)
if cx.is_chief():
    print(model.evaluate(test_images / 255.0, test_labels, verbose=0, return_dict=True))

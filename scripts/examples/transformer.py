"""Train a Transformer, with a separate scheme for its embedding.

horovodrun -np 4 python scripts/examples/transformer.py

It learns to read numbers backwards. Rows of an embedding whose words do not occur have no gradient:
few entries of it are worth sending, and a rank's own few are not those of its neighbours.
"""

import argparse

import keras
import numpy as np
import tensorflow as tf

import tfcommx as cx
from tfcommx.recipes.models.transformer import Transformer
from tfcommx.recipes.text.layers import WordAccuracy, WordLoss

WORDS, LENGTH, BEGIN = 1000, 8, 2

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=600)
options = parser.parse_args()

cx.init()
keras.utils.set_random_seed(1 + cx.rank())  # each rank its own dropout
random = np.random.default_rng(cx.rank())
source = random.integers(4, WORDS, (20_000, LENGTH)).astype(np.int32)
labels = source[:, ::-1]
read = np.concatenate([np.full((len(labels), 1), BEGIN, np.int32), labels[:, :-1]], axis=1)
data = tf.data.Dataset.from_tensor_slices(({"source": source, "target": read}, labels))
data = data.repeat().batch(64)

model = Transformer(blocks=1, width=64, inner=256, heads=4, norm="pre").build(WORDS, WORDS)
optimizer = cx.DistributedOptimizer(
    keras.optimizers.Adam(0.002),
    scheme={
        "*words*": cx.Scheme("allgather", "mstopk", 0.05),
        "*": cx.Scheme("hitopk", "mstopk", 0.05),
    },
)
model.compile(optimizer, WordLoss(0.1), metrics=[WordAccuracy(name="accuracy")], jit_compile=False)
model.fit(
    data,
    steps_per_epoch=options.steps,
    callbacks=[cx.callbacks.BroadcastState()],
    verbose=2 if cx.is_chief() else 0,
)

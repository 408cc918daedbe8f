"""Training whose every bit can be computed afterwards.

Started by test_cluster.py on the nodes of a virtual cluster.

Gradients are small integers, so that float32 sums are exact in any order, and the learning rate is
1: the weights' updates plus the ranks' residuals must equal the sum of all gradients so far.
"""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf

import tfcommx as cx
from tfcommx import checkpoint
from tfcommx.optim.wrapped import exchanger_of

SHAPE = (40, 50)


def gradient(rank: int, step: int) -> np.ndarray:
    return np.random.default_rng([rank, step]).integers(-8, 9, SHAPE).astype(np.float32)


def missing(model: keras.Model, residuals: list[dict], ranks: int, steps: int) -> float:
    """Return the part of the gradients of `steps` steps that is lost: 0 if nothing is."""
    sent = -model.trainable_variables[0].numpy()
    total = sum(gradient(rank, step) for rank in range(ranks) for step in range(steps))
    return float(
        np.abs(
            total - sent - sum(part.reshape(SHAPE) for row in residuals for part in row.values())
        ).sum()
    )


task, folder, ranks = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
comm = cx.init(watch_seconds=float(sys.argv[4])) if task == "train" else cx.init()
model = keras.Sequential(
    [
        keras.layers.Input((SHAPE[0],)),
        keras.layers.Dense(SHAPE[1], use_bias=False, kernel_initializer="zeros", name="only"),
    ],
    name="model",
)
model.compile(
    cx.DistributedOptimizer(
        keras.optimizers.SGD(1.0), cx.Scheme("allgather", "exact", 0.01), op="sum"
    )
)

if task == "restore":
    steps = checkpoint.restore(model, folder / "checkpoint") - 1
    print(
        "steps",
        steps,
        "missing",
        missing(model, [exchanger_of(model).export().residuals], ranks, steps),
    )
    sys.exit()

steps, stop = 0, False
while not stop:
    model.optimizer.apply([tf.constant(gradient(comm.rank, steps))], model.trainable_variables)
    steps += 1
    if steps % 5 == 0:
        checkpoint.save(model, folder / "checkpoint", steps)
    if comm.rank == 0:
        (folder / "steps").write_text(str(steps))
    stop = any(comm.gather_objects((folder / "stop").exists()))
digest = hashlib.sha256(model.trainable_variables[0].numpy().tobytes()).hexdigest()
print(
    "weights",
    len(set(comm.gather_objects(digest))),
    "missing",
    missing(model, comm.gather_objects(exchanger_of(model).export().residuals), ranks, steps),
)

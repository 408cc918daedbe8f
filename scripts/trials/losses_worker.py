"""A training that losses.py disturbs: rank 0 writes down when it has taken which step.

losses_worker.py FOLDER SETUP EPOCHS: 40 steps an epoch, .1 s each at least. At the end each rank
writes a hash of its weights, and rank 0 the loss on samples that nobody trained on.
"""

from __future__ import annotations

import hashlib
import os
import sys
import time
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf

import tfcommx as cx

STEPS, STEP_SECONDS, BATCH, WIDTH = 40, 0.1, 32, 256
SPARSE = {"selection": "mstopk", "density": 0.02}
SETUPS = {
    "hitopk": {"scheme": cx.Scheme("hitopk", **SPARSE)},
    "allgather": {"scheme": cx.Scheme("allgather", **SPARSE)},
    "sharded": {"strategy": "sharded"},
}

folder, setup, epochs = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
generation = os.environ.get("TFCOMMX_GENERATION", "0")
tf.config.threading.set_intra_op_parallelism_threads(1)
comm = cx.init()
(folder / f"pid-{comm.rank}").write_text(str(os.getpid()))
keras.utils.set_random_seed(7)
model = keras.Sequential(
    [
        keras.layers.Input((WIDTH,)),
        keras.layers.Dense(WIDTH, activation="relu"),
        keras.layers.BatchNormalization(),
        keras.layers.Dense(WIDTH, activation="relu"),
        keras.layers.Dense(10),
    ]
)
model.compile(
    cx.DistributedOptimizer(keras.optimizers.SGD(0.05), **SETUPS[setup]),
    loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    metrics=["accuracy"],
    jit_compile=False,
)
teacher = np.random.default_rng(0).normal(size=(WIDTH, 10)).astype("f4")


def samples(count: int, seed: object) -> tuple[np.ndarray, np.ndarray]:
    inputs = np.random.default_rng(seed).normal(size=(count, WIDTH)).astype("f4")
    return inputs, np.argmax(inputs @ teacher, axis=1)


class Steps(keras.callbacks.Callback):
    """Writes steps down, and keeps them from being too short; not those that are skipped."""

    def on_train_begin(self, logs: dict | None = None) -> None:
        self.file = (folder / f"steps-{generation}").open("a") if comm.rank == 0 else None
        self.taken = int(model.optimizer.iterations)

    def on_epoch_begin(self, epoch: int, logs: dict | None = None) -> None:
        self.epoch = epoch

    def on_train_batch_begin(self, batch: int, logs: dict | None = None) -> None:
        before, self.taken = self.taken, int(model.optimizer.iterations)
        if self.taken > before:
            time.sleep(STEP_SECONDS)
            if self.file:
                print(time.time(), self.epoch * STEPS + batch, file=self.file, flush=True)


inputs, targets = samples(STEPS * BATCH, [1, comm.rank])
data = tf.data.Dataset.from_tensor_slices((inputs, targets)).batch(BATCH)
model.fit(
    data,
    epochs=epochs,
    verbose=0,
    callbacks=[
        cx.callbacks.BroadcastState(),
        cx.callbacks.AverageBatchNorm(),
        Steps(),
        cx.checkpoint.Checkpoint(folder / "run", memory_every=20),
    ],
)
whole = b"".join(weight.tobytes() for weight in model.get_weights())
(folder / f"weights-{comm.rank}").write_text(hashlib.sha256(whole).hexdigest()[:16])
if comm.rank == 0:
    loss, accuracy = model.evaluate(*samples(4096, 2), verbose=0)
    (folder / "scores").write_text(f"{loss:.4f} {accuracy:.4f}")

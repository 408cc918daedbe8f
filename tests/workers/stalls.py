"""Training in which one rank stops early and lives on. Started by test_stalls.py on two ranks.

First the last rank's data end two batches early, and it takes the two steps when it has been told
that rank 0 waits. Then EarlyStopping, by each rank's own metric, ends its `fit`.

stalls.py mutual: each waits for the other, rank 0 in a step, the last rank at the epoch's end.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import tfcommx as cx

comm = cx.init(stall_seconds=600)
LAST = comm.rank == comm.topology.size - 1
told = threading.Event()


class Told(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        print(record.getMessage(), flush=True)
        if "has waited" in record.getMessage():
            told.set()


class OwnMetric(keras.callbacks.Callback):
    def on_epoch_end(self, epoch: int, logs: dict[str, Any]) -> None:
        logs["mine"] = 0.0 if LAST else float(epoch)


def batches(count: int) -> tf.data.Dataset:
    """Return a dataset whose length Keras does not know."""

    def generate() -> Any:
        for _ in range(count):
            yield np.ones((4, 8), "float32"), np.ones((4, 1), "float32")

    kinds = (tf.TensorSpec((4, 8)), tf.TensorSpec((4, 1)))
    return tf.data.Dataset.from_generator(generate, output_signature=kinds)


logging.getLogger("tfcommx").addHandler(Told())
keras.utils.set_random_seed(1)
net = keras.Sequential([keras.layers.Input((8,)), keras.layers.Dense(1, name="dense")])
net.compile(cx.DistributedOptimizer(keras.optimizers.SGD(0.01)), loss="mse", jit_compile=False)

if "mutual" in sys.argv:
    net.fit(batches(2 if LAST else 3), verbose=0, callbacks=[cx.callbacks.BroadcastState()])

net.fit(batches(4 if LAST else 6), verbose=0)
if LAST:
    told.wait(60)
    net.fit(batches(2), verbose=0)
print(f"rank {comm.rank} has taken all steps", flush=True)

stop = keras.callbacks.EarlyStopping("mine", mode="max", patience=1)
net.fit(batches(2), epochs=9, verbose=0, callbacks=[OwnMetric(), stop])
time.sleep(120)

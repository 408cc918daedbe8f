"""Three steps of training as a user writes them; prints a hash of the weights on every rank.

Started by test_rendezvous.py with the variables of several launchers, and without any launcher.
"""

from __future__ import annotations

import hashlib
import os
import signal
import sys
import time

import keras
import numpy as np
import tensorflow as tf

import tfcommx as cx

kill = sys.argv[1:] == ["kill"]
comm = cx.init(node_size=2, watch_seconds=5)
keras.utils.set_random_seed(7)
model = keras.Sequential([keras.layers.Input((8,)), keras.layers.Dense(64), keras.layers.Dense(1)])
optimizer = cx.DistributedOptimizer(
    keras.optimizers.SGD(0.05), cx.Scheme("hitopk", "mstopk", 0.05, dense_below=1)
)
model.compile(optimizer, loss="mse", jit_compile=False)
random = np.random.default_rng(comm.rank)
data = tf.data.Dataset.from_tensors((random.normal(size=(16, 8)), random.normal(size=(16, 1))))
model.fit(data.repeat(3), callbacks=[cx.callbacks.BroadcastState()], verbose=0)
whole = b"".join(weight.tobytes() for weight in model.get_weights())
print(f"rank {comm.rank} weights {hashlib.sha256(whole).hexdigest()[:16]}", flush=True)
if kill:
    comm.gather_objects("printed")
    if comm.rank == 2:
        print("now", time.time(), flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(120)

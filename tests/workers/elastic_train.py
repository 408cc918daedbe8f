"""A training as a user writes it, which saves after each epoch; a rank kills itself once.

    elastic_train.py FOLDER kill     rank 1 kills itself in the fourth epoch, the first time
    elastic_train.py FOLDER slow     epochs take a second until a generation has been lost

Started by tests/supervisor.
"""

from __future__ import annotations

import hashlib
import os
import signal
import sys
import time

import keras
import numpy as np

import tfcommx as cx

comm = cx.init(watch_seconds=5)
keras.utils.set_random_seed(7)
model = keras.Sequential([keras.layers.Input((8,)), keras.layers.Dense(16), keras.layers.Dense(1)])
scheme = cx.Scheme("allgather", "mstopk", 0.1)
model.compile(
    cx.DistributedOptimizer(keras.optimizers.SGD(0.05), scheme), loss="mse", jit_compile=False
)
random = np.random.default_rng(comm.rank)
inputs, targets = random.normal(size=(32, 8)), random.normal(size=(32, 1))


class Fault(keras.callbacks.Callback):
    def on_epoch_begin(self, epoch: int, logs: object = None) -> None:
        if os.environ.get("TFCOMMX_GENERATION") != "0":
            return
        if sys.argv[2] == "slow":
            time.sleep(1)
        elif (comm.rank, epoch) == (1, 3):
            os.kill(os.getpid(), signal.SIGKILL)


first = cx.checkpoint.restore(model, sys.argv[1])
print(f"rank {comm.rank} begins with epoch {first}", flush=True)
trained = model.fit(
    *(inputs, targets),
    batch_size=8,
    shuffle=False,
    epochs=6 if sys.argv[2] == "kill" else 60,
    initial_epoch=first,
    verbose=0,
    callbacks=[cx.callbacks.BroadcastState(), cx.checkpoint.Checkpoint(sys.argv[1]), Fault()],
)
bits = hashlib.sha256(b"".join(weight.tobytes() for weight in model.get_weights())).hexdigest()
last = trained.epoch[-1] + 1
print(f"rank {comm.rank} ends after epoch {last} with weights {bits[:16]}", flush=True)

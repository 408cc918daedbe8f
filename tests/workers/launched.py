"""A training as a user writes it; prints a hash of the weights on every rank.

Started, unchanged, by all launchers of tests/launchers: launched.py [FAULT RANK]. With `kill` that
rank kills itself after some steps, with `late` it never calls init; with `long` there are more
steps than any test waits for.

On 2 x 2 ranks these routes add two numbers at a time, so that the sums are the same bits under Gloo
and MPI, which add four in different orders.
"""

from __future__ import annotations

import hashlib
import os
import signal
import sys
import time

fault, victim = (sys.argv[1], int(sys.argv[2])) if sys.argv[1:] else ("", -1)
NUMBERS = ("HOROVOD_RANK", "OMPI_COMM_WORLD_RANK", "SLURM_PROCID", "RANK")
number = next(int(os.environ[name]) for name in NUMBERS if name in os.environ)
if fault == "late" and number == victim:
    print("waits", flush=True)
    time.sleep(3600)

import keras  # noqa: E402
import numpy as np  # noqa: E402
import tensorflow as tf  # noqa: E402

import tfcommx as cx  # noqa: E402

comm = cx.init(watch_seconds=5)
print(f"rank {comm.rank} {comm.topology.nodes} x {comm.topology.slots}", flush=True)
keras.utils.set_random_seed(7)
model = keras.Sequential([keras.layers.Input((8,)), keras.layers.Dense(64), keras.layers.Dense(1)])
optimizer = cx.DistributedOptimizer(
    keras.optimizers.SGD(0.05), cx.Scheme("hitopk", "mstopk", 0.05, dense_route="torus")
)
model.compile(optimizer, loss="mse", jit_compile=False)
random = np.random.default_rng(comm.rank)
data = tf.data.Dataset.from_tensors((random.normal(size=(16, 8)), random.normal(size=(16, 1))))


class Fault(keras.callbacks.Callback):
    """Says that the ranks are under way; kills a rank, or lets steps take long."""

    def on_train_batch_end(self, batch: int, logs: dict | None = None) -> None:
        if batch == 3 and comm.rank == 0:
            print("under way", flush=True)
        if batch == 20 and fault == "kill" and comm.rank == victim:  # Rank 0 has said its word
            os.kill(os.getpid(), signal.SIGKILL)
        if fault:
            time.sleep(0.05)


steps = 100_000 if fault else 6
callbacks = [cx.callbacks.BroadcastState(), Fault()]
model.fit(data.repeat(steps), callbacks=callbacks, verbose=0)
whole = b"".join(weight.tobytes() for weight in model.get_weights())
print(f"rank {comm.rank} weights {hashlib.sha256(whole).hexdigest()[:16]}", flush=True)

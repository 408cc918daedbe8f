"""Elastic averaging on three real ranks, of which one dies in the middle of sending its weights.

Started by test_elastic_ranks.py.
"""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import tfcommx as cx

tf.config.threading.set_intra_op_parallelism_threads(1)
comm = cx.init()
# 8 MB: more than MPI sends before the receiver asks for it
net = keras.Sequential([keras.layers.Input((1000,)), keras.layers.Dense(2000, use_bias=False)])
strategy = cx.strategies.ElasticAveraging(every=2, blocking=True)
optimizer = cx.DistributedOptimizer(keras.optimizers.SGD(0.1), strategy=strategy)
net.compile(optimizer, "mse", jit_compile=False)
cx.broadcast_variables(net.weights)
(weight,) = net.trainable_variables


def step() -> None:
    optimizer.apply([tf.fill(weight.shape, 0.01 * (comm.rank + 1))], [weight])


for _ in range(4):
    step()
(run,) = optimizer.exchanger.runs.values()
if comm.rank == 2:
    messages: Any = run._worker._messages
    send = messages.send

    def send_and_die(array: np.ndarray, target: int, tag: int) -> None:
        send(array, target, tag)
        print("rank 2: is killed", flush=True)
        os.kill(os.getpid(), signal.SIGKILL)

    messages.send = send_and_die
for _ in range(40):
    step()
cx.take_centre(net, optimizer)
print(f"rank {comm.rank}: ended {float(tf.reduce_sum(weight)):.6g}", flush=True)
sys.exit(0)

"""A few steps of training in which one rank comes to harm; started by test_faults.py on real ranks."""

from __future__ import annotations

import os
import signal
import sys

import keras
import tensorflow as tf

import tfcommx as cx

how, victim, route = sys.argv[1], int(sys.argv[2]), sys.argv[3] if len(sys.argv) > 3 else "allgather"
comm = cx.init()
weight = keras.Variable(tf.zeros([64, 64]), name="w")
scheme = cx.Scheme(route, "mstopk", 0.01) if route == "allgather" else cx.Scheme(route)
optimizer = cx.DistributedOptimizer(keras.optimizers.SGD(0.1), scheme)
for step in range(1000):
    optimizer.apply([tf.random.normal([64, 64])], [weight])
    if step == 5 and comm.rank == victim:
        print("now", flush=True)
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        raise RuntimeError("this rank gives up")

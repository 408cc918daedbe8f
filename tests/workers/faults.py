"""A few steps of training in which one rank fails, or seems to.

Started by test_faults.py on real ranks.
"""

from __future__ import annotations

import os
import re
import signal
import sys
import time

import keras
import tensorflow as tf

import tfcommx as cx

how, victim = sys.argv[1], int(sys.argv[2])
route = sys.argv[4] if len(sys.argv) > 4 else "allgather"
comm = cx.init(watch_seconds=float(sys.argv[3])) if len(sys.argv) > 3 else cx.init()

# Nobody is in trouble: one rank ends at once, one holds Python's lock for long
if how == "apart":
    if comm.rank == 0:
        start = time.monotonic()
        while time.monotonic() - start < 2 * float(sys.argv[3]):
            re.match(r"(a+)+$", "a" * 27 + "b")  # seconds within one bytecode
    print("done", flush=True)
    sys.exit()

weight = keras.Variable(tf.zeros([64, 64]), name="w")
scheme = cx.Scheme(route, "mstopk", 0.01) if route == "allgather" else cx.Scheme(route)
optimizer = cx.DistributedOptimizer(keras.optimizers.SGD(0.1), scheme)
for step in range(1000):
    optimizer.apply([tf.random.normal([64, 64])], [weight])
    if step == 5 and comm.rank == victim:
        print("now", time.time(), flush=True)
        if how == "raise":
            raise RuntimeError("this rank gives up")
        os.kill(os.getpid(), {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}[how])

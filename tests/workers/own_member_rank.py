"""Train by a member of another package, in the company of `auto`.

Arguments: the route, and the scheme's field and the member that it names.
"""

from __future__ import annotations

import sys

import keras
import numpy as np

import tfcommx as cx

cx.init()
keras.utils.set_random_seed(1)
model = keras.Sequential([keras.layers.Input((64,)), *(keras.layers.Dense(300) for _ in range(3))])
route, field, member = sys.argv[1:]
selected = {"selection": "mstopk", "density": 0.05} if field == "wire" else {}
scheme = cx.Scheme(route, **{field: member}, **selected)
optimizer = cx.DistributedOptimizer(keras.optimizers.SGD(0.05), scheme)
model.compile(optimizer, "mse", jit_compile=False)
numbers = np.random.default_rng(cx.rank())
rows = numbers.normal(size=(512, 64)).astype("float32")
callbacks = [cx.callbacks.BroadcastState()]
history = model.fit(rows, np.tile(rows, 5)[:, :300], 8, 2, verbose=0, callbacks=callbacks)
names = {getattr(bucket, field) for bucket in optimizer.exchanger.plans()[0].buckets}
losses = history.history["loss"]
print(f"falls {losses[-1] < losses[0]} digest {np.sum(model.get_weights()[0]):.9f}", names)

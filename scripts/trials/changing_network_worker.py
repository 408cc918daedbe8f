"""A training that changing_network.py watches: FILE SCHEME STEPS MODEL BATCH.

Rank 0 writes a line for each step: when it began, and how gradients travel.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from bench.benchmarks import training_models

import tfcommx as cx

SELECTION = {"selection": "mstopk", "density": 0.01}
path, scheme, steps = sys.argv[1], sys.argv[2], int(sys.argv[3])
tf.config.threading.set_intra_op_parallelism_threads(1)
comm = cx.init()
keras.utils.set_random_seed(1)
numbers = np.random.default_rng(comm.rank)
make = getattr(training_models, sys.argv[4])
model, (inputs, labels) = make(int(sys.argv[5]), numbers)
words = scheme.split()
if words[0] == "auto":
    asked = cx.Scheme("auto", **(SELECTION if words[1:] else {}))
elif scheme == "Scheme()":
    asked = cx.Scheme()
else:
    asked = cx.Scheme(words[0], wire=words[1], **SELECTION)
optimizer = cx.DistributedOptimizer(keras.optimizers.SGD(1e-4), asked)
loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
model.compile(optimizer, loss=loss, jit_compile=False)


class Steps(keras.callbacks.Callback):
    """Writes steps down."""

    def __init__(self) -> None:
        super().__init__()
        self.choices: list[object] = []
        self.file = open(path, "w", buffering=1) if comm.rank == 0 else None  # noqa: SIM115

    def on_train_batch_begin(self, batch: int, logs: dict | None = None) -> None:
        runs = list(optimizer.exchanger.runs.values())
        self.choices += [run for run in runs if run not in self.choices]
        buckets = [bucket for run in runs for bucket in run.executor.plan.buckets]
        kinds = {f"{one.route} {one.selection} {one.wire}" for one in buckets}
        tries = any(getattr(run.executor, "chosen", run) is None for run in runs)
        how = "trial" if tries else f"{', '.join(sorted(kinds))}, {len(buckets)} buckets"
        if self.file:
            self.file.write(f"{time.time()} choice {len(self.choices)}: {how}\n")


data = tf.data.Dataset.from_tensors((inputs, labels)).repeat()
same = cx.callbacks.CompareReplicas()
every = [cx.callbacks.BroadcastState(), cx.callbacks.ChooseAgain(), Steps(), same]
model.fit(data, steps_per_epoch=steps, epochs=1, verbose=0, callbacks=every)

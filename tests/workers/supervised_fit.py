"""A training under a supervisor: `fit` of a model with dropout and batch norm, one callback added.

supervised_fit.py FOLDER OPTIONS(json): scheme, strategy; faults: {"GENERATION": [RANK, STEP, KIND]}
with STEP of the whole run, or of the generation if `relative` is set. KIND is kill, `kill with
memory` (of this host), `kill with all memory`, `kill with damaged memory` (this host's newest
files), stop, term, or `hosts FILE HOST...` (hosts that there are from now on). The run ends at the
first epoch's end of `last_generation`, if that is set. With `logs` rank 0 writes FOLDER.csv, and
all ranks end with their best weights.
Prints a hash of the weights at the end.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import sys
import time
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf

import tfcommx as cx

folder, options = sys.argv[1], json.loads(sys.argv[2])
EPOCHS, STEPS = options.get("epochs", 3), options.get("steps", 12)
GENERATION = os.environ.get("TFCOMMX_GENERATION", "0")
comm = cx.init(watch_seconds=options.get("watch", 5))
keras.utils.set_random_seed(7)
layers = keras.layers
model = keras.Sequential(
    [
        layers.Input((8,)),
        layers.Dense(64, activation="relu"),
        layers.BatchNormalization(),
        layers.Dropout(0.2),
        layers.Dense(1),
    ]
)
scheme = cx.Scheme(**options.get("scheme", {"route": "hitopk", "selection": "mstopk"}))
strategy = {"strategy": options["strategy"]} if "strategy" in options else {}
optimizer = cx.DistributedOptimizer(
    getattr(keras.optimizers, options.get("optimizer", "Adam"))(0.01), scheme, **strategy
)
model.compile(optimizer, loss="mse", metrics=["mae"], jit_compile=False)
random = np.random.default_rng(comm.rank)
inputs, targets = random.normal(size=(STEPS, 16, 8)), random.normal(size=(STEPS, 16, 1))
batches = tf.data.Dataset.from_tensor_slices((inputs, targets))


class Fault(keras.callbacks.Callback):
    """Causes the fault of the options on a rank, after a step of the whole run."""

    began_at = 0

    def on_train_begin(self, logs: dict | None = None) -> None:
        if options.get("relative"):
            self.began_at = int(model.optimizer.iterations)

    def on_epoch_begin(self, epoch: int, logs: dict | None = None) -> None:
        self.epoch = epoch

    def on_epoch_end(self, epoch: int, logs: dict | None = None) -> None:
        if int(GENERATION) >= options.get("last_generation", 1000):
            self.model.stop_training = True

    def on_train_batch_begin(self, batch: int, logs: dict | None = None) -> None:
        time.sleep(options.get("step_seconds", 0))
        rank, step, kind = options.get("faults", {}).get(GENERATION, (-1, 0, ""))
        if comm.rank == rank and self.epoch * STEPS + batch - self.began_at == step:
            print(f"{kind} at step {step}", flush=True)
            meet(kind)


def damage(folder: Path) -> None:
    """Flip a byte in the middle of each file of the newest snapshot."""
    paths = sorted(folder.glob("*/*.npz"))
    newest = max(path.name.split("-")[1].removesuffix(".npz") for path in paths)
    for path in paths:
        if f"-{newest}" in path.name:
            data = bytearray(path.read_bytes())
            data[len(data) // 2] ^= 1
            path.write_bytes(data)


def meet(kind: str) -> None:
    word, *words = kind.split()
    if word == "hosts":
        Path(words[0]).write_text("\n".join(words[1:]))
        return
    if "memory" in words:
        host = "*" if "all" in words else os.environ["HOROVOD_HOSTNAME"]
        for folder in Path("/dev/shm").glob(f"tfcommx-*-{os.environ['TFCOMMX_RUN']}-{host}"):
            if "damaged" in words:
                damage(folder)
            else:
                shutil.rmtree(folder)
    number = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "term": signal.SIGTERM}[word]
    os.kill(os.getpid(), number)


logs: list[keras.callbacks.Callback] = []
if options.get("logs"):
    Path(folder).parent.mkdir(parents=True, exist_ok=True)
    logs.append(keras.callbacks.EarlyStopping("loss", patience=100, restore_best_weights=True))
    logs += [keras.callbacks.CSVLogger(f"{folder}.csv")] * (comm.rank == 0)
model.fit(
    batches,
    epochs=EPOCHS,
    verbose=0,
    callbacks=[
        cx.callbacks.BroadcastState(),
        cx.callbacks.AverageBatchNorm(),
        Fault(),
        *logs,
        cx.checkpoint.Checkpoint(folder, memory_every=options.get("memory_every", 5)),
    ],
)
whole = b"".join(weight.tobytes() for weight in model.get_weights())
bits = hashlib.sha256(whole).hexdigest()[:16]
print(f"rank {comm.rank} of {os.environ['TFCOMMX_RUN']} weights {bits}", flush=True)

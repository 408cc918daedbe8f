"""Elastic averaging on three real ranks, in stages; the last two end ranks by SIGKILL.

Started by test_elastic_ranks.py.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import signal
import sys
import time
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf

import tfcommx as cx

folder, server = Path(sys.argv[1]), sys.argv[2]
tf.config.threading.set_intra_op_parallelism_threads(1)
comm = cx.init()
STEPS = (30, 24, 12)[comm.rank]  # None waits for another


def compiled(**options: object) -> keras.Model:
    keras.utils.set_random_seed(comm.rank)
    net = keras.Sequential(
        [
            keras.layers.Input((6,)),
            keras.layers.Dense(16, activation="relu", name="hidden"),
            keras.layers.BatchNormalization(name="norm"),
            keras.layers.Dense(1, name="out"),
        ],
        name="net",
    )
    strategy = cx.strategies.ElasticAveraging(every=4, server=server, **options)
    inner = keras.optimizers.SGD(0.01, momentum=0.9, nesterov=True)
    net.compile(cx.DistributedOptimizer(inner, strategy=strategy), "mse", jit_compile=False)
    return net


def fit(net: keras.Model, *callbacks: keras.callbacks.Callback, epochs: int = 2) -> None:
    numbers = np.random.default_rng(comm.rank)
    x = numbers.normal(size=(8 * STEPS, 6)).astype("float32")
    y = x.sum(axis=1, keepdims=True)
    net.fit(x, y, batch_size=8, epochs=epochs, verbose=0, callbacks=list(callbacks))


def say(words: str) -> None:
    print(f"rank {comm.rank}: {words}", flush=True)


def state(net: keras.Model) -> str:
    return hashlib.sha256(b"".join(one.numpy().tobytes() for one in net.weights)).hexdigest()


def equal(net: keras.Model) -> bool:
    return len(set(comm.gather_objects(state(net)))) == 1


class Stop(keras.callbacks.Callback):
    """Ends a process, once, at a step."""

    def __init__(self, pid: int) -> None:
        super().__init__()
        self.pid, self.done = pid, False

    def on_train_batch_end(self, batch: int, logs: object = None) -> None:
        if batch == 5 and not self.done:
            self.done = True
            say(f"kills {'itself' if self.pid == os.getpid() else 'server'} at {time.time()}")
            os.kill(self.pid, signal.SIGKILL)


def process_with_the_centre() -> int:
    """Return that of this launch."""
    launch = f"PMIX_NAMESPACE={os.environ['PMIX_NAMESPACE']}".encode()
    for one in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            ours = launch in (one / "environ").read_bytes().split(b"\0")
            if ours and b"tfcommx.strategies.easgd.process" in (one / "cmdline").read_bytes():
                return int(one.name)
    raise AssertionError("no process holds the centre")


net = compiled()
fit(net, cx.callbacks.Standard(), cx.checkpoint.Checkpoint(folder))
say(f"equal {equal(net)}")
error = float(net.evaluate(np.eye(6), np.ones((6, 1)), verbose=0))
say(f"error {error:.3f}")

# The checkpoint has the centre, and any number of ranks starts from it; a file is a plain model
again = compiled(blocking=True)
first = cx.checkpoint.restore(again, folder)
fit(again, cx.callbacks.BroadcastState(), epochs=0)
say(f"epoch {first} restored {equal(again)}")
error = float(again.evaluate(np.eye(6), np.ones((6, 1)), verbose=0))
say(f"saved error {error:.3f}")
fit(again, cx.callbacks.BroadcastState(), epochs=1)
say(f"equal again {equal(again)}")
if comm.rank == 0:
    again.save(folder / "plain.keras")
    loaded = keras.saving.load_model(folder / "plain.keras")
    say(f"saved {state(loaded) == state(again)} {type(loaded.optimizer).__module__}")

# A custom loop, with gradients that one rank cannot represent
optimizer = cx.DistributedOptimizer(
    keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1), initial_scale=2.0),
    strategy=cx.strategies.ElasticAveraging(server=server),
)
weight = keras.Sequential([keras.layers.Input((1,)), keras.layers.Dense(1, use_bias=False)])
cx.broadcast_variables(weight.weights)
for step in range(20 + 5 * comm.rank):
    value = np.inf if comm.rank == 1 and step == 3 else 0.1
    optimizer.apply([tf.fill([1, 1], np.float32(value))], weight.trainable_variables)
cx.take_centre(weight, optimizer)
cx.take_centre(weight, optimizer)  # Nothing was exchanged in between
say(f"loop {equal(weight)} {int(optimizer.iterations)}")

try:
    fit(net, cx.callbacks.BroadcastState(), cx.callbacks.CompareReplicas(), epochs=1)
except cx.TfcommxError as refused:
    say(str(refused))

if server == "extra_rank" and comm.rank == 0:
    files = Path(f"/proc/{process_with_the_centre()}")
    resident = int((files / "status").read_text().partition("VmRSS:")[2].split()[0])
    say(f"server {resident} kB, {'tensorflow' in (files / 'maps').read_text()}")

# A worker dies: the others end their training with the centre
net = compiled()
if server == "sharded":  # Every rank is a server
    fit(net, cx.callbacks.BroadcastState(), epochs=1)
else:
    # Where none that trains is a server, rank 0 as well as any
    killed = [Stop(os.getpid())] if comm.rank == (0 if server == "extra_rank" else 2) else []
    saves = cx.checkpoint.Checkpoint(folder / "after")
    fit(net, cx.callbacks.BroadcastState(), saves, *killed, epochs=3)
    say(f"survives {state(net)}")
    try:
        comm.gather_objects(0)
    except cx.TfcommxError as refused:
        say(str(refused))

# Then a server
killer = 0 if server == "thread" else 1
if comm.rank == killer:
    pid = process_with_the_centre() if server == "extra_rank" else os.getpid()
    fit(net, Stop(pid), epochs=100000)
fit(net, epochs=100000)
say("never ends")

"""One rank of a case of `misuse.py`: a small training in which something is wrong.

python scripts/trials/misuse_worker.py SEED 2,4 FOLDER
"""

from __future__ import annotations

import copy
import hashlib
import os
import pickle
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import misuse_cases
import numpy as np
import tensorflow as tf

import tfcommx as cx

STEPS, BATCH, EPOCHS, WATCH_SECONDS, CHECK_EVERY = 6, 4, 4, 10.0, 5
SCHEMES = {
    "dense": cx.Scheme(),
    "allgather": cx.Scheme("allgather", "mstopk", 0.2, dense_below=8),
    "hitopk": cx.Scheme("hitopk", "mstopk", 0.2, dense_below=8),
    "torus": cx.Scheme("torus"),
}


class Mishap(keras.callbacks.Callback):
    """Does what is wrong, at its step of the second epoch."""

    def __init__(self, case: misuse_cases.Case, here: bool, folder: Path) -> None:
        super().__init__()
        self.case, self.here, self.folder = case, here, folder
        self.epoch = 0

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self.epoch = epoch

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        if batch == 0 and self.epoch == 0:
            (self.folder / f"begun{cx.rank()}").write_text(str(time.time()))

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if not self.here or self.epoch != 1 or batch + 1 != self.case.step:
            return
        match self.case.misuse:
            case "one rank sets the rate":
                if not has_schedule(self.model.optimizer):
                    self.model.optimizer.learning_rate = 0.001
            case "one rank assigns a weight":
                weight = self.model.trainable_variables[0]
                weight.assign(weight + 1e-3)
            case "one rank restores its step count":
                self.model.optimizer._iterations.assign(1)
            case "one rank stops":
                self.model.stop_training = True
            case "an exception in a callback":
                raise RuntimeError("misuse: this callback fails")
            case "a rank is killed":
                os.kill(os.getpid(), signal.SIGKILL)
            case "a rank is stopped":
                os.kill(os.getpid(), signal.SIGSTOP)


def has_schedule(optimizer: keras.optimizers.Optimizer) -> bool:
    return not isinstance(optimizer._learning_rate, keras.Variable)


def network(case: misuse_cases.Case, here: bool) -> keras.Model:
    keras.utils.set_random_seed(1 + (cx.rank() if case.own_seeds else 0))
    width = 17 if case.misuse == "one rank has another model" and here else 16
    return keras.Sequential(
        [
            keras.layers.Input((8,)),
            keras.layers.Dense(width, activation="relu"),
            keras.layers.BatchNormalization(),
            keras.layers.Dropout(0.2),
            keras.layers.Dense(3),
        ]
    )


def optimizer_of(case: misuse_cases.Case, here: bool) -> keras.optimizers.Optimizer:
    rate: Any = 0.05
    if case.rate == "schedule":
        rate = keras.optimizers.schedules.CosineDecay(0.05, STEPS * EPOCHS)
    plain = keras.optimizers.SGD(rate, momentum=0.9)
    if case.misuse == "not wrapped":
        return plain
    scheme = SCHEMES[case.scheme]
    if case.misuse == "one rank has another scheme" and here:
        scheme = SCHEMES["dense" if case.scheme != "dense" else "allgather"]
    strategy: Any = case.strategy
    if strategy == "rebroadcast":
        strategy = cx.strategies.Rebroadcast(every=3)
    options: dict[str, Any] = {"strategy": strategy, "check_replicas_every": CHECK_EVERY}
    wrapped = cx.DistributedOptimizer(plain, scheme, **options)
    match case.misuse:
        case "wrapped twice":
            return cx.DistributedOptimizer(wrapped)
        case "a deep copy of the optimizer":
            return copy.deepcopy(wrapped)
        case "a pickle of the optimizer":
            return pickle.loads(pickle.dumps(wrapped))
    return wrapped


def callbacks_of(case: misuse_cases.Case, folder: Path) -> list[keras.callbacks.Callback]:
    saved = folder / f"{cx.rank()}-{{epoch}}.keras"
    makers = {
        "Standard": cx.callbacks.Standard,
        "BroadcastState": cx.callbacks.BroadcastState,
        "WarmUp": lambda: cx.callbacks.WarmUp(0.05, steps=STEPS),
        "AverageBatchNorm": cx.callbacks.AverageBatchNorm,
        "AverageMetrics": cx.callbacks.AverageMetrics,
        "EarlyStopping": lambda: keras.callbacks.EarlyStopping("loss", patience=0),
        "ReduceLROnPlateau": lambda: keras.callbacks.ReduceLROnPlateau(
            "loss", patience=0, min_delta=0.05, cooldown=0
        ),
        "ModelCheckpoint": lambda: keras.callbacks.ModelCheckpoint(
            saved, monitor="loss", save_best_only=True
        ),
        "TerminateOnNaN": keras.callbacks.TerminateOnNaN,
        "AgreeOnStop": cx.callbacks.AgreeOnStop,
    }
    names = list(case.callbacks)
    if case.rate == "schedule":  # Keras refuses it there, in words of its own.
        names = [name for name in names if name != "ReduceLROnPlateau"]
    made = [makers[name]() for name in names]
    if case.rate == "scheduler":
        made.append(keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate * 0.9))
    return made


def data_of(case: misuse_cases.Case, here: bool) -> tf.data.Dataset:
    numbers = np.random.default_rng([3, cx.rank()])
    x = numbers.normal(size=(STEPS * BATCH, 8)).astype("float32")
    y = numbers.integers(0, 3, STEPS * BATCH)
    uneven = case.misuse in ("one rank has fewer batches", "unknown numbers of batches")
    rows = (STEPS - case.step % 4 - 1) * BATCH if uneven and here else STEPS * BATCH
    fails = case.misuse == "an exception in the data" and here

    def batches() -> Iterator[tuple[np.ndarray, np.ndarray]]:
        for start in range(0, rows, BATCH):
            if fails and start // BATCH + 1 == case.step:
                raise RuntimeError("misuse: these data fail")
            yield x[start : start + BATCH], y[start : start + BATCH]

    if fails or case.misuse == "unknown numbers of batches":
        kinds = (tf.TensorSpec((None, 8), tf.float32), tf.TensorSpec((None,), tf.int64))
        return tf.data.Dataset.from_generator(batches, output_signature=kinds)
    return tf.data.Dataset.from_tensor_slices((x[:rows], y[:rows])).batch(BATCH)


def main() -> None:
    seed, ranks, folder = int(sys.argv[1]), sys.argv[2], Path(sys.argv[3])
    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(2)
    case = misuse_cases.draw(seed, list(map(int, ranks.split(","))))
    cx.init(node_size=2, watch_seconds=WATCH_SECONDS)
    (folder / f"process{cx.rank()}").write_text(str(os.getpid()))
    here = cx.rank() == case.victim
    net, loss = network(case, here), keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    net.compile(optimizer_of(case, here), loss=loss, jit_compile=False)
    if case.misuse == "one rank loads the model" and here:
        net(np.zeros((1, 8), "float32"))
        net.set_weights([weight * 0.5 for weight in net.get_weights()])
    callbacks = callbacks_of(case, folder)
    # Behind the others, or before the last, which may be AgreeOnStop
    callbacks.insert(max(0, len(callbacks) - case.step % 2), Mishap(case, here, folder))
    begin = 1 if case.misuse == "one rank begins later" and here else 0
    arguments: dict[str, Any] = {"verbose": 0, "callbacks": callbacks}
    net.fit(data_of(case, here), epochs=EPOCHS, initial_epoch=begin, **arguments)
    if case.misuse.startswith("compiled again"):
        again = keras.optimizers.SGD(0.05)
        if case.misuse == "compiled again, wrapped":
            again = cx.DistributedOptimizer(again, check_replicas_every=CHECK_EVERY)
        net.compile(again, loss=loss, jit_compile=False)
        net.fit(data_of(case, here), epochs=2, verbose=0)
    digest = hashlib.sha256()
    for variable in net.trainable_variables:
        digest.update(np.ascontiguousarray(variable.numpy()).tobytes())
    (folder / f"ended{cx.rank()}").write_text(digest.hexdigest())


if __name__ == "__main__":
    main()

"""A training with `fit` that losses.py disturbs.

losses_worker.py FOLDER EPOCHS STEP_SECONDS SEED SETUP: 40 steps an epoch, STEP_SECONDS each at
least. A file `last_epoch` in the folder ends it sooner, on all ranks if it is there before the
epoch that it names begins.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import keras
import tensorflow as tf
from losses_rank import BATCH, STEPS, Notes, classifier, samples

import tfcommx as cx

SPARSE = {"selection": "mstopk", "density": 0.02}
SETUPS = {
    "hitopk": {"scheme": cx.Scheme("hitopk", **SPARSE)},
    "auto": {"scheme": cx.Scheme("auto")},
    "sharded": {"strategy": "sharded"},
    # A user's script with the one callback added
    "callback": {"scheme": cx.Scheme("allgather", **SPARSE)},
}
# Between two scores
SCORE_EPOCHS = 5

folder, setup = Path(sys.argv[1]), sys.argv[5]
epochs, step_seconds, seed = int(sys.argv[2]), float(sys.argv[3]), int(sys.argv[4])
tf.config.threading.set_intra_op_parallelism_threads(1)
comm = cx.init()
notes = Notes(folder, int(os.environ.get("TFCOMMX_GENERATION", "0")))
keras.utils.set_random_seed(seed)
model = classifier()
inner = keras.optimizers.Adam(0.001) if setup == "callback" else keras.optimizers.SGD(0.05)
model.compile(
    cx.DistributedOptimizer(inner, **SETUPS[setup]),
    loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    metrics=["accuracy"],
    jit_compile=False,
)


class Steps(keras.callbacks.Callback):
    """Writes steps down, and keeps them from being too short; not those that are skipped."""

    def on_train_begin(self, logs: dict | None = None) -> None:
        self.taken = int(model.optimizer.iterations)

    def on_epoch_begin(self, epoch: int, logs: dict | None = None) -> None:
        self.epoch = epoch

    def on_train_batch_begin(self, batch: int, logs: dict | None = None) -> None:
        before, self.taken = self.taken, int(model.optimizer.iterations)
        if self.taken > before:
            time.sleep(step_seconds)
            if comm.rank == 0:
                notes.step(self.epoch * STEPS + batch, comm.topology.size)

    def on_epoch_end(self, epoch: int, logs: dict | None = None) -> None:
        sooner = folder / "last_epoch"
        last = min(epochs, int(sooner.read_text())) if sooner.exists() else epochs
        if comm.rank == 0 and ((epoch + 1) % SCORE_EPOCHS == 0 or epoch + 1 >= last):
            notes.score(epoch + 1, model)
        if epoch + 1 >= last:
            model.stop_training = True


inputs, targets = samples(STEPS * BATCH, [1, comm.rank, seed])
data = tf.data.Dataset.from_tensor_slices((inputs, targets)).batch(BATCH)
usual = [cx.callbacks.BroadcastState(), cx.callbacks.AverageBatchNorm()]
model.fit(
    data,
    epochs=epochs,
    verbose=0,
    callbacks=[
        *(usual if setup != "callback" else usual[:1]),
        Steps(),
        cx.checkpoint.Checkpoint(folder / "run", memory_every=20),
    ],
)
# Without the average, the statistics of batch norm are each rank's own
shared = model.trainable_weights if setup == "callback" else model.weights
notes.weights(comm.rank, [weight.numpy() for weight in shared])

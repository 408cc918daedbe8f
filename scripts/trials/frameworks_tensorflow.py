"""A rank of TensorFlow's MultiWorkerMirroredStrategy, for frameworks.py.

frameworks_tensorflow.py METHOD BATCH STEPS: METHOD is none or ring.
"""

from __future__ import annotations

import json
import os
import sys

from frameworks_rank import CHIEF, CLASSES, PORT, measure

method, batch, steps = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
network, _, first = CHIEF.rpartition(".")
workers = [f"{network}.{int(first) + number}:{PORT}" for number in range(size)]
os.environ["TF_CONFIG"] = json.dumps(
    {"cluster": {"worker": workers}, "task": {"type": "worker", "index": rank}}
)
import keras  # noqa: E402  It reads TF_CONFIG
import numpy as np  # noqa: E402
import tensorflow as tf  # noqa: E402

communication = tf.distribute.experimental.CommunicationImplementation.RING
strategy = tf.distribute.MultiWorkerMirroredStrategy(
    communication_options=tf.distribute.experimental.CommunicationOptions(
        implementation=communication
    )
)
alone = tf.distribute.get_strategy()
keras.utils.set_random_seed(1)
with (alone if method == "none" else strategy).scope():
    model = keras.applications.ResNet50(
        weights=None, input_shape=(64, 64, 3), classes=CLASSES, classifier_activation=None
    )
    optimizer = keras.optimizers.SGD(0.01)
    optimizer.build(model.trainable_variables)
loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
random = np.random.default_rng(rank)
images = random.standard_normal((batch, 64, 64, 3), np.float32)
labels = random.integers(0, CLASSES, batch)


def one_replica(images: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
    with tf.GradientTape() as tape:
        # Keras's optimizer adds the gradients of all replicas
        loss = loss_of(labels, model(images, training=True))
        share = loss if method == "none" else loss / size
    weights = model.trainable_variables
    optimizer.apply(tape.gradient(share, weights), weights)
    return loss


@tf.function
def traced(images: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
    if method == "none":
        return one_replica(images, labels)
    return strategy.run(one_replica, (images, labels))


def barrier() -> None:
    """Return when all ranks have come here."""
    context = tf.distribute.get_replica_context
    strategy.run(lambda: context().all_reduce("SUM", tf.ones(())))


measure(
    lambda: float(traced(images, labels)),
    barrier,
    lambda: [one.numpy() for one in model.trainable_variables],
    steps,
    f"TensorFlow {tf.__version__}",
)

"""Horovod's own elastic mode, for comparison: a custom loop, the world's ranks only, no tfcommx.

losses_horovod.py FOLDER EPOCHS STEP_SECONDS SEED. Every 20 steps the state is committed. Horovod's
elastic states of Keras models call `optimizer.variables()`, which Keras 3 does not have: the state
is one of variables.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import horovod.tensorflow as hvd
import keras
import tensorflow as tf
from losses_rank import BATCH, STEPS, Notes, classifier, samples

COMMIT_STEPS = 20

folder, steps = Path(sys.argv[1]), int(sys.argv[2]) * STEPS
step_seconds, seed = float(sys.argv[3]), int(sys.argv[4])
tf.config.threading.set_intra_op_parallelism_threads(1)
hvd.init()
notes = Notes(folder, 0)
keras.utils.set_random_seed(seed)
model, optimizer = classifier(), keras.optimizers.SGD(0.05)
optimizer.build(model.trainable_variables)
loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


@tf.function(jit_compile=False)
def step(inputs: tf.Tensor, targets: tf.Tensor) -> None:
    with tf.GradientTape() as tape:
        loss = loss_of(targets, model(inputs, training=True))
    weights = model.trainable_variables
    # Horovod's own tape needs TensorFlow's variables, too
    gradients = [hvd.allreduce(one) for one in tape.gradient(loss, weights)]
    optimizer.apply_gradients(zip(gradients, weights, strict=True))


@hvd.elastic.run
def train(state: hvd.elastic.TensorFlowState) -> None:
    inputs, targets = samples(STEPS * BATCH, [1, hvd.rank(), seed])
    try:
        while state.step < steps:
            at = state.step % STEPS * BATCH
            step(tf.constant(inputs[at : at + BATCH]), tf.constant(targets[at : at + BATCH]))
            time.sleep(step_seconds)
            state.step += 1
            if hvd.rank() == 0:
                notes.step(state.step, hvd.size())
            if state.step % COMMIT_STEPS == 0:
                state.commit()
    except Exception:  # Of any class, because Horovod decides how to treat it
        notes.next_generation()
        raise


# TensorFlow's variables, not the ones of Keras around them
variables = [one.value for one in (*model.variables, *optimizer.variables)]
train(hvd.elastic.TensorFlowState(variables=variables, step=0))
notes.weights(hvd.rank(), [weight.numpy() for weight in model.trainable_weights])

"""Tests the claims of docs/how-to/move-from-horovod.md on every rank; prints `NAME ok` for each.

Launched under MPI, with HOROVOD_DYNAMIC_PROCESS_SETS=1.
"""

from __future__ import annotations

import functools
import os
import sys
import time
import traceback
from pathlib import Path

import horovod.tensorflow as hvd
import keras
import numpy as np
import tensorflow as tf

import tfcommx as cx


def net() -> keras.Model:
    keras.utils.set_random_seed(1)
    return keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(3, name="dense")])


def data() -> tuple[np.ndarray, np.ndarray]:
    numbers = np.random.default_rng(cx.rank())
    x = numbers.normal(size=(16, 4)).astype("float32")
    return x, x[:, :3]


def equal_weights(model: keras.Model) -> bool:
    everyone = hvd.allgather_object([one.tobytes() for one in model.get_weights()])
    return all(theirs == everyone[0] for theirs in everyone)


def raises(error: type[Exception], call: object) -> str:
    """Return the words of the error that the call ends with."""
    try:
        call()
    except error as found:
        return str(found)
    raise AssertionError(f"{call} has not raised {error.__name__}")


def start_and_size() -> None:
    hvd.init()  # Does nothing any more
    assert (cx.rank(), cx.size()) == (hvd.rank(), hvd.size())
    assert (cx.local_rank(), cx.local_size()) == (hvd.local_rank(), hvd.local_size())
    assert (hvd.cross_rank(), hvd.cross_size(), hvd.is_homogeneous()) == (0, 1, True)
    assert hvd.is_initialized() and hvd.mpi_enabled() and hvd.mpi_built()
    asked = (hvd.rank_op(), hvd.size_op(), hvd.local_rank_op(), hvd.local_size_op())
    assert [int(one) for one in asked] == [cx.rank(), cx.size(), cx.rank(), cx.size()]


def collectives() -> None:
    ranks = cx.size()
    mine = tf.constant([float(cx.rank() + 1)])
    mean = float(hvd.allreduce(mine)[0])
    assert mean == (ranks + 1) / 2
    assert float(tf.function(lambda: hvd.allreduce(mine, name="traced"))()[0]) == mean
    assert float(hvd.allreduce(mine, op=hvd.Max)[0]) == ranks
    assert float(hvd.allreduce(mine, compression=hvd.Compression.fp16)[0]) == mean
    assert [float(one[0]) for one in hvd.grouped_allreduce([mine, mine])] == [mean, mean]
    assert hvd.allgather(mine).numpy().tolist() == [1 + rank for rank in range(ranks)]
    assert hvd.broadcast(mine, 1).numpy().tolist() == [2.0]
    assert hvd.alltoall(tf.range(ranks)).numpy().tolist() == [cx.rank()] * ranks
    assert hvd.reducescatter(tf.ones([ranks])).numpy().tolist() == [1.0]
    assert len(hvd.grouped_allgather([mine])) == len(hvd.grouped_reducescatter([tf.ones(2)])) == 1


def objects() -> None:
    assert hvd.allgather_object({"rank": cx.rank()}) == [{"rank": r} for r in range(cx.size())]
    assert hvd.broadcast_object({"rank": cx.rank()}, root_rank=1) == {"rank": 1}
    assert "placeholder" in raises(AttributeError, lambda: hvd.broadcast_object_fn(0))


def process_sets() -> None:
    """Beside a step of ours: a set of one rank, and its removal."""
    last = hvd.add_process_set([cx.size() - 1])
    assert last.included() == (cx.rank() == cx.size() - 1)
    if last.included():
        assert float(hvd.allreduce(tf.constant(7.0), op=hvd.Sum, process_set=last)) == 7.0
    model = net()
    model.compile(cx.DistributedOptimizer(keras.optimizers.SGD(0.1)), loss="mse", jit_compile=False)
    model.fit(*data(), verbose=0)
    assert equal_weights(model) and hvd.remove_process_set(last)


def tape() -> None:
    """Horovod's own, also with Adasum, whose sum of equal gradients is one of them."""
    variable = keras.Variable(tf.ones([2]))

    def gradient(**options: object) -> list[float]:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(variable.value) * (cx.rank() + 1 if not options else 1)
        tape = hvd.DistributedGradientTape(tape, **options)
        return tape.gradient(loss, [variable.value])[0].numpy().tolist()

    assert gradient() == [(cx.size() + 1) / 2] * 2
    np.testing.assert_allclose(gradient(op=hvd.Adasum), [1.0, 1.0])


def arguments() -> None:
    """Each of Horovod's arguments raises an error that names the replacement."""
    for given, words in (
        ({"op": hvd.Average}, 'op="average"'),
        ({"op": hvd.Adasum}, "Received hvd.Adasum"),
        ({"compression": hvd.Compression.fp16}, "16-bit wire"),
        ({"backward_passes_per_step": 4}, "gradient_accumulation_steps"),
        ({"sparse_as_dense": True}, "made dense"),
        ({"process_set": hvd.global_process_set}, "all ranks"),
        ({"groups": 2}, "bucket_bytes"),
    ):
        optimizer = keras.optimizers.SGD(0.1)
        said = raises(
            cx.ConfigurationError, functools.partial(cx.DistributedOptimizer, optimizer, **given)
        )
        assert words in said, said
    raises(TypeError, lambda: cx.DistributedOptimizer(keras.optimizers.SGD(0.1), scheem=None))


def horovods_optimizer_exchanges_nothing() -> None:
    import horovod.tensorflow.keras as hvd_keras

    model = net()
    model.compile(
        hvd_keras.DistributedOptimizer(keras.optimizers.SGD(0.1)), loss="mse", jit_compile=False
    )
    model.fit(*data(), verbose=0)
    assert not equal_weights(model)


def horovods_callbacks() -> None:
    """None of them works with Keras 3."""
    from horovod.tensorflow.keras import callbacks

    for made in (
        lambda: callbacks.BroadcastGlobalVariablesCallback(0),
        lambda: callbacks.MetricAverageCallback(),
        lambda: callbacks.LearningRateScheduleCallback(0.1, lambda epoch: 0.5),
        lambda: callbacks.LearningRateWarmupCallback(0.1),
        lambda: callbacks.BestModelCheckpoint(),
    ):
        model = net()
        model.compile("sgd", loss="mse", jit_compile=False)
        fit = functools.partial(model.fit, *data(), verbose=0)
        raises(AttributeError, lambda fit=fit, made=made: fit(callbacks=[made()]))


def horovods_other_parts() -> None:
    import horovod.tensorflow.keras as hvd_keras

    model = net()
    model.compile(cx.DistributedOptimizer(keras.optimizers.SGD(0.1)), loss="mse", jit_compile=False)
    assert "Horovod's elastic" in raises(
        cx.ConfigurationError, lambda: hvd_keras.elastic.KerasState(model).commit()
    )
    raises(ValueError, lambda: hvd.SyncBatchNormalization())
    raises(Exception, lambda: hvd.broadcast_variables([keras.Variable(1.0)], root_rank=0))
    cx.broadcast_variables([one := keras.Variable(float(cx.rank()))])
    assert float(one) == 0.0


def load_and_wrap() -> None:
    """The plain optimizer is in the file, with its state."""

    def step(model: keras.Model) -> None:
        weights = model.trainable_variables
        gradients = [tf.fill(one.shape, 1.0 + cx.rank()) for one in weights]
        model.optimizer.apply(gradients, weights)

    model, path = net(), Path(f"{cx.rank()}.keras")
    model.compile(
        cx.DistributedOptimizer(keras.optimizers.SGD(0.1, momentum=0.9)),
        loss="mse",
        jit_compile=False,
    )
    step(model)
    model.save(path)
    loaded = keras.models.load_model(path)
    loaded.compile(cx.DistributedOptimizer(loaded.optimizer), loss=loaded.loss, jit_compile=False)
    assert int(loaded.optimizer.iterations) == 1
    step(loaded)
    assert equal_weights(loaded)


def accumulation() -> None:
    """Keras averages over the passes; 4 times the rate adds them up."""
    passes = 4
    gradients = [np.float32(cx.rank() + number) for number in range(passes)]
    mean = float(hvd.allreduce(tf.constant(np.mean(gradients))))
    for rate, wanted in ((1.0, mean), (float(passes), passes * mean)):
        variable = keras.Variable(0.0)
        optimizer = cx.DistributedOptimizer(
            keras.optimizers.SGD(rate, gradient_accumulation_steps=passes)
        )
        optimizer.build([variable])
        for gradient in gradients:
            optimizer.apply([tf.constant(gradient)], [variable])
        np.testing.assert_allclose(float(variable), -wanted, rtol=1e-6)


def embeddings() -> None:
    """A density of at least the share of touched rows leaves nothing behind."""
    rows, found = 200, []
    for schemes in ({"*": cx.Scheme()}, {"*table*": cx.Scheme("allgather", "exact", 0.05)}):
        table = keras.Variable(np.ones((rows, 8), "float32"), name="table")
        optimizer = cx.DistributedOptimizer(keras.optimizers.SGD(1.0), schemes)
        before = sum(cx.collectives.current().traffic())
        for step in range(3):
            with tf.GradientTape() as tape:
                touched = tf.gather(
                    table.value, [(cx.rank() * 50 + step * 7 + i) for i in range(8)]
                )
                loss = tf.reduce_sum(touched**2)
            optimizer.apply(tape.gradient(loss, [table.value]), [table])
        found.append((table.numpy(), sum(cx.collectives.current().traffic()) - before))
    (dense, dense_bytes), (sparse, sparse_bytes) = found
    np.testing.assert_allclose(sparse, dense, rtol=1e-6)
    assert sparse_bytes < 0.2 * dense_bytes, found


def numbers_in_horovods_keras_modules() -> None:
    """`horovod.tensorflow` takes tensors; the modules for Keras make them."""
    import horovod.keras
    import horovod.tensorflow.keras

    for module in (horovod.keras, horovod.tensorflow.keras):
        assert float(module.allreduce(1.0 + cx.rank())) == (cx.size() + 1) / 2
        assert module.allreduce([0.0]).numpy().tolist() == [0.0]
        assert int(module.broadcast(cx.rank(), 1, name="epoch")) == 1
        assert module.allgather(np.ones(1)).numpy().tolist() == [1.0] * cx.size()
    raises(AttributeError, lambda: hvd.allreduce(1.0))


def batches_with_a_list_of_callbacks() -> None:
    model = net()
    model.compile(cx.DistributedOptimizer(keras.optimizers.SGD(0.1)), loss="mse", jit_compile=False)
    model.set_weights([weight + cx.rank() for weight in model.get_weights()])
    driven = keras.callbacks.CallbackList([cx.callbacks.BroadcastState()], model=model)
    driven.on_train_begin()
    for epoch in range(2):
        driven.on_epoch_begin(epoch)
        model.train_on_batch(*data())
        driven.on_epoch_end(epoch, {"loss": float(cx.rank())})
    driven.on_train_end()
    assert equal_weights(model)


def the_average_is_clipped() -> None:
    """As behind Horovod's tape; a loop that clips this rank's gradients ends elsewhere."""
    gradient = np.array([3.0 * cx.rank(), 4.0], "float32")
    mean = hvd.allreduce(tf.constant(gradient))
    variable = keras.Variable(np.zeros(2, "float32"))
    optimizer = cx.DistributedOptimizer(keras.optimizers.SGD(1.0, global_clipnorm=1.0))
    optimizer.build([variable])
    optimizer.apply([tf.constant(gradient)], [variable])
    np.testing.assert_allclose(variable.numpy(), -mean / tf.norm(mean), rtol=1e-6)
    each = hvd.allreduce(tf.clip_by_norm(tf.constant(gradient), 1.0)).numpy()
    assert np.abs(variable.numpy() + each).max() > 0.01


def local_variables() -> None:
    """A plain optimizer steps beside a wrapped one, without a warning in the block."""
    shared, own = keras.Variable(np.ones(3, "float32")), keras.Variable(np.ones(2, "float32"))
    wrapped, plain = cx.DistributedOptimizer(keras.optimizers.SGD(0.1)), keras.optimizers.SGD(0.1)
    for _ in range(3):
        wrapped.apply([tf.fill([3], float(cx.rank()))], [shared])
        with cx.allow_plain_optimizers():
            plain.apply([tf.fill([2], float(cx.rank()))], [own])
    everyone = hvd.allgather_object((shared.numpy().tolist(), own.numpy().tolist()))
    assert everyone[0][0] == everyone[-1][0] and everyone[0][1] != everyone[-1][1]


def an_allreduce_is_a_barrier() -> None:
    model = net()
    optimizer = cx.DistributedOptimizer(keras.optimizers.SGD(0.1))
    optimizer.build(model.trainable_variables)
    for step in range(2):
        gradients = [tf.ones(one.shape) * (cx.rank() + 1) for one in model.trainable_variables]
        path = Path(f"joined{step}.weights.h5")
        optimizer.apply(gradients, model.trainable_variables)
        if cx.rank() == 0:
            model.save_weights(path)
        hvd.allreduce(tf.constant([0.0]))
        model.load_weights(path)
        assert equal_weights(model), step


def join_is_a_barrier() -> None:
    """Horovod's let the others train on, and this rank's weights stay behind, without an error."""
    optimizer = cx.DistributedOptimizer(keras.optimizers.SGD(0.1))
    for step in range(2):  # With TensorFlow 2.21 only the first call of Horovod's waited
        path = Path(f"joined{step}")
        if cx.rank() == 0:
            time.sleep(0.5)
            path.touch()
        assert hvd.join() == cx.size() - 1 and path.exists()
    assert optimizer.iterations == 0


CLAIMS = (
    start_and_size,
    collectives,
    objects,
    process_sets,
    tape,
    arguments,
    horovods_optimizer_exchanges_nothing,
    horovods_callbacks,
    horovods_other_parts,
    load_and_wrap,
    accumulation,
    embeddings,
    numbers_in_horovods_keras_modules,
    batches_with_a_list_of_callbacks,
    the_average_is_clipped,
    local_variables,
    an_allreduce_is_a_barrier,
    join_is_a_barrier,
)

if __name__ == "__main__":
    cx.init()
    os.chdir(sys.argv[1])
    for claim in CLAIMS:
        try:
            claim()
        except BaseException:
            print(
                f"{claim.__name__} failed on rank {cx.rank()}:\n{traceback.format_exc()}",
                flush=True,
            )
            os._exit(1)
        print(f"{claim.__name__} ok", flush=True)

"""Uses of Keras for which Horovod's wrapper or Keras itself raises a misleading error."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from rank_helpers import batch, compiled, fit, same_on_all_ranks, take_step

import tfcommx as cx
from tfcommx.collectives.comm import Comm


def test_variables_of_tensorflow_in_a_loop(comm: Comm) -> None:
    """Two of one name beside one of Keras, as in a script that moved here from tf.keras."""
    last = comm.topology.size - 1
    two = [tf.Variable(tf.fill([3, 4], float(comm.rank)), name="scale") for _ in range(2)]
    variables = [*two, keras.Variable(np.zeros(2, np.float32), name="shift")]
    cx.broadcast_variables(variables, root=last)
    optimizer = cx.DistributedOptimizer(keras.optimizers.SGD(1.0, momentum=0.9), op="sum")

    @tf.function
    def step() -> None:
        optimizer.apply([tf.ones(one.shape) for one in variables], variables)

    for _ in range(2):
        step()
    for variable, start in zip(variables, (last, last, 0), strict=True):
        np.testing.assert_allclose(variable.numpy(), start - 2.9 * comm.topology.size, rtol=1e-6)
    names = next(iter(optimizer.exchanger.runs))
    assert sorted(names) == ["scale", "scale#2", "shift"]


def test_gradients_that_are_clipped_outside_of_a_step_are_only_clipped(comm: Comm) -> None:
    """Keras's own tests call it, and so may a custom training step."""
    optimizer = cx.DistributedOptimizer(keras.optimizers.SGD(0.1, clipvalue=2.0))
    sent = comm.traffic()
    (clipped,) = optimizer._clip_gradients([tf.constant([5.0, -1.0 * comm.rank])])
    np.testing.assert_array_equal(clipped, [2.0, max(-1.0 * comm.rank, -2.0)])
    assert comm.traffic() == sent


class Overwritten(keras.Variable):
    overwrite_with_gradient = True


def test_variables_that_gradients_overwrite_train_on_one_rank_alone(comm: Comm) -> None:
    """All of an optimizer's variables are float8's scales: nothing is left to exchange."""
    scale = Overwritten(np.ones(2, np.float32), name="scale")
    optimizer = cx.DistributedOptimizer(keras.optimizers.SGD(0.1))
    if comm.topology.size > 1:
        with pytest.raises(cx.ConfigurationError, match="float8"):
            optimizer.apply([tf.zeros(2)], [scale])
        return
    optimizer.apply([tf.fill([2], 3.0)], [scale])
    np.testing.assert_array_equal(scale.numpy(), [3.0, 3.0])


class Extra(keras.optimizers.SGD):
    """Its constructor takes less than Keras's config has."""

    def __init__(self) -> None:
        super().__init__(0.5)
        self.born = "here"

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), "born": self.born}


class Needy(keras.optimizers.SGD):
    def __init__(self, needed: int, learning_rate: float = 0.1) -> None:
        super().__init__(learning_rate)

    def get_config(self) -> dict[str, Any]:
        return {"learning_rate": 0.1}


@pytest.mark.one_rank
def test_a_config_that_is_not_the_constructors_is_named(comm: Comm) -> None:
    changed = Extra()
    changed.born = "elsewhere"  # A copy would not know.
    with pytest.raises(cx.ConfigurationError, match=r"'extra'.*'born'"):
        cx.DistributedOptimizer(changed)
    with pytest.raises(cx.ConfigurationError, match=r"'needy'.*'needed'.*'needed'"):
        cx.DistributedOptimizer(Needy(3))


@pytest.mark.one_rank
def test_a_constructor_that_takes_less_than_the_config_has_will_do_if_the_copy_is_equal(
    comm: Comm,
) -> None:
    optimizer = cx.DistributedOptimizer(Extra())
    assert optimizer.exchanger is not None and isinstance(optimizer, Extra)
    assert float(optimizer.learning_rate) == 0.5 and optimizer.born == "here"


@pytest.mark.one_rank
def test_horovods_elastic_state_is_refused_in_words(comm: Comm) -> None:
    import horovod.tensorflow.keras as hvd

    for mixed in (False, True):
        optimizer: Any = keras.optimizers.SGD(0.1)
        if mixed:
            optimizer = keras.optimizers.LossScaleOptimizer(optimizer)
        net = compiled(cx.DistributedOptimizer(optimizer))
        with pytest.raises(cx.ConfigurationError, match="KerasState"):
            hvd.elastic.KerasState(net, batch=0)


@pytest.mark.one_rank
def test_a_function_among_custom_objects_is_keras_3s_error_and_the_remedy_works(
    comm: Comm, tmp_path: Path
) -> None:
    """Horovod's way of loading; docs/how-to/move-from-horovod.md has the line that replaces it."""
    net = compiled(cx.DistributedOptimizer(keras.optimizers.SGD(0.1)))
    take_step(net, comm)
    path = tmp_path / "model.keras"
    net.save(path)
    wraps = {"SGD": lambda **config: cx.DistributedOptimizer(keras.optimizers.SGD(**config))}
    with pytest.raises(ValueError, match="optimizer identifier"):
        keras.models.load_model(path, custom_objects=wraps)
    loaded = keras.models.load_model(path)
    loaded.compile(cx.DistributedOptimizer(loaded.optimizer), loss=loaded.loss, jit_compile=False)
    fit(loaded, comm, epochs=1)
    x, y = batch(comm.rank, rows=8)
    assert np.isfinite(loaded.evaluate(x, y, verbose=0))
    assert int(loaded.optimizer.iterations) == 5 and same_on_all_ranks(comm, loaded)


def test_a_loss_over_gathered_features(comm: Comm) -> None:
    """Horovod averages the gradient behind an all-gather; docs/how-to/move-from-horovod.md."""
    import horovod.tensorflow as hvd

    x = np.random.default_rng(3).normal(size=(comm.topology.size, 4, 6))

    def gradient(inputs: np.ndarray, gather: Any, first: int) -> tf.Tensor:
        with tf.GradientTape() as tape:
            features = tf.matmul(inputs, table)
            logits = tf.matmul(features, gather(features**2), transpose_b=True)
            labels = first + np.arange(len(inputs))
            losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits)
            loss = tf.reduce_mean(losses)
        return tape.gradient(loss, table)

    def gather(features: tf.Tensor) -> tf.Tensor:
        gathered = hvd.allgather(features)
        fixed = tf.stop_gradient(gathered)
        return fixed + cx.size() * (gathered - fixed)

    table = tf.Variable(np.eye(6, 3))
    expected = table.numpy() - gradient(x.reshape(-1, 6), tf.identity, 0).numpy()
    optimizer = cx.DistributedOptimizer(keras.optimizers.SGD(1.0), cx.Scheme())
    optimizer.apply([gradient(x[comm.rank], gather, 4 * comm.rank)], [table])
    np.testing.assert_allclose(table.numpy(), expected, rtol=1e-6, atol=1e-7)

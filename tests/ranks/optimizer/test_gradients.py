"""Kinds of gradients: averages and sums, embeddings, none, and two optimizers in one step."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf
from drawing import case
from rank_helpers import (
    SPARSE,
    batch,
    gradients_of,
    model,
    same_on_all_ranks,
    weights,
)

import tfcommx as cx
from tfcommx.collectives.comm import Comm


@pytest.mark.parametrize("operation", ["average", "sum"])
def test_operation(comm: Comm, operation: str) -> None:
    variable = keras.Variable(np.zeros(3, "float32"), name="w")
    optimizer = cx.DistributedOptimizer(keras.optimizers.SGD(1.0), op=operation)
    optimizer.apply([tf.fill([3], float(comm.rank + 1))], [variable])
    total = comm.topology.size * (comm.topology.size + 1) / 2
    np.testing.assert_allclose(
        variable.numpy(), -(total / comm.topology.size if operation == "average" else total)
    )


def test_gradients_of_whole_numbers_have_a_fractional_average(comm: Comm) -> None:
    """It was rounded to whole numbers, as their dtype was kept; Keras alone casts them."""
    variable = keras.Variable(np.zeros(3, "float32"), name="w")
    optimizer = cx.DistributedOptimizer(keras.optimizers.SGD(1.0), cx.Scheme())
    optimizer.apply([tf.fill([3], comm.rank)], [variable])
    np.testing.assert_allclose(variable.numpy(), -(comm.topology.size - 1) / 2)


@pytest.mark.parametrize("has_shape", [True, False])
def test_embeddings_and_variables_without_gradients(comm: Comm, has_shape: bool) -> None:
    """Rows without the shape of their table, as of a custom gradient, failed in the conversion."""
    table = keras.Variable(np.zeros((5, 2), "float32"), name="table")
    unused = keras.Variable(np.ones(2, "float32"), name="unused")
    optimizer = cx.DistributedOptimizer(keras.optimizers.SGD(1.0))

    @tf.function
    def step() -> None:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.gather(table.value, tf.constant([comm.rank % 5, 4])))
        grads = tape.gradient(loss, [table.value, unused.value])
        assert isinstance(grads[0], tf.IndexedSlices) and grads[1] is None
        if not has_shape:
            grads[0] = tf.IndexedSlices(grads[0].values, grads[0].indices)
        optimizer.apply_gradients(zip(grads, [table, unused], strict=True))

    step()
    expected = np.zeros((5, 2), "float32")
    for rank in range(comm.topology.size):
        expected[rank % 5] -= 1 / comm.topology.size
        expected[4] -= 1 / comm.topology.size
    np.testing.assert_allclose(table.numpy(), expected)
    np.testing.assert_array_equal(unused.numpy(), 1)


@pytest.mark.parametrize("strategy", ["synchronous", "sharded"])
def test_variables_in_another_order_keep_their_plan(comm: Comm, strategy: str) -> None:
    results = []
    for second_step in (slice(None), slice(None, None, -1)):
        variables = [keras.Variable(np.ones((4, 4 + i), "float32"), name="ab"[i]) for i in (0, 1)]
        grads = [tf.random.stateless_normal(each.shape, [comm.rank, 0]) for each in variables]
        optimizer = cx.DistributedOptimizer(keras.optimizers.Adam(0.1), SPARSE, strategy=strategy)
        optimizer.build(variables)
        for order in (slice(None), second_step):
            optimizer.apply(grads[order], variables[order])
        assert len(optimizer.exchanger.plans()) == 1
        results.append(np.concatenate([each.numpy().ravel() for each in variables]))
    np.testing.assert_array_equal(*results)


@pytest.mark.parametrize("strategy", ["synchronous", "sharded"])
def test_tensorflows_variable_stands_for_the_one_of_keras(comm: Comm, strategy: str) -> None:
    """As `tape.watched_variables()` returns it, after a `build` for the variables of the model."""
    variables = [keras.Variable(np.ones((4, 4), "float32"), name=name) for name in "ab"]
    optimizer = cx.DistributedOptimizer(keras.optimizers.SGD(1.0), SPARSE, strategy=strategy)
    optimizer.build(variables)
    optimizer.apply([tf.ones((4, 4))] * 2, [variable.value for variable in variables])
    optimizer.apply([tf.ones((4, 4))] * 2, variables)
    (plan,) = optimizer.exchanger.plans()
    assert plan.paths == {"a", "b"}


def test_two_gradients_of_one_variable_are_refused(comm: Comm) -> None:
    shared, other = (keras.Variable(np.ones(2, "float32"), name=name) for name in ("s", "o"))
    optimizer = cx.DistributedOptimizer(keras.optimizers.SGD(1.0))
    optimizer.apply([tf.ones(2), tf.ones(2)], [shared, other])
    with pytest.raises(cx.ConfigurationError, match="2 for 's'"):
        optimizer.apply([tf.ones(2)] * 3, [shared, other, shared])
    np.testing.assert_array_equal(shared, 0)


@pytest.mark.parametrize("scaled", [case(False, kept=False), True])
def test_two_optimizers_in_one_step(comm: Comm, scaled: bool) -> None:
    """As in a GAN: two plans with the same names of buckets and variables in one traced step."""
    nets = [model(seed=2), model(seed=3)]
    plain = [keras.optimizers.SGD(0.1) for _ in nets]
    wrapped = [
        cx.DistributedOptimizer(
            keras.optimizers.LossScaleOptimizer(one, initial_scale=2.0) if scaled else one, SPARSE
        )
        for one in plain
    ]
    for optimizer, net in zip(wrapped, nets, strict=True):
        optimizer.build(net.trainable_variables)

    @tf.function
    def step(first: list[tf.Tensor], second: list[tf.Tensor]) -> None:
        for optimizer, net, grads in zip(wrapped, nets, (first, second), strict=True):
            optimizer.apply(grads, net.trainable_variables)

    before = [weights(net) for net in nets]
    for number in range(3):
        step(*([2 * grad for grad in gradients_of(net, batch(comm.rank, number))] for net in nets))
    for net, old in zip(nets, before, strict=True):
        assert same_on_all_ranks(comm, net)
        assert all((one != other).any() for one, other in zip(old, weights(net), strict=True))

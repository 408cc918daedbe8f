"""The parallel operator in real processes: eagerly, traced, in `fit`; and an op that fails."""

from __future__ import annotations

import logging
import re
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from drawing import case
from rank_helpers import batch, compiled, fit, gradients_of, model, weights

import tfcommx as cx
from tfcommx.collectives.comm import Comm
from tfcommx.kernels.lars import squared_norms


def tensors() -> list[tf.Tensor]:
    random = np.random.default_rng(2)
    shapes = ((400, 30), (3,), (), (7000,), (5, 5, 5), (2,))
    return [tf.constant(random.normal(size=shape).astype("f")) for shape in shapes]


def norms(items: list[tf.Tensor]) -> list[tf.Tensor]:
    return tf.unstack(squared_norms(items))


def roots(items: list[tf.Tensor]) -> list[tf.Tensor]:
    return [tf.sqrt(tf.abs(item)) for item in items]


@pytest.mark.parametrize(
    ("mode", "group"),
    [
        case(mode, group, kept=(mode, group) in (("parallel", "node"), ("local", "world")))
        for mode in ("auto", "parallel", "local")
        for group in ("world", "node")
    ],
)
def test_every_mode_gives_the_same_bits(comm: Comm, mode: str, group: str) -> None:
    """Twice in one step, under a condition, on results of whole tensors, and on one long one."""

    @tf.function
    def step(*items: tf.Tensor) -> list[Any]:
        first = cx.parallel_operator(norms, list(items), mode, group)
        whole = cx.parallel_operator(roots, list(items), mode, group)
        rows = tf.cond(
            tf.size(items[0]) > 0,
            lambda: cx.parallel_operator(roots, items[3], mode, group),
            lambda: items[3],
        )
        return [*first, *whole, rows]

    items = tensors()
    right = [one.numpy().tobytes() for one in [*norms(items), *roots(items), *roots([items[3]])]]
    eagerly = [
        *cx.parallel_operator(norms, items, mode, group),
        *cx.parallel_operator(roots, items, mode, group),
        cx.parallel_operator(roots, items[3], mode, group),
    ]
    for found in (step(*items), step(*items), eagerly):
        assert [one.numpy().tobytes() for one in found] == right


@pytest.mark.parametrize("traced", [case(False, kept=False), True])
def test_an_error_on_one_rank_ends_all_with_it(comm: Comm, traced: bool) -> None:
    last = comm.topology.size - 1

    def checked(items: list[tf.Tensor]) -> list[tf.Tensor]:
        if comm.rank == last:
            items = [item / 0.0 for item in items]
        return [tf.debugging.check_numerics(item, "not finite here") for item in items]

    def step() -> list[tf.Tensor]:
        return cx.parallel_operator(checked, tensors()[:2], "parallel")

    if comm.topology.size > 1:
        with pytest.raises(tf.errors.InvalidArgumentError, match=rf"rank {last}\b.*not finite"):
            tf.function(step)() if traced else step()
    assert comm.gather_objects(comm.rank) == list(range(comm.topology.size))


@pytest.mark.extended
@pytest.mark.parametrize(
    ("mode", "kind"),
    [
        case(mode, kind, kept=(mode, kind) == ("parallel", cx.optimizers.LARS))
        for mode in ("parallel", "auto")
        for kind in (cx.optimizers.LARS, cx.optimizers.LAMB)
    ],
)
def test_norms_may_be_shared(comm: Comm, kind: type, mode: str) -> None:
    """With the same bits as local ones in a custom step; in `fit`, too, replicas stay equal."""
    found = []
    for norms_of in ("local", mode):
        optimizer = cx.DistributedOptimizer(kind(0.05, weight_decay=0.01, norms=norms_of))
        net = compiled(optimizer)
        optimizer.build(net.trainable_variables)  # Or the first step would be traced twice
        step = tf.function(
            lambda *grads, own=optimizer, of=net: own.apply(list(grads), of.trainable_variables)
        )
        for number in range(2):
            step(*gradients_of(net, batch(comm.rank, number)))
        found.append([one.tobytes() for one in weights(net)])
    assert found[0] == found[1]
    assert fit(net, comm, epochs=1).identical


def test_auto_times_what_is_computed_and_not_what_is_known(comm: Comm, caplog: Any) -> None:
    """TensorFlow folds operations on constants, so they take no time in a step."""

    def singular_values(items: list[tf.Tensor]) -> list[tf.Tensor]:
        return [tf.reduce_sum(tf.linalg.svd(item, compute_uv=False)) for item in items]

    @tf.function
    def step(*items: tf.Tensor) -> list[tf.Tensor]:
        return cx.parallel_operator(singular_values, list(items), "auto")

    with caplog.at_level(logging.INFO, "tfcommx"):
        step(*[tf.random.stateless_normal([150, 150], [1, place]) for place in range(8)])
    said = re.search(r"all locally (\d+\.\d+) ms", caplog.text)
    if comm.rank == 0 and comm.topology.size > 1:
        assert float(said[1]) > 3, caplog.text


def test_one_rank_alone_may_trace_again(comm: Comm) -> None:
    """As for a last batch that is shorter there: its all-gather keeps its name."""

    @tf.function
    def step(inputs: tf.Tensor, *items: tf.Tensor) -> list[tf.Tensor]:
        return cx.parallel_operator(norms, [*items[:-1], items[-1] + inputs[0]], "parallel")

    right = [one.numpy() for one in norms(tensors())]
    for rows in (4, 4 - (comm.rank == 0), 4):
        for mine, expected in zip(step(tf.zeros([rows]), *tensors()), right, strict=True):
            np.testing.assert_array_equal(mine, expected)


@pytest.mark.extended
def test_norms_are_local_where_one_rank_alone_updates(comm: Comm) -> None:
    optimizer = cx.optimizers.LARS(0.05, norms="parallel")
    assert fit(compiled(cx.DistributedOptimizer(optimizer, strategy="root")), comm, 1).identical
    plain, net = cx.optimizers.LARS(0.05, norms="parallel"), model()
    plain.apply(gradients_of(net, batch(comm.rank)), net.trainable_variables)
    assert isinstance(plain, keras.optimizers.Optimizer)

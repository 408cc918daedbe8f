"""The wrapped optimizer trains as the plain one does, and replicas stay identical."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from drawing import case
from rank_helpers import (
    OPTIMIZERS,
    batch,
    compiled,
    fit,
    gradients_of,
    model,
    weights,
)

import tfcommx as cx
from tfcommx import routes
from tfcommx.collectives.comm import Comm


@pytest.mark.parametrize(
    "kind", [case(kind, kept=kind in ("sgd", "lamb", "clipped_sgd")) for kind in OPTIMIZERS]
)
def test_the_identity_equals_allreduce_by_hand(comm: Comm, kind: str) -> None:
    """The same bits, on two ranks, as hvd.allreduce of each gradient and a plain optimizer."""
    import horovod.tensorflow as hvd

    ours, by_hand = model(), model()
    wrapped, plain = cx.DistributedOptimizer(OPTIMIZERS[kind]()), OPTIMIZERS[kind]()
    for step in range(4):
        wrapped.apply_gradients(
            zip(gradients_of(ours, batch(comm.rank, step)), ours.trainable_variables, strict=True)
        )
        reduced = [
            hvd.allreduce(grad, op=hvd.Average)
            for grad in gradients_of(by_hand, batch(comm.rank, step))
        ]
        plain.apply_gradients(zip(reduced, by_hand.trainable_variables, strict=True))
    for mine, theirs in zip(weights(ours), weights(by_hand), strict=True):
        if comm.topology.size <= 2:
            assert mine.tobytes() == theirs.tobytes()
        else:
            np.testing.assert_allclose(mine, theirs, rtol=2e-5, atol=2e-6)


def of_launches(route: str, wire: str) -> Any:
    """Return the parameters: messages run in each launch, one dense and one sparse route on two.

    test_routes.py has the sums of all routes and wire formats.
    """
    if wire == "plain" and routes.get(route).messages:
        return pytest.param(route, wire, marks=pytest.mark.every_launch)
    return case(route, wire, kept=wire == "plain" and route in ("allreduce", "hitopk"))


@pytest.mark.parametrize(
    ("route", "wire"),
    [of_launches(route, "plain") for route in routes.ROUTES]
    + [
        of_launches(route, wire)
        for route, wire in (
            ("allreduce", "float16"),
            ("torus", "bfloat16"),
            ("asa", "float16"),
            ("asa", "int4"),
            ("torus", "int8"),
        )
    ],
)
def test_fit_trains_and_replicas_stay_identical(comm: Comm, route: str, wire: str) -> None:
    scheme = (
        cx.Scheme(route, "mstopk", 0.2, dense_below=8)
        if route in routes.SPARSE
        else cx.Scheme(route, wire=wire)
    )
    if routes.get(route).messages and not comm.messages.possible:
        with pytest.raises(cx.PlanError, match="horovodrun --mpi"):
            cx.DistributedOptimizer(keras.optimizers.SGD(0.05), scheme)
        return
    net = compiled(
        cx.DistributedOptimizer(keras.optimizers.SGD(0.05, momentum=0.9), scheme), seed=comm.rank
    )
    assert fit(net, comm).identical
    history = net.history.history["loss"]
    assert history[-1] < history[0]
    assert comm.gather_objects(history) == [history] * comm.topology.size
    # AverageBatchNorm has averaged them
    statistics = [
        variable.numpy().tobytes()
        for variable in net.non_trainable_variables
        if variable.dtype == "float32"
    ]
    assert statistics and comm.gather_objects(statistics) == [statistics] * comm.topology.size


@pytest.mark.exhaustive
@pytest.mark.parametrize("wire", [case("int8", kept=False), "int4"])
def test_codes_of_8_and_4_bits_train_as_plain_sums(comm: Comm, wire: str) -> None:
    losses = []
    for scheme in (cx.Scheme(), cx.Scheme("asa", wire=wire)):
        net = compiled(cx.DistributedOptimizer(keras.optimizers.SGD(0.05, momentum=0.9), scheme))
        fit(net, comm)
        losses.append(net.history.history["loss"])
    plain, coded = losses
    np.testing.assert_allclose(coded, plain, rtol=0.02)
    # Codes have been used
    assert (coded != plain) == (comm.topology.size > 1)


@pytest.mark.parametrize(
    ("scheme", "strategy"),
    [
        (cx.Scheme("allgather", "mstopk", 0.2, dense_below=8), "synchronous"),
        case(cx.Scheme(), cx.strategies.WeightAveraging(every=2, sends="updates"), kept=False),
        case(cx.Scheme(), "root", kept=False),
    ],
    ids=["sparse", "averages", "root"],
)
def test_a_step_is_traced_once(comm: Comm, scheme: cx.Scheme, strategy: Any) -> None:
    """State of the exchange is made outside the trace, so no second trace is needed for it."""
    traces = []

    def loss(truth: tf.Tensor, out: tf.Tensor) -> tf.Tensor:
        if not tf.executing_eagerly():  # As BroadcastState compares outputs
            traces.append(out)
        return tf.reduce_mean(out)

    net = model()
    wrapped = cx.DistributedOptimizer(OPTIMIZERS["sgd"](), scheme, strategy=strategy)
    net.compile(wrapped, loss=loss, jit_compile=False)
    fit(net, comm, epochs=1)
    assert len(traces) == 1


@pytest.mark.exhaustive  # test_exact_checkpoints.py has the same error
def test_replicas_that_drift_are_reported(comm: Comm) -> None:
    """The check can fail: a plain optimizer reduces nothing."""
    if comm.topology.size == 1:
        pytest.skip("takes several ranks")
    net = compiled(cx.DistributedOptimizer(keras.optimizers.SGD(0.1)))

    class Drift(keras.callbacks.Callback):
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            net.trainable_variables[0].assign_add(
                tf.ones_like(net.trainable_variables[0]) * comm.rank
            )

    with pytest.raises(cx.TfcommxError, match=r"ranks \[1"):
        fit(net, comm, extra=(Drift(),))

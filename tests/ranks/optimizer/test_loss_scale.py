"""Non-finite gradients under a LossScaleOptimizer: all ranks decide alike."""

from __future__ import annotations

import keras
import numpy as np
import pytest
from drawing import triples
from rank_helpers import (
    SPARSE,
    batch,
    compiled,
    gradients_of,
    model,
    same_on_all_ranks,
    weights,
)

import tfcommx as cx
from tfcommx import callbacks
from tfcommx.collectives.comm import Comm
from tfcommx.optim.wrapped import exchanger_of


@pytest.mark.parametrize(
    ("strategy", "made_by", "bad_rank"),
    triples(["synchronous", "step_ahead"], ["user", "compile"], [0, -1]),
)
def test_a_non_finite_gradient_skips_the_step_on_all_ranks(
    comm: Comm, strategy: str, made_by: str, bad_rank: int
) -> None:
    """With a LossScaleOptimizer no rank steps, the scale halves on all, residuals stay."""
    inner = keras.optimizers.SGD(0.05)
    given = (
        keras.optimizers.LossScaleOptimizer(inner, initial_scale=2.0)
        if made_by == "user"
        else inner
    )
    optimizer = cx.DistributedOptimizer(given, SPARSE, strategy=strategy)
    keras.config.set_dtype_policy("mixed_float16")
    try:
        net = compiled(optimizer)
    finally:
        keras.config.set_dtype_policy("float32")
    x, y = batch(comm.rank, rows=8)

    def run(x: np.ndarray) -> None:
        net.fit(x, y, batch_size=8, verbose=0, callbacks=[callbacks.BroadcastState()])

    run(x)
    exchanger = exchanger_of(net)
    before, scale, residuals = (
        weights(net),
        float(net.optimizer.dynamic_scale.numpy()),
        exchanger.export().residuals,
    )
    steps = max(exchanger.export().steps.values())
    run(np.full_like(x, np.nan) if comm.rank == bad_rank % comm.topology.size else x)
    for old, new in zip(before, weights(net), strict=True):
        np.testing.assert_array_equal(old, new)
    assert net.optimizer.dynamic_scale.numpy() == scale / 2
    assert max(exchanger.export().steps.values()) == steps
    for path, part in exchanger.export().residuals.items():
        np.testing.assert_array_equal(part, residuals[path])
    run(x)
    assert same_on_all_ranks(comm, net) and max(exchanger.export().steps.values()) == steps + 1


def test_a_loss_scale_that_nobody_agreed_on_is_refused(comm: Comm) -> None:
    """Also one around an optimizer that had an agreed one, as a second `compile` makes it."""
    if comm.topology.size == 1:
        pytest.skip("takes several ranks")
    net, plain = model(), keras.optimizers.SGD(0.1)
    agreed = cx.DistributedOptimizer(keras.optimizers.LossScaleOptimizer(plain))
    for wrapped in (cx.DistributedOptimizer(plain), agreed.inner_optimizer):
        optimizer = keras.optimizers.LossScaleOptimizer(wrapped)
        with pytest.raises(cx.ConfigurationError, match="LossScaleOptimizer"):
            optimizer.apply(gradients_of(net, batch(comm.rank)), net.trainable_variables)

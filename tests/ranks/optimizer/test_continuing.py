"""Training continues from saved models and from checkpoints."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import keras
import numpy as np
import pytest
from drawing import case
from rank_helpers import (
    SPARSE,
    SaveTheEpoch,
    compiled,
    fit,
    not_zero,
    take_step,
    weights,
)

import tfcommx as cx
from tfcommx import checkpoint
from tfcommx.collectives.comm import Comm
from tfcommx.core import NARROW
from tfcommx.optim.wrapped import exchanger_of


@pytest.mark.one_rank
def test_a_saved_model_holds_the_plain_optimizer(comm: Comm, tmp_path: Path) -> None:
    net = compiled(cx.DistributedOptimizer(keras.optimizers.Adam(0.01), SPARSE))
    take_step(net, comm)
    net.save(tmp_path / "model.keras")
    plain = keras.models.load_model(tmp_path / "model.keras")
    assert type(plain.optimizer) is keras.optimizers.Adam
    again = cx.DistributedOptimizer(plain.optimizer, SPARSE)
    for saved, loaded in zip(net.optimizer.variables, again.variables, strict=True):
        np.testing.assert_array_equal(saved.numpy(), loaded.numpy())
    plain.compile(again, loss=net.loss, jit_compile=False)
    assert fit(plain, comm, epochs=1).identical


@pytest.mark.parametrize(
    ("scheme", "momentum"),
    [
        case(SPARSE, 0.0, kept=False),
        (dataclasses.replace(SPARSE, momentum=0.9, clip_norm=5.0), 0.9),
        case(cx.Scheme("torus", wire="float16"), 0.0, kept=False),
        case(cx.Scheme("asa", wire="int4"), 0.0, kept=False),
    ],
    ids=["residuals", "velocities", "rounding errors", "errors of codes"],
)
def test_training_continues_exactly_from_a_checkpoint(
    comm: Comm, tmp_path: Path, scheme: cx.Scheme, momentum: float
) -> None:
    """Saved after one of two epochs, restored, one more: the same weights as without a stop.

    Residuals and velocities are restored too.
    """
    folder = Path(comm.gather_objects(str(tmp_path))[0])

    def optimizer() -> keras.optimizers.Optimizer:
        return cx.DistributedOptimizer(keras.optimizers.SGD(0.05, momentum=0.9 - momentum), scheme)

    straight = compiled(optimizer())
    fit(straight, comm, epochs=2, extra=(SaveTheEpoch(folder),))
    assert (
        len(list(folder.glob("residuals-*"))) == comm.topology.size
        and len(list(folder.glob("tfcommx-*"))) == 1
    )
    second = compiled(optimizer(), seed=9)
    assert checkpoint.restore(second, folder) == 1
    waiting = exchanger_of(second).waiting
    # Without them the weights below would differ; a rank alone rounds nothing
    if scheme.wire not in NARROW or comm.topology.size > 1:
        assert not_zero(waiting.velocities if momentum else waiting.residuals)
    fit(second, comm, epochs=2, initial_epoch=1)
    for one, other in zip(weights(straight), weights(second), strict=True):
        np.testing.assert_array_equal(one, other)

"""LowBitSGD and LowBitLARS, wrapped: `fit`, checkpoints, saved models, refused calls."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
from drawing import case
from rank_helpers import SaveTheEpoch, compiled, fit, not_zero, take_step, weights

import tfcommx as cx
from tfcommx import checkpoint
from tfcommx.collectives.comm import Comm
from tfcommx.optim.wrapped import exchanger_of

KINDS = [cx.optimizers.LowBitSGD, cx.optimizers.LowBitLARS]


def new(kind: type[Any], **options: Any) -> keras.optimizers.Optimizer:
    """Return one for which the kernels of the small network are large enough."""
    return kind(**{"learning_rate": 0.1, "dense_below": 8} | options)


OPTIONS = {
    "two steps a call": ({}, 2),
    "clipped": (
        {"global_clipnorm": 0.1, "weight_decay": 0.01, "use_ema": True, "nesterov": True},
        1,
    ),
    "accumulated": ({"gradient_accumulation_steps": 2}, 1),
    "scaled": ({"loss_scale_factor": 8.0}, 1),
}


# A saved model of LowBitSGD is trained below
@pytest.mark.parametrize(
    ("kind", "options", "steps"),
    [
        pytest.param(
            kind,
            *options,
            marks=() if (kind, name) == (KINDS[1], "two steps a call") else pytest.mark.exhaustive,
            id=f"{kind.__name__}-{name}",
        )
        for kind in KINDS
        for name, options in OPTIONS.items()
    ],
)
def test_fit_keeps_ranks_equal(
    comm: Comm, kind: type[Any], options: dict[str, Any], steps: int
) -> None:
    net = compiled(cx.DistributedOptimizer(new(kind, **options)), steps_per_execution=steps)
    before = weights(net)
    assert fit(net, comm, epochs=2).identical
    assert not any(map(np.array_equal, before, weights(net)))
    buckets = [bucket for plan in exchanger_of(net).plans() for bucket in plan.buckets]
    wires = {path.partition("/")[2]: one.wire for one in buckets for path in one.variables}
    if comm.topology.size > 1:
        assert wires["hidden/kernel"] == wires["out/kernel"] == "int2"
        assert wires["hidden/bias"] == "bfloat16"


# Both inherit their checkpoints from one class; LARS adds a sketch
@pytest.mark.exhaustive  # test_continuing.py and test_gradient_state.py
@pytest.mark.parametrize("kind", [case(KINDS[0], kept=False), KINDS[1]])
def test_it_continues_exactly_from_a_checkpoint(
    comm: Comm, kind: type[Any], tmp_path: Path
) -> None:
    folder = Path(comm.gather_objects(str(tmp_path))[0])
    straight = compiled(cx.DistributedOptimizer(new(kind)))
    fit(straight, comm, epochs=2, extra=(SaveTheEpoch(folder),))
    net = compiled(cx.DistributedOptimizer(new(kind)), seed=9)
    assert checkpoint.restore(net, folder) == 1
    # Without them the weights would differ
    assert not_zero(exchanger_of(net).waiting.residuals) or comm.topology.size == 1
    fit(net, comm, epochs=2, initial_epoch=1)
    assert all(map(np.array_equal, weights(straight), weights(net)))


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", [KINDS[0], case(KINDS[1], kept=False)])
def test_a_saved_model_holds_it_and_continues(comm: Comm, kind: type[Any], tmp_path: Path) -> None:
    net = compiled(cx.DistributedOptimizer(new(kind)))
    take_step(net, comm)
    net.save(tmp_path / "model.keras")
    plain = keras.models.load_model(tmp_path / "model.keras")
    assert type(plain.optimizer) is kind
    plain.compile(cx.DistributedOptimizer(plain.optimizer), loss=net.loss, jit_compile=False)
    assert fit(plain, comm, epochs=1).identical


@pytest.mark.one_rank
@pytest.mark.parametrize(
    ("options", "received"),
    [
        ({"op": "sum"}, "op='sum'"),
        ({"strategy": "sharded"}, "Sharded"),
        ({"scheme": cx.Scheme("auto")}, "route=.auto.,"),
        ({"scheme": cx.Scheme()}, "wire='plain'"),
    ],
)
@pytest.mark.parametrize("kind", KINDS)
def test_what_it_cannot_do_is_refused(
    kind: type[Any], options: dict[str, Any], received: str
) -> None:
    with pytest.raises(cx.PlanError, match=received):
        cx.DistributedOptimizer(new(kind), **options)

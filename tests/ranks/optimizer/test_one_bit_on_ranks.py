"""OneBitAdam and OneBitLAMB, wrapped: `fit` and loops across the change of phase, checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from drawing import case
from rank_helpers import (
    batch,
    compiled,
    fit,
    gradients_of,
    model,
    not_zero,
    same_on_all_ranks,
    take_step,
    weights,
)

import tfcommx as cx
from tfcommx import checkpoint
from tfcommx.collectives.comm import Comm
from tfcommx.optim.wrapped import exchanger_of

ONE_BIT = cx.Scheme("asa", wire="int1")


KINDS = [cx.optimizers.OneBitAdam, cx.optimizers.OneBitLAMB]


def new(kind: type[Any], **options: Any) -> keras.optimizers.Optimizer:
    """Return one for which the kernels of the small network are large enough."""
    return kind(**{"learning_rate": 0.01, "freeze_after": 6, "dense_below": 8} | options)


def adam(**options: Any) -> keras.optimizers.Optimizer:
    """Return OneBitAdam."""
    return new(cx.optimizers.OneBitAdam, **options)


@pytest.mark.exhaustive  # test_ranks_agree_when_it_decides_by_itself changes its phase, too
@pytest.mark.parametrize(
    ("kind", "options", "steps"),
    [
        (KINDS[0], {}, 1),
        (KINDS[0], {"freeze_after": 5}, 2),
        (KINDS[0], {"global_clipnorm": 0.1, "weight_decay": 0.01, "use_ema": True}, 1),
        (KINDS[0], {"gradient_accumulation_steps": 2, "freeze_after": 3}, 1),
        (KINDS[0], {"loss_scale_factor": 8.0}, 1),
        (
            KINDS[1],
            {"global_clipnorm": 0.1, "weight_decay": 0.01, "use_ema": True, "freeze_after": 5},
            2,
        ),
        (KINDS[1], {"norms": "parallel"}, 4),
        (KINDS[1], {"gradient_accumulation_steps": 2, "freeze_after": 3}, 1),
    ],
)
def test_fit_continues_across_the_change_of_phase(
    comm: Comm, kind: type[Any], options: dict[str, Any], steps: int
) -> None:
    """Two epochs of four batches; the kernels' second moments stay from the fifth or sixth on."""
    net = compiled(cx.DistributedOptimizer(new(kind, **options)), steps_per_execution=steps)
    assert fit(net, comm).identical
    optimizer = net.optimizer
    assert int(optimizer.frozen_at.numpy()) == options.get("freeze_after", 6)
    frozen = [one.numpy() for one in optimizer._velocities]
    fit(net, comm, epochs=3, initial_epoch=2)
    check_frozen(comm, net, frozen)


def check_frozen(comm: Comm, net: keras.Model, frozen: list[np.ndarray]) -> None:
    """Require that the kernels' second moments are as before, and that momenta travel in codes."""
    optimizer = net.optimizer
    stays = [
        np.array_equal(before, now.numpy())
        for before, now in zip(frozen, optimizer._velocities, strict=True)
    ]
    assert stays == [optimizer.sends_momentum(one) for one in net.trainable_variables]
    assert sum(stays) == 2
    wires = {bucket.wire for plan in exchanger_of(net).plans() for bucket in plan.buckets}
    assert wires == ({"bfloat16", "int1"} if comm.topology.size > 1 else {"plain"})


@pytest.mark.extended
@pytest.mark.parametrize(
    ("kind", "frozen"),
    [(KINDS[0], False), *(case(kind, True, kept=False) for kind in KINDS)],
)
def test_clipping_where_no_variable_sends_its_momentum(
    comm: Comm, kind: type[Any], frozen: bool
) -> None:
    """The first trace failed: all variables are small, or the large ones are frozen."""
    options = {"dense_below": 8 if frozen else 10**6, "freeze_after": 2}
    net = compiled(cx.DistributedOptimizer(new(kind, global_clipnorm=0.1, **options)))
    if frozen:  # After the change of phase
        assert fit(net, comm, epochs=1).identical
        for name in ("hidden", "out"):
            net.get_layer(name).trainable = False
        net.compile(net.optimizer, loss=net.loss, jit_compile=False)
    before = weights(net)
    assert fit(net, comm, epochs=1).identical
    assert any(map(np.any, map(np.not_equal, before, weights(net))))


@pytest.mark.exhaustive
def test_a_loop_changes_phase_without_a_new_trace(comm: Comm) -> None:
    net, traces = model(), []
    optimizer = cx.DistributedOptimizer(adam(freeze_after=3), ONE_BIT)
    optimizer.build(net.trainable_variables)

    @tf.function
    def step(*grads: tf.Tensor) -> None:
        traces.append(1)
        optimizer.apply(list(grads), net.trainable_variables)

    for number in range(6):
        step(*gradients_of(net, batch(comm.rank, number)))
    assert int(optimizer.frozen_at.numpy()) == 3
    assert len(traces) == 1
    assert same_on_all_ranks(comm, net)


@pytest.mark.extended
def test_ranks_agree_when_it_decides_by_itself(comm: Comm) -> None:
    """At a low rate the second epoch of four batches has the squares of the first."""
    optimizer = adam(learning_rate=1e-5, freeze_after=None, beta_2=0.75)
    net = compiled(cx.DistributedOptimizer(optimizer))
    seconds: list[list[np.ndarray]] = []

    class Watch(keras.callbacks.Callback):
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            seconds.append([one.numpy() for one in net.optimizer._velocities])

    assert fit(net, comm, epochs=3, extra=(Watch(),)).identical
    assert int(net.optimizer.frozen_at.numpy()) == 8
    check_frozen(comm, net, seconds[1])


@pytest.mark.parametrize(
    ("kind", "saved"),
    [
        case(KINDS[0], 3, kept=False),
        case(KINDS[0], 1, kept=False),
        case(KINDS[1], 1, kept=False),
        (KINDS[1], 3),
    ],
)
def test_it_continues_exactly_from_a_checkpoint(
    comm: Comm, kind: type[Any], folder: Path, saved: int
) -> None:
    """The second moments are frozen after two of five steps."""
    straight = compiled(cx.DistributedOptimizer(new(kind, freeze_after=2), ONE_BIT))
    for step in range(5):
        take_step(straight, comm, step)
        if step + 1 == saved:
            checkpoint.save(straight, folder, 0)
    net = compiled(cx.DistributedOptimizer(new(kind, freeze_after=2), ONE_BIT), seed=9)
    assert checkpoint.restore(net, folder) == 1
    # Without them the weights would differ
    assert not_zero(exchanger_of(net).waiting.residuals) or comm.topology.size == 1
    assert (int(net.optimizer.frozen_at.numpy()) > 0) == (saved > 1)
    for step in range(saved, 5):
        take_step(net, comm, step)
    assert all(map(np.array_equal, weights(straight), weights(net)))


@pytest.mark.extended
def test_patterns_name_schemes_of_momenta_and_of_gradients(comm: Comm) -> None:
    """`hidden/kernel` sends its momentum in 1 bit, and in 4 bits from the second epoch on."""
    schemes = {"*out/*": cx.Scheme(), "*": ONE_BIT}
    optimizer = cx.DistributedOptimizer(adam(exclude=["*out/kernel"]), schemes)
    net = compiled(optimizer, run_eagerly=True)  # Or both schemes would be traced
    switch = cx.callbacks.SwitchScheme({1: schemes | {"*": cx.Scheme("asa", wire="int4")}})
    wires: list[dict[str, str]] = []

    class Watch(keras.callbacks.Callback):
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            buckets = [bucket for plan in exchanger_of(net).plans() for bucket in plan.buckets]
            wires.append(
                {path.partition("/")[2]: one.wire for one in buckets for path in one.variables}
            )

    assert fit(net, comm, extra=(switch, Watch())).identical
    if comm.topology.size > 1:
        first, last = wires[0], wires[-1]
        assert (first["hidden/kernel"], last["hidden/kernel"]) == ("int1", "int4")
        assert first["hidden/bias"] == last["hidden/bias"] == "bfloat16"
        assert first["out/kernel"] == first["out/bias"] == "plain"


@pytest.mark.exhaustive
def test_a_loss_scale_optimizer_may_be_around_it(comm: Comm) -> None:
    """A NaN on one rank skips the step on all, also while momenta travel."""
    scaled = keras.optimizers.LossScaleOptimizer(adam(freeze_after=3), initial_scale=2.0)
    net = compiled(cx.DistributedOptimizer(scaled))
    assert fit(net, comm, epochs=1).identical
    assert int(net.optimizer.inner_optimizer.frozen_at.numpy()) == 3
    before, (x, y) = weights(net), batch(comm.rank, rows=8)
    net.fit(
        np.full_like(x, np.nan) if comm.rank == 0 else x,
        y,
        verbose=0,
        callbacks=[cx.callbacks.BroadcastState()],
    )
    for one, other in zip(before, weights(net), strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", [case(KINDS[0], kept=False), KINDS[1]])
def test_a_saved_model_holds_it_and_continues(comm: Comm, kind: type[Any], tmp_path: Path) -> None:
    net = compiled(cx.DistributedOptimizer(new(kind, freeze_after=3), ONE_BIT))
    for number in range(3):
        take_step(net, comm, number)
    net.save(tmp_path / "model.keras")
    plain = keras.models.load_model(tmp_path / "model.keras")
    assert type(plain.optimizer) is kind
    assert int(plain.optimizer.frozen_at.numpy()) == 3
    again = cx.DistributedOptimizer(plain.optimizer, ONE_BIT)
    plain.compile(again, loss=net.loss, jit_compile=False)
    assert fit(plain, comm, epochs=1).identical


@pytest.mark.one_rank
@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"op": "sum"}, 'needs op="average"'),
        ({"strategy": "sharded"}, 'needs strategy="synchronous"'),
        ({"strategy": "weight_averaging"}, 'needs strategy="synchronous"'),
        ({"scheme": cx.Scheme("auto")}, "route=.auto.,"),
        ({"scheme": cx.Scheme("allgather", "mstopk", 0.1)}, "route=.allgather.,"),
        ({"scheme": cx.Scheme()}, "int8, int4, int2, int1"),
    ],
)
@pytest.mark.parametrize("kind", KINDS)
def test_what_it_cannot_do_is_refused(
    comm: Comm, kind: type[Any], options: dict[str, Any], said: str
) -> None:
    with pytest.raises(cx.PlanError, match=said):
        cx.DistributedOptimizer(new(kind), **options)


def test_a_plan_of_its_own_is_refused(comm: Comm) -> None:
    net = compiled(cx.DistributedOptimizer(keras.optimizers.SGD(0.1), ONE_BIT))
    take_step(net, comm)
    (plan,) = exchanger_of(net).plans()
    with pytest.raises(cx.PlanError, match="needs plan=None"):
        cx.DistributedOptimizer(adam(), plan=plan)
    if comm.topology.size > 1:  # A rank alone has nothing to write
        with pytest.raises(cx.PlanError, match=r"wire=.*beta_1"):
            cx.DistributedOptimizer(keras.optimizers.Adam(0.1), plan=plan)


@pytest.mark.one_rank
@pytest.mark.parametrize("wire", ["int1", "int2"])
def test_gradients_in_one_or_two_bits_in_front_of_a_momentum_are_refused(
    comm: Comm, wire: str
) -> None:
    scheme = cx.Scheme("asa", wire=wire)
    for optimizer in (keras.optimizers.SGD(0.1, momentum=0.9), keras.optimizers.Adam(0.1)):
        with pytest.raises(cx.PlanError, match="OneBitAdam"):
            cx.DistributedOptimizer(optimizer, scheme)
        with pytest.raises(cx.PlanError, match="OneBitAdam"):
            cx.DistributedOptimizer(optimizer, cx.Scheme()).exchanger.switch(scheme)
    cx.DistributedOptimizer(keras.optimizers.SGD(0.1), scheme)
    cx.DistributedOptimizer(keras.optimizers.Adam(0.1), cx.Scheme("asa", wire="int4"))

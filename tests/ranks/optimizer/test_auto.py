"""`Scheme("auto")` on real ranks: in `fit` and in a loop, kept, and never in the way."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from rank_helpers import batch, gradients_of, same_on_all_ranks, weights

import tfcommx as cx
from tfcommx import callbacks
from tfcommx.collectives.comm import Comm, TrialQueue
from tfcommx.core import Link, Links
from tfcommx.runtime.executor import PlanExecutor
from tfcommx.runtime.gradient_state import GradientState
from tfcommx.runtime.trial import STEPS, TrialExecutor

# So slow that predictions find several schemes faster than plain Horovod
SLOW = Links(Link(1e-6, 1e-7), Link(1e-6, 1e-7))
LOSS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
LOSSY = cx.Scheme("auto", "mstopk", 0.05)


@pytest.fixture(autouse=True)
def own_cache(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TFCOMMX_CACHE", str(folder / "kept"))
    return folder / "kept"


def wide() -> keras.Model:
    """Return a network that is large enough for a trial; its choice is kept by its names."""
    keras.utils.set_random_seed(1)
    layers = [keras.layers.Dense(192, activation="relu", name=f"hidden{i}") for i in range(3)]
    out = keras.layers.Dense(3, name="out")
    return keras.Sequential([keras.layers.Input((12,)), *layers, out], name="wide")


def batches(comm: Comm) -> tf.data.Dataset:
    """Return this rank's 32 rows in batches, of which Keras does not know how many there are."""
    rows = tf.data.Dataset.from_tensor_slices(batch(comm.rank, rows=32))
    return rows.batch(8, drop_remainder=True).filter(lambda *_: True)


def trained(comm: Comm, epochs: int, **wrap: Any) -> keras.Model:
    """Train on this rank's batches, two of them in each call."""
    net = wide()
    net.compile(
        cx.DistributedOptimizer(keras.optimizers.SGD(0.05, momentum=0.9), **wrap),
        loss=LOSS,
        jit_compile=False,
        steps_per_execution=2,
    )
    same = callbacks.CompareReplicas()
    every = [callbacks.BroadcastState(), same]
    net.fit(batches(comm), epochs=epochs, verbose=0, callbacks=every)
    assert same.identical
    return net


def executor_of(optimizer: keras.optimizers.Optimizer) -> PlanExecutor | TrialExecutor:
    (run,) = optimizer.exchanger.runs.values()
    return run.executor


@pytest.mark.extended
@pytest.mark.every_launch
def test_the_default_trains_as_plain_horovod_does_and_keeps_its_choice(
    comm: Comm, own_cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    epochs = STEPS // 4 + 1
    plain = trained(comm, epochs, scheme=cx.Scheme())
    net = trained(comm, epochs, links=SLOW)
    for mine, theirs in zip(weights(net), weights(plain), strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-4, atol=1e-5)
    running = executor_of(net.optimizer)
    if comm.topology.size == 1:
        assert isinstance(running, PlanExecutor) and not own_cache.exists()
        return
    assert running.rounds.chosen is not None and running.rounds.steps <= STEPS
    assert net.optimizer.exchanger.plans() == [running.plan]
    assert sum(int(one.steps) for one in running.executors) == 4 * epochs
    said = [one for one in caplog.messages if "How gradients travel" in one]
    assert len(said) == (comm.rank == 0)
    (kept,) = own_cache.iterdir()  # the links were given
    assert kept.name.startswith("choice-")
    comm.gather_objects("seen")
    again = trained(comm, 1, links=SLOW)
    assert isinstance(executor_of(again.optimizer), PlanExecutor)
    assert executor_of(again.optimizer).plan == running.plan


@pytest.mark.exhaustive  # test_law_trial.py holds two trials on threads
def test_two_optimizers_of_one_step_hold_their_trials_one_after_the_other(comm: Comm) -> None:
    """As a GAN has them: while the one tries its plans, the other exchanges by plain Horovod."""
    comm.trials = TrialQueue()  # Without the trials of other tests
    nets, optimizers = [wide(), wide()], []
    for net in nets:
        optimizers.append(cx.DistributedOptimizer(keras.optimizers.SGD(0.01), LOSSY, links=SLOW))
        optimizers[-1].build(net.trainable_variables)

    @tf.function
    def step(*gradients: tf.Tensor) -> None:
        for net, optimizer in zip(nets, optimizers, strict=True):
            optimizer.apply_gradients(zip(gradients, net.trainable_variables, strict=True))

    gradients = gradients_of(nets[0], batch(comm.rank))
    for number in range(2 * STEPS + 9):
        step(*gradients)
        first, second = map(executor_of, optimizers)
        if comm.topology.size > 1 and first.rounds.chosen is None:
            assert int(second.executors[0].steps) == number + 1 and second.rounds.steps == 0
    assert all(same_on_all_ranks(comm, net) for net in nets)
    if comm.topology.size > 1:
        assert first.rounds.chosen is not None and second.rounds.chosen is not None


def test_a_trial_that_is_dropped_holds_up_no_other(comm: Comm) -> None:
    """A change of scheme, and a checkpoint, drop one that is under way."""
    if comm.topology.size == 1:
        pytest.skip("takes several ranks")
    comm.trials, net = TrialQueue(), wide()  # Without the trials of other tests
    optimizer = cx.DistributedOptimizer(keras.optimizers.SGD(0.01), links=SLOW)
    optimizer.build(net.trainable_variables)
    gradients, dropped = gradients_of(net, batch(comm.rank)), []
    changes = [lambda: optimizer.exchanger.switch(LOSSY)]
    changes.append(lambda: optimizer.exchanger.load(GradientState(), {}))
    for change in changes:
        optimizer.apply_gradients(zip(gradients, net.trainable_variables, strict=True))
        dropped.append(executor_of(optimizer))  # The garbage collector does not free it
        change()
    for _ in range(3):
        optimizer.apply_gradients(zip(gradients, net.trainable_variables, strict=True))
    assert [trial.rounds.steps for trial in dropped] == [0, 0]
    assert executor_of(optimizer).rounds.steps == 3
    optimizer.exchanger.switch(cx.Scheme())  # Without its trial for other tests


@pytest.mark.exhaustive  # test_law_trial.py loses nothing on threads
@pytest.mark.parametrize("traced", [True, False])
def test_a_lossy_auto_loses_nothing_in_a_loop_with_a_loss_scale(
    comm: Comm, traced: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For any choice, the sum of results plus residuals equals the sum of all gradients."""
    if comm.topology.size == 1:
        pytest.skip("takes several ranks")
    net = wide()
    scaled = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(1.0), initial_scale=4.0)
    optimizer = cx.DistributedOptimizer(scaled, LOSSY, op="sum", links=SLOW)
    optimizer.build(net.trainable_variables)
    before, came = weights(net), [np.zeros(one.shape) for one in net.trainable_variables]

    def step(*gradients: tf.Tensor) -> None:
        scale = optimizer.dynamic_scale
        pairs = zip([scale * one for one in gradients], net.trainable_variables, strict=True)
        optimizer.apply_gradients(pairs)

    step = tf.function(step) if traced else step
    for number in range(STEPS + 4):
        gradients = [1e-3 * one for one in gradients_of(net, batch(comm.rank, number))]
        step(*gradients)
        came = [one + mine.numpy() for one, mine in zip(came, gradients, strict=True)]
    assert same_on_all_ranks(comm, net)
    exchanger = optimizer.exchanger
    assert executor_of(optimizer).rounds.chosen is not None
    waits = exchanger.export().residuals
    names = exchanger.names.of(net.trainable_variables)
    mine = [
        one + 0.0 - waits.get(name, np.zeros(one.size)).reshape(one.shape)
        for name, one in zip(names, came, strict=True)
    ]
    every = comm.gather_objects(mine)
    for place, (first, last) in enumerate(zip(before, weights(net), strict=True)):
        total = sum(one[place] for one in every)
        np.testing.assert_allclose(first - last, total, rtol=1e-3, atol=1e-5)


@pytest.mark.exhaustive  # test_expected_run.py refuses Root
def test_other_strategies_have_plain_horovod_and_refuse_to_lose_anything(comm: Comm) -> None:
    net = trained(comm, 1, strategy="rebroadcast", links=SLOW)
    assert isinstance(executor_of(net.optimizer), PlanExecutor)
    with pytest.raises(cx.PlanError, match=r"Root\(\)"):
        trained(comm, 1, scheme=LOSSY, strategy="root")


@pytest.mark.exhaustive  # test_expected_run.py on threads
def test_a_run_of_a_few_steps_decides_nothing(comm: Comm, own_cache: Path) -> None:
    """It tries a few plans, and ends."""
    if comm.topology.size == 1:
        pytest.skip("takes several ranks")
    net = trained(comm, 1, links=SLOW)
    running = executor_of(net.optimizer)
    assert isinstance(running, TrialExecutor)
    assert running.rounds.chosen is None and not own_cache.exists()
    assert net.optimizer.exchanger.plans() == [one.plan for one in running.executors]


@pytest.mark.exhaustive  # test_expected_run.py on threads
@pytest.mark.parametrize(
    ("budget", "wires"),
    [(0.3, {"int8"}), (0.05, {"elias/int4", "float16"})],
)
def test_within_a_budget_plain_horovod_takes_no_part(
    comm: Comm, budget: float, wires: set[str]
) -> None:
    """Momentum rules out 2 bits and 1, which lose less than selecting entries does."""
    if comm.topology.nodes == 1:
        pytest.skip("takes several nodes")
    comm.trials, net = TrialQueue(), wide()  # Without the trials of other tests
    sgd = keras.optimizers.SGD(0.05, momentum=0.9)
    scheme = cx.Scheme("auto", budget=budget)
    optimizer = cx.DistributedOptimizer(sgd, scheme, links=SLOW, check_replicas_every=None)
    optimizer.build(net.trainable_variables)

    @tf.function
    def step(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = LOSS(y, net(x))
        gradients = tape.gradient(loss, net.trainable_variables)
        optimizer.apply_gradients(zip(gradients, net.trainable_variables, strict=True))
        return loss

    before = optimizer.exchanger.traffic()
    losses = [float(step(*batch(comm.rank))) for _ in range(STEPS + 3)]
    after = optimizer.exchanger.traffic()
    assert losses[-1] < 0.9 * losses[0] and same_on_all_ranks(comm, net)
    running = executor_of(optimizer)
    assert {bucket.wire for plan in running.plans for bucket in plan.buckets} == wires
    assert isinstance(running, PlanExecutor) or running.rounds.chosen is not None
    sent = after["bytes_between_nodes"] - before["bytes_between_nodes"]
    assert 0 < sent <= budget * after["bytes_between_nodes_dense"]

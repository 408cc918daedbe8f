"""Uses of saved state that once failed silently."""

from __future__ import annotations

from pathlib import Path

import keras
import numpy as np
import pytest
from rank_helpers import SPARSE, compiled, fit, model, one_weight, take_step, weights

import tfcommx as cx
from tfcommx import callbacks, checkpoint
from tfcommx.collectives.comm import Comm


def test_a_checkpoint_leaves_the_users_files_alone(comm: Comm, folder: Path) -> None:
    net = compiled(cx.DistributedOptimizer(keras.optimizers.SGD(0.05), SPARSE))
    take_step(net, comm)
    if comm.rank == 0:
        (folder / "run-0001").mkdir()
        for name in (
            "notes-2025.txt",
            "model-best-20251104.keras",
            "model-0000.keras",
            "tfcommx-0000.keras.bak",
            f"residuals-0000-rank-{comm.topology.size:04d}.npz",
        ):
            (folder / name).write_text("")
    comm.gather_objects("written")
    for epoch in (0, 1):
        checkpoint.save(net, folder, epoch)
    comm.gather_objects("saved")
    assert sorted(path.name for path in folder.iterdir() if "residuals" not in path.name) == [
        ".checkpoint.lock",
        "checkpoint.json",
        "model-0000.keras",
        "model-best-20251104.keras",
        "notes-2025.txt",
        "run-0001",
        "tfcommx-0000.keras.bak",
        "tfcommx-0001.keras",
    ]
    # None of epoch 0, nor of a larger run
    residuals = [f"residuals-0001-rank-{rank:04d}.npz" for rank in range(comm.topology.size)]
    assert sorted(path.name for path in folder.glob("residuals-*")) == residuals


@pytest.mark.extended
def test_a_roll_back_in_a_running_model_forgets_its_residuals(comm: Comm, folder: Path) -> None:
    def wrapped() -> keras.Model:
        return compiled(cx.DistributedOptimizer(keras.optimizers.SGD(0.05), SPARSE))

    rolled, fresh = wrapped(), wrapped()
    fit(rolled, comm, epochs=1)
    checkpoint.save(rolled, folder, 0)
    fit(rolled, comm, epochs=2, initial_epoch=1)
    for net in (rolled, fresh):
        assert checkpoint.restore(net, folder) == 1
        fit(net, comm, epochs=2, initial_epoch=1)
        assert net.optimizer.exchanger.runs and not net.optimizer.exchanger.waiting.variables
    for one, other in zip(weights(rolled), weights(fresh), strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.extended
def test_restored_residuals_are_those_of_the_next_optimizer(comm: Comm, folder: Path) -> None:
    """Lost by a `compile` before the next step; one before `restore` added undone steps."""
    scheme = cx.Scheme("hitopk", "exact", 0.2, dense_below=8)

    def wrapped() -> keras.Model:
        return compiled(cx.DistributedOptimizer(keras.optimizers.SGD(0.05), scheme))

    def compile_anew(net: keras.Model) -> None:
        again = cx.DistributedOptimizer(keras.optimizers.SGD(0.05), scheme)
        net.compile(again, loss=net.loss, jit_compile=False)

    rolled, later, expected = wrapped(), wrapped(), wrapped()
    fit(rolled, comm, epochs=1)
    checkpoint.save(rolled, folder, 0)
    fit(rolled, comm, epochs=2, initial_epoch=1)
    compile_anew(rolled)
    for net in (rolled, later, expected):
        checkpoint.restore(net, folder)
    compile_anew(later)
    for net in (rolled, later, expected):
        fit(net, comm, epochs=2, initial_epoch=1)
    for net in (rolled, later):
        for one, other in zip(weights(net), weights(expected), strict=True):
            np.testing.assert_array_equal(one, other)


@pytest.mark.extended
def test_sums_that_each_rank_accumulates_stay_its_own(comm: Comm, folder: Path) -> None:
    """Two `fit`s of one step, saved and restored in between: the update has both, of all ranks.

    A custom loop's broadcast behind the restoration had given all ranks the sums of rank 0.
    """
    ranks = comm.topology.size
    net, again = (
        one_weight(keras.optimizers.SGD(1.0, gradient_accumulation_steps=2)) for _ in range(2)
    )

    def take(step_of: keras.Model, slope: float) -> None:
        step_of.fit(
            np.full((2, 1), slope * 10.0**comm.rank, np.float32),
            np.zeros((2, 1)),
            batch_size=2,
            verbose=0,
            callbacks=[callbacks.BroadcastState()],
        )

    take(net, 1)
    checkpoint.save(net, folder, 0)
    take(net, 3)
    checkpoint.restore(again, folder)
    cx.broadcast_variables([*again.weights, *again.optimizer.variables])
    take(again, 3)
    wanted = -sum(10.0**rank * (1 + 3) / 2 for rank in range(ranks))
    np.testing.assert_allclose([weights(net)[0].item(), weights(again)[0].item()], wanted)


@pytest.mark.extended
def test_a_model_that_one_rank_alone_has_loaded(comm: Comm, folder: Path) -> None:
    """Its variables have other paths than those of a built model."""
    net = compiled(cx.DistributedOptimizer(keras.optimizers.Adam(0.01), SPARSE))
    if comm.rank == 0:
        net.save(folder / "first.keras")
    states: list[list[np.ndarray]] = []
    for begun in (0, 1):
        net, plain = model(seed=9), keras.optimizers.Adam(0.01)
        if comm.rank == 0:
            net = keras.models.load_model(folder / "first.keras")
            plain = net.optimizer
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        net.compile(cx.DistributedOptimizer(plain, SPARSE), loss=loss, jit_compile=False)
        assert checkpoint.restore(net, folder) == begun
        if not begun:
            assert fit(net, comm, 1, (checkpoint.Checkpoint(folder),)).identical
        states.append(weights(net) + [one.numpy() for one in net.optimizer.variables])
    for trained, restored in zip(*states, strict=True):
        np.testing.assert_array_equal(trained, restored)


@pytest.mark.extended
def test_parts_of_a_model_may_have_layers_of_the_same_name(comm: Comm, folder: Path) -> None:
    def part(name: str) -> keras.Model:
        layers = [
            keras.layers.Input((12,)),
            keras.layers.Dense(16, name="dense"),
            keras.layers.Dense(3, name="out"),
        ]
        return keras.Sequential(layers, name=name)

    def both() -> keras.Model:
        whole = keras.Input((12,))
        net = keras.Model(whole, part("one")(whole) + part("two")(whole), name="net")
        net.compile(
            cx.DistributedOptimizer(keras.optimizers.SGD(0.05), SPARSE), "mse", jit_compile=False
        )
        return net

    x = np.random.default_rng(comm.rank).normal(size=(16, 12)).astype(np.float32)
    net, again = both(), both()
    net.fit(
        x,
        x[:, :3],
        batch_size=8,
        verbose=0,
        callbacks=[callbacks.BroadcastState(), callbacks.CompareReplicas()],
    )
    (plan,) = [one.executor.plan for one in net.optimizer.exchanger.runs.values()]
    named = {name for bucket in plan.buckets for name in bucket.variables}
    assert len(named) == 8 and {name.partition("#")[0] for name in named} == {
        variable.path for variable in net.trainable_variables
    }
    checkpoint.save(net, folder, 0)
    assert checkpoint.restore(again, folder) == 1
    for one, other in zip(weights(net), weights(again), strict=True):
        np.testing.assert_array_equal(one, other)
    wanted, got = (each.optimizer.exchanger.export().residuals for each in (net, again))
    assert wanted and wanted.keys() == got.keys()
    for name, residual in wanted.items():
        np.testing.assert_array_equal(residual, got[name], err_msg=name)

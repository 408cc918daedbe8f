"""Sharded and averaged weights under `fit`: evaluation, files, checkpoints, loss scaling."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from drawing import case
from rank_helpers import batch, compiled, same_on_all_ranks, weights

import tfcommx as cx
from tfcommx.collectives.comm import Comm
from tfcommx.strategies import Sharded, WeightAveraging


def adamw() -> keras.optimizers.Optimizer:
    """Return an optimizer with most options that shards must handle, under a loss scale."""
    optimizer = keras.optimizers.AdamW(0.01, weight_decay=0.1, use_ema=True, ema_momentum=0.5)
    optimizer.exclude_from_weight_decay(var_names=["bias"])
    return keras.optimizers.LossScaleOptimizer(optimizer, initial_scale=4.0)


class Seen(keras.callbacks.Callback):
    """Records the weights at evaluations within `fit`, and its step; saves the model each epoch."""

    def __init__(self, path: Path, rank: int) -> None:
        super().__init__()
        self.path, self.rank = path, rank
        self.weights: list[list[np.ndarray]] = []

    def on_test_begin(self, logs: Any = None) -> None:
        self.weights.append(weights(self.model))

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.function = self.model.train_function
        if self.rank == 0:
            self.model.save(self.path)


def train(
    comm: Comm, net: keras.Model, path: Path, epochs: int = 2, first: int = 0, extra: tuple = ()
) -> Seen:
    """Train until an epoch, with an evaluation after each one."""
    seen = Seen(path, comm.rank)
    x, y = batch(comm.rank, rows=32)
    net.fit(
        x,
        y,
        batch_size=8,
        epochs=epochs,
        initial_epoch=first,
        shuffle=False,
        verbose=0,
        validation_data=(x[:8], y[:8]),
        callbacks=[cx.callbacks.BroadcastState(), seen, *extra],
    )
    assert same_on_all_ranks(comm, net)
    return seen


def close(comm: Comm, mine: list[np.ndarray], theirs: list[np.ndarray]) -> None:
    """Compare: the bits on two ranks, where sums have one order."""
    for one, other in zip(mine, theirs, strict=True):
        if comm.topology.size <= 2:
            assert one.tobytes() == other.tobytes()
        else:
            np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)


class Break(keras.callbacks.Callback):
    """Ends `fit` with an exception in the middle of an epoch."""

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if batch == 1:
            raise KeyError("broken off")


@pytest.mark.extended
def test_shards_in_fit_equal_synchronous_training(comm: Comm, folder: Path) -> None:
    """Weights, also those in evaluations and files; the second epoch continues from a checkpoint.

    It is interrupted once. The shards of the interrupted step do not overwrite the weights of the
    second restore, and its pull does not remain in the model. A broadcast as in a custom loop
    leaves each rank its shards of the state, where it had given all those of rank 0.
    """
    plain = compiled(cx.DistributedOptimizer(adamw()))
    saw = train(comm, plain, folder / "plain.keras")
    saving = (cx.checkpoint.Checkpoint(folder / "run"),)
    begun = compiled(cx.DistributedOptimizer(adamw(), strategy="sharded"))
    saw_first = train(comm, begun, folder / "begun.keras", epochs=1, extra=saving)
    # Cut in another way, and with pulls that begin the steps
    sharded = compiled(cx.DistributedOptimizer(adamw(), strategy=Sharded("layers")), seed=2)
    inherited = sharded.train_step

    def own_step(data: Any) -> Any:
        return inherited(data)

    sharded.train_step = own_step
    assert cx.checkpoint.restore(sharded, folder / "run") == 1
    with pytest.raises(KeyError, match="broken off"):
        train(comm, sharded, folder / "sharded.keras", first=1, extra=(Break(),))
    assert cx.checkpoint.restore(sharded, folder / "run") == 1
    shards = [variable.numpy() for variable in sharded.optimizer.variables]
    cx.broadcast_variables([*sharded.weights, *sharded.optimizer.variables])
    close(comm, [variable.numpy() for variable in sharded.optimizer.variables], shards)
    saw_second = train(comm, sharded, folder / "sharded.keras", first=1)
    # A single rank pulls from no other, so its steps were never changed
    is_new = sharded.train_function is not saw_second.function
    assert is_new == (comm.topology.size > 1)
    assert sharded.train_step is own_step
    close(comm, weights(sharded), weights(plain))
    for mine, theirs in zip(saw_first.weights + saw_second.weights, saw.weights, strict=True):
        close(comm, mine, theirs)
    comm.gather_objects("saved")
    file, other = (keras.models.load_model(folder / f"{one}.keras") for one in ("plain", "sharded"))
    close(comm, weights(other), weights(file))
    ours, theirs = ([v.numpy() for v in one.optimizer.variables] for one in (other, file))
    assert len(ours) > 8
    close(comm, ours, theirs)


class Adversaries(keras.Model):
    """A maker that learns from the judge which has just been updated."""

    def __init__(self) -> None:
        super().__init__()
        self.maker = keras.Sequential([keras.Input((12,)), keras.layers.Dense(6)])
        self.judge = keras.Sequential([keras.Input((6,)), keras.layers.Dense(1)])

    def call(self, inputs: Any) -> Any:
        return self.judge(self.maker(inputs))

    def compile(self, *optimizers: keras.optimizers.Optimizer) -> None:
        super().compile(jit_compile=False)
        self.of_judge, self.of_maker = optimizers

    def train_step(self, data: Any) -> dict[str, Any]:
        for optimizer, part in ((self.of_judge, self.judge), (self.of_maker, self.maker)):
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(self(data[0]) ** 2)
            variables = part.trainable_variables
            optimizer.apply(tape.gradient(loss, variables), variables)
        return {"loss": loss}


@pytest.mark.extended
@pytest.mark.parametrize("kind", ["adversaries", case("spectral normalization", kept=False)])
def test_steps_that_need_current_weights_equal_synchronous_training(comm: Comm, kind: str) -> None:
    """In the second `fit`, when the optimizers are built, the maker saw the judge of a step before.

    And the pull at the next step's beginning undid the normalization of the kernel.
    """
    everyone = []
    for strategy in ("synchronous", Sharded("layers")):
        keras.utils.set_random_seed(1)
        optimizers = [
            cx.DistributedOptimizer(
                keras.optimizers.SGD(0.05, momentum=0.9), cx.Scheme(), strategy=strategy
            )
            for _ in range(2)
        ]
        if kind == "adversaries":
            net: keras.Model = Adversaries()
            net.compile(*optimizers)
        else:
            dense = keras.layers.SpectralNormalization(keras.layers.Dense(6))
            net = keras.Sequential([keras.Input((12,)), dense, keras.layers.Dense(3)])
            loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
            net.compile(optimizers[0], loss, jit_compile=False)
        for epoch in range(2):
            x, y = batch(comm.rank, epoch, rows=32)
            options = {"batch_size": 8, "shuffle": False, "verbose": 0}
            net.fit(x, y, **options, callbacks=[cx.callbacks.BroadcastState()])
        everyone.append(weights(net))
    close(comm, *everyone)


@pytest.mark.every_launch
@pytest.mark.parametrize(
    ("make", "strategy"),
    [
        (lambda: cx.optimizers.LAMB(0.01, weight_decay=0.1), Sharded(group="node")),
        pytest.param(adamw, Sharded("layers", group="peers"), marks=pytest.mark.exhaustive),
    ],
    ids=["lamb-node", "adamw-peers"],
)
def test_whole_variables_and_groups_in_fit_equal_synchronous_training(
    comm: Comm, folder: Path, make: Any, strategy: Sharded
) -> None:
    """Weights, also those in evaluations and files."""
    if comm.topology.nodes == 1 or comm.topology.slots == 1:
        pytest.skip("takes several nodes of several ranks")
    saw, states = [], []
    for one in ("synchronous", strategy):
        net, path = compiled(cx.DistributedOptimizer(make(), strategy=one)), folder / "net.keras"
        saw.append(train(comm, net, path, epochs=1))
        comm.gather_objects("saved")
        states.append([v.numpy() for v in keras.models.load_model(path).optimizer.variables])
        comm.gather_objects("read")
    for mine, theirs in zip(saw[1].weights, saw[0].weights, strict=True):
        close(comm, mine, theirs)
    assert len(states[0]) > 8
    close(comm, *states)


@pytest.mark.exhaustive  # test_one_process.py evaluates averages
def test_weights_are_averaged_before_evaluations_and_files(comm: Comm, folder: Path) -> None:
    """Four steps in an epoch, an average every three: the end of an epoch averages, too."""
    strategy = WeightAveraging(every=3, sends="updates", momentum="average")
    optimizer = keras.optimizers.SGD(0.1, momentum=0.9)
    net = compiled(cx.DistributedOptimizer(optimizer, strategy=strategy))
    seen = train(comm, net, folder / "averaged.keras")
    everyone = comm.gather_objects([value.tobytes() for one in seen.weights for value in one])
    assert all(one == everyone[0] for one in everyone)

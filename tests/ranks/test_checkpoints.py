"""Checkpoints in unusual cases: frozen layers, kills, two optimizers.

On as many processes as launched this.
"""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from rank_helpers import SPARSE, batch, compiled, fit, gradients_of

import tfcommx as cx
from tfcommx import callbacks, checkpoint
from tfcommx.checkpoint import saving
from tfcommx.checkpoint.lock import LOCK
from tfcommx.collectives.comm import Comm
from tfcommx.optim.broadcast import SEED_STEP
from tfcommx.optim.wrapped import accumulated, wrapped_optimizers


def wrapped(scheme: cx.Scheme = SPARSE) -> keras.Model:
    return compiled(cx.DistributedOptimizer(keras.optimizers.Adam(0.01), scheme))


def take(net: keras.Model, comm: Comm, steps: int = 1) -> None:
    for step in range(steps):
        net.optimizer.apply(gradients_of(net, batch(comm.rank, step)), net.trainable_variables)


def state(net: keras.Model) -> dict[str, np.ndarray]:
    """Weights and the optimizers' variables, by position; residuals, by variable.

    Batch norm's statistics are each rank's own: left out.
    """
    found = {
        f"weight {position}": variable.numpy()
        for position, variable in enumerate(net.weights)
        if "moving" not in variable.path
    }
    for number, optimizer in enumerate(wrapped_optimizers(net)):
        found |= {
            f"optimizer {number} {position}": variable.numpy()
            for position, variable in enumerate(optimizer.variables)
        }
        found |= {
            f"residual {number} {path}": part
            for path, part in optimizer.exchanger.export().residuals.items()
        }
    return found


def same(one: dict[str, np.ndarray], other: dict[str, np.ndarray]) -> bool:
    return one.keys() == other.keys() and all(
        np.array_equal(one[name], other[name]) for name in one
    )


def test_a_layer_that_is_frozen_keeps_its_residuals(comm: Comm, folder: Path) -> None:
    def frozen(net: keras.Model) -> keras.Model:
        net.get_layer("hidden").trainable = False
        return net

    net, again, whole = wrapped(), frozen(wrapped()), wrapped()
    take(net, comm)
    take(frozen(net), comm)
    residuals = net.optimizer.exchanger.export().residuals
    checkpoint.save(net, folder, 0)
    assert checkpoint.restore(again, folder) == 1 and same(state(net), state(again))
    take(again, comm)
    exchanger = again.optimizer.exchanger
    np.testing.assert_array_equal(
        exchanger.waiting.residuals["net/hidden/kernel"], residuals["net/hidden/kernel"]
    )
    again.get_layer("hidden").trainable = True
    take(again, comm)
    assert not exchanger.waiting.variables

    only = frozen(wrapped())  # saved by an optimizer that has never seen the layer
    take(only, comm)
    checkpoint.save(only, folder, 1)
    checkpoint.restore(whole, folder)
    take(whole, comm)


def test_ranks_whose_shards_have_other_state_are_restored(comm: Comm, folder: Path) -> None:
    """Muon keeps velocities of vectors alone, which not every rank has; one refused the file."""

    def made() -> keras.Model:
        muon = keras.optimizers.Muon(0.01)
        net = compiled(cx.DistributedOptimizer(muon, cx.Scheme(), strategy="sharded"))
        net.optimizer.build(net.trainable_variables)
        return net

    net, again = made(), made()
    take(net, comm)
    checkpoint.save(net, folder, 0)
    assert checkpoint.restore(again, folder) == 1 and same(state(net), state(again))


@pytest.mark.one_rank
def test_sums_in_bfloat16(comm: Comm, folder: Path) -> None:
    def accumulating() -> keras.Model:
        net = keras.Sequential(
            [keras.layers.Input((3,)), keras.layers.Dense(2, dtype="bfloat16", name="out")],
            name="small",
        )
        net.compile(
            cx.DistributedOptimizer(keras.optimizers.SGD(1.0, gradient_accumulation_steps=3)),
            jit_compile=False,
        )
        return net

    net, again = accumulating(), accumulating()
    numbers = np.random.default_rng(comm.rank)
    net.optimizer.apply(
        [tf.constant(numbers.normal(size=v.shape), v.dtype) for v in net.trainable_variables],
        net.trainable_variables,
    )
    checkpoint.save(net, folder, 0)
    checkpoint.restore(again, folder)
    sums, restored = (accumulated(one.optimizer) for one in (net, again))
    for path, total in sums.items():
        assert total.numpy().any() and restored[path].dtype == "bfloat16"
        np.testing.assert_array_equal(total.numpy(), restored[path].numpy())


class Killed(BaseException):
    pass


def killed(*_: Any) -> None:
    raise Killed


def test_an_epoch_that_is_saved_twice_is_not_mixed(
    comm: Comm, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    net, again = wrapped(), wrapped()
    take(net, comm)
    checkpoint.save(net, folder, 0)
    before = state(net)
    take(net, comm)
    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(saving, "write_residuals", killed)  # rank 0 has written the model by then
        checkpoint.save(net, folder, 0)
    checkpoint.restore(again, folder)
    assert comm.rank or same(before, state(again))
    checkpoint.save(net, folder, 0)
    comm.gather_objects("saved")
    assert sorted(path.name for path in folder.iterdir() if path.name != LOCK) == [
        "checkpoint.json",
        *(f"residuals-0001-rank-{rank:04d}.npz" for rank in range(comm.topology.size)),
        "tfcommx-0001.keras",
    ]


def test_a_kill_at_any_file_operation_leaves_a_whole_checkpoint(
    comm: Comm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if comm.topology.size > 1:
        pytest.skip("the other ranks would wait")
    net, again, first = wrapped(), wrapped(), tmp_path / "first"
    take(net, comm)
    checkpoint.save(net, first, 0)
    before = state(net)
    take(net, comm)
    found = []
    for stop in range(100):
        folder, done = shutil.copytree(first, tmp_path / f"killed-{stop}"), iter(range(100))

        def counted(operation: Any, stop: int = stop, done: Any = done) -> Any:
            return lambda *words, **more: (
                killed() if next(done) == stop else operation(*words, **more)
            )

        with monkeypatch.context() as patch:
            for owner, name in ((os, "fsync"), (os, "replace"), (Path, "unlink")):
                patch.setattr(owner, name, counted(getattr(owner, name)))
            try:
                checkpoint.save(net, folder, 0)
                finished = True
            except Killed:
                finished = False
        assert checkpoint.restore(again, folder) == 1
        found.append(
            "old"
            if same(state(again), before)
            else "new"
            if same(state(again), state(net))
            else "mixed"
        )
        if finished:
            break
    old = found.count("old")
    assert (
        old >= 8 and found == ["old"] * old + ["new"] * (len(found) - old) and len(found) - old >= 4
    )


@pytest.mark.one_rank
@pytest.mark.parametrize("text", ["", '{"epoch": 3, "ranks"', '{"epoch": 3}', "[]", "null"])
def test_a_damaged_head_is_refused_in_words(comm: Comm, folder: Path, text: str) -> None:
    net = wrapped()
    if comm.rank == 0:
        (folder / "checkpoint.json").write_text(text)
    comm.gather_objects("written")
    with pytest.raises(
        cx.CheckpointError, match=rf"checkpoint\.json .*{re.escape(repr(text))}.*rank 0\b"
    ):
        checkpoint.next_epoch(folder)
    if text:
        return
    for refuses in (
        lambda: checkpoint.restore(net, folder),
        lambda: checkpoint.save(net, folder, 0),
        lambda: fit(net, comm, extra=(checkpoint.Checkpoint(folder),)),
    ):
        with pytest.raises(cx.CheckpointError, match=r"checkpoint\.json "):
            refuses()
    assert not net.optimizer.exchanger.runs


class Adversaries(keras.Model):
    """Two networks, each with its own optimizer, as in a GAN."""

    def __init__(self) -> None:
        super().__init__(name="both")
        self.maker, self.judge = (
            keras.layers.Dense(12, name="maker"),
            keras.layers.Dense(3, name="judge"),
        )

    def call(self, inputs: tf.Tensor) -> tf.Tensor:
        return self.judge(self.maker(inputs))

    def compile(
        self,
        maker_optimizer: keras.optimizers.Optimizer,
        judge_optimizer: keras.optimizers.Optimizer,
    ) -> None:
        super().compile(jit_compile=False)
        self.maker_optimizer, self.judge_optimizer = maker_optimizer, judge_optimizer


def test_two_optimizers_of_one_model(comm: Comm, folder: Path) -> None:
    def made(seed: int) -> Adversaries:
        keras.utils.set_random_seed(seed)
        net = Adversaries()
        net(tf.zeros((1, 12)))
        net.compile(
            cx.DistributedOptimizer(keras.optimizers.Adam(0.01), SPARSE, op="sum"),
            cx.DistributedOptimizer(
                keras.optimizers.SGD(0.1, momentum=0.9, gradient_accumulation_steps=2), SPARSE
            ),
        )
        return net

    net, again = made(1), made(2)
    for step in range(3):
        gradients = gradients_of(net, batch(comm.rank, step))
        net.maker_optimizer.apply(gradients[:2], net.maker.trainable_variables)
        net.judge_optimizer.apply(gradients[2:], net.judge.trainable_variables)
    checkpoint.save(net, folder, 0)
    assert checkpoint.restore(again, folder) == 1
    begin = callbacks.BroadcastState()
    begin.set_model(again)
    begin.on_train_begin()
    wanted = state(net)
    assert same(wanted, state(again)) and {
        name[:10] for name in wanted if name.startswith("residual")
    } == {"residual 0", "residual 1"}
    assert all(total.numpy().any() for total in accumulated(again.judge_optimizer).values())

    with pytest.raises(cx.CheckpointError, match=r" 2 .* 1\b"):
        checkpoint.restore(wrapped(), folder)


@pytest.mark.extended
def test_bytes_count_from_the_start_of_the_process(comm: Comm, folder: Path) -> None:
    def dense_bytes() -> float:
        return net.optimizer.exchanger.traffic()["bytes_between_nodes_dense"]

    net = wrapped()
    take(net, comm)
    step = dense_bytes()
    take(net, comm)
    checkpoint.save(net, folder, 0)
    checkpoint.restore(net, folder)  # a roll-back does not reset the count
    take(net, comm)
    assert dense_bytes() == 3 * step and (step > 0) == (comm.topology.nodes > 1)
    net = wrapped()
    checkpoint.restore(net, folder)
    take(net, comm)
    assert dense_bytes() == step


class NoConfig(keras.optimizers.schedules.LearningRateSchedule):
    def __call__(self, step: tf.Tensor) -> float:
        return 0.1


@pytest.mark.one_rank
def test_what_cannot_be_written_down_is_said_before_the_first_step(
    comm: Comm, folder: Path
) -> None:
    net = compiled(cx.DistributedOptimizer(keras.optimizers.SGD(NoConfig())))
    with pytest.raises(cx.CheckpointError, match=r"'net'.*NoConfig.*get_config"):
        fit(net, comm, epochs=1, extra=(checkpoint.Checkpoint(folder),))
    assert not net.optimizer.exchanger.runs


@pytest.mark.one_rank
def test_a_model_must_be_built_and_have_its_names(comm: Comm, folder: Path) -> None:
    def small(name: str, *first: keras.layers.Layer) -> keras.Model:
        net = keras.Sequential(
            [*first, keras.layers.Dropout(0.1), keras.layers.Dense(3, name=name)], name="small"
        )
        net.compile(cx.DistributedOptimizer(keras.optimizers.Adam(0.01)), jit_compile=False)
        return net

    net, again, other = (
        small("out", keras.layers.Input((12,))),
        small("out"),
        small("end", keras.layers.Input((12,))),
    )
    take(net, comm)
    checkpoint.save(net, folder, 0)
    with pytest.raises(cx.CheckpointError, match=r"'small'.*model\.build"):
        checkpoint.restore(again, folder)
    again.build((None, 12))
    assert checkpoint.restore(again, folder) == 1 and (comm.rank or same(state(net), state(again)))
    take(again, comm)
    with pytest.raises(cx.CheckpointError, match=r"'small/out/bias'.*'small/end/bias'"):
        checkpoint.restore(other, folder)


@pytest.mark.extended
def test_dropout_goes_on_where_it_was(comm: Comm, folder: Path) -> None:
    """Keras saves no seeds: a resumed run dropped the entries of its first epochs again."""

    def dropping(seed: int) -> keras.Model:
        keras.utils.set_random_seed(seed)
        net = keras.Sequential(
            [
                keras.layers.Input((12,)),
                keras.layers.Dropout(0.5),
                keras.layers.Dense(3, name="out"),
            ],
            name="net",
        )
        net.compile(
            cx.DistributedOptimizer(keras.optimizers.SGD(0.1), SPARSE),
            "sparse_categorical_crossentropy",
            jit_compile=False,
        )
        return net

    net, again = dropping(1), dropping(2)
    for each, epoch in ((net, 0), (again, 1), (net, 1)):
        if each is again:
            checkpoint.save(net, folder, 0)
            assert checkpoint.restore(again, folder) == 1
        fit(each, comm, epochs=epoch + 1, initial_epoch=epoch)
    assert same(state(net), state(again))
    states = [one.layers[0].seed_generator.state.numpy().tolist() for one in (net, again)]
    assert states[0] == states[1]
    # Ranks drop other entries: every `fit` derives their seeds from that of rank 0
    everyone = comm.gather_objects(states[0])
    assert everyone == [
        [(everyone[0][0] + rank * SEED_STEP) % 2**31, 8] for rank in range(len(everyone))
    ]


@pytest.mark.one_rank
def test_what_keras_does_not_save_is_saved(comm: Comm, folder: Path) -> None:
    """Under a LossScaleOptimizer, the product that Nadam keeps.

    If it starts from one again, the first steps after a restore are several times too long.
    """

    def nadam() -> keras.Model:
        return compiled(
            cx.DistributedOptimizer(
                keras.optimizers.LossScaleOptimizer(keras.optimizers.Nadam(0.01), 2.0), SPARSE
            )
        )

    net, again = nadam(), nadam()
    take(net, comm, 2)
    checkpoint.save(net, folder, 0)
    checkpoint.restore(again, folder)
    for each in (net, again):
        take(each, comm)
    assert same(state(net), state(again))


def test_a_folder_that_cannot_be_written_is_said_before_the_first_step(
    comm: Comm, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    net, last = wrapped(), comm.topology.size - 1
    (folder / f"of-{comm.rank}").mkdir()
    monkeypatch.chdir(folder / f"of-{comm.rank}")
    if comm.rank == last:  # the others can
        Path("file").write_text("")
    comm.gather_objects("written")
    own = Path("/proc/self/cwd/file/checkpoint")  # One name, and a folder of each rank
    with pytest.raises(cx.CheckpointError, match=rf"rank {last}\b.*\[Errno 20\]"):
        fit(net, comm, extra=(checkpoint.Checkpoint(own),))
    assert not net.optimizer.exchanger.runs

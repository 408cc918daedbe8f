"""Trains an epoch, saves, and checks the state of the launch before, with any number of ranks.

Started by test_resize.py. The residuals will change the weights by their sum over the ranks,
divided by the number of ranks (op "average"); velocities likewise.
"""

from __future__ import annotations

import sys
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf

import tfcommx as cx
from tfcommx import callbacks, checkpoint
from tfcommx.optim.wrapped import exchanger_of

folder, node_size = Path(sys.argv[1]), int(sys.argv[2])
comm = cx.init(node_size=node_size)


def kept(net: keras.Model) -> dict[str, np.ndarray]:
    exchanger, found = exchanger_of(net), {}
    for kind, mine in (
        ("residual", exchanger.export().residuals),
        ("velocity", exchanger.export().velocities),
    ):
        everyone = comm.gather_objects(mine)
        for variable in net.trainable_variables:
            parts = [
                part.get(variable.path, np.zeros(np.prod(variable.shape), np.float32))
                for part in everyone
            ]
            found[f"{kind}:{variable.path}"] = (
                sum(parts).reshape(variable.shape) / comm.topology.size
            )
    return found


def start() -> keras.Model:
    keras.utils.set_random_seed(comm.rank)
    net = keras.Sequential(
        [
            keras.layers.Input((12,)),
            keras.layers.Dense(16, "relu", name="hidden"),
            keras.layers.Dense(3, name="out"),
        ],
        name="net",
    )
    optimizer = cx.DistributedOptimizer(
        keras.optimizers.SGD(1.0), cx.Scheme("hitopk", "mstopk", 0.1, dense_below=8, momentum=0.5)
    )
    net.compile(
        optimizer,
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        jit_compile=False,
        run_eagerly=True,  # Traced, fits are restored in tests/ranks/test_checkpoints.py
    )
    return net


def train(net: keras.Model, first: int, *extra: keras.callbacks.Callback) -> None:
    numbers = np.random.default_rng([comm.rank, first])
    compare = callbacks.CompareReplicas()
    net.fit(
        numbers.normal(size=(32, 12)).astype("float32"),
        numbers.integers(0, 3, 32),
        batch_size=8,
        initial_epoch=first,
        epochs=first + 1,
        verbose=0,
        callbacks=[callbacks.BroadcastState(), *extra, compare],
    )
    assert compare.identical


net = start()
first = checkpoint.restore(net, folder)
if first:
    before = np.load(folder / "kept.npz")
    assert all(
        np.abs(part).max() > 1e-3 for name, part in before.items() if name.endswith("kernel")
    ), "nothing was kept"
    for name, part in kept(net).items():
        np.testing.assert_allclose(part, before[name], rtol=1e-5, atol=1e-7, err_msg=name)

    # The same start, but dense from now on: the first step takes exactly the residuals off the
    # weights.
    paid = start()
    checkpoint.restore(paid, folder)
    old = [
        tf.convert_to_tensor(value)
        for value in comm.gather_objects([v.numpy() for v in paid.trainable_variables])[0]
    ]
    for variable, value in zip(paid.trainable_variables, old, strict=True):
        variable.assign(value)
    paid.optimizer.exchanger.switch(cx.Scheme())
    paid.optimizer.apply([tf.zeros_like(value) for value in old], paid.trainable_variables)
    for variable, value in zip(paid.trainable_variables, old, strict=True):
        np.testing.assert_allclose(
            value - variable,
            before[f"residual:{variable.path}"],
            rtol=1e-5,
            atol=1e-6,
            err_msg=variable.path,
        )


def with_outer() -> keras.Model:
    """Return a network whose rounds are moved by an outer optimizer."""
    net = start()
    outer = keras.optimizers.SGD(0.7, momentum=0.9, nesterov=True)
    strategy = cx.strategies.WeightAveraging(3, outer=outer, fragments=1 + first % 2)
    scheme = cx.Scheme("hitopk", "mstopk", 0.1, dense_below=8)
    net.compile(
        cx.DistributedOptimizer(keras.optimizers.SGD(0.1), scheme, strategy=strategy),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        jit_compile=False,
        run_eagerly=True,
    )
    return net


def outer_state(net: keras.Model) -> dict[str, np.ndarray]:
    """Return the outer optimizers' state; check that all ranks have the same."""
    found = {
        f"{path}:{name}": value
        for path, state in exchanger_of(net).common_state().items()
        for name, value in state.items()
    }
    for other in comm.gather_objects(found):
        assert other.keys() == found.keys()
        assert all(np.array_equal(other[name], value) for name, value in found.items())
    return found


# The outer optimizer's state is the same on any number of ranks, and in other fragments
averaging = with_outer()
assert checkpoint.restore(averaging, folder / "outer") == first
if first:
    before = np.load(folder / "outer.npz")
    restored = outer_state(averaging)
    assert restored.keys() == set(before.files) and len(restored) >= 4
    for name, value in restored.items():
        np.testing.assert_array_equal(value, before[name], err_msg=name)
train(averaging, first, checkpoint.Checkpoint(folder / "outer"))
everything = outer_state(averaging)
if comm.rank == 0:
    np.savez(folder / "outer.npz", **everything)

train(net, first, checkpoint.Checkpoint(folder))
everything = kept(net)
if comm.rank == 0:
    np.savez(folder / "kept.npz", **everything)
comm.gather_objects("done")
print("conserved", first, flush=True)

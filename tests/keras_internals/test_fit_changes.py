"""Changes to `fit` last for their steps, and are then undone."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
import pytest

from tfcommx.keras_internals.fit import (
    begin_train_steps_with,
    replace_train_function,
    restore_train_function,
    restore_train_step,
    skip_steps,
)
from tfcommx.keras_internals.models import all_generators, finalize_layers, trace_again

STEPS = 6


@pytest.fixture
def net() -> keras.Model:
    net = keras.Sequential([keras.layers.Input((2,)), keras.layers.Dense(1)])
    net.compile(keras.optimizers.SGD(0.1), loss="mse", steps_per_execution=2)
    return net


def fit(net: keras.Model, at_step: Callable[[int], None] = lambda step: None) -> int:
    """Train an epoch; return how many steps were taken."""
    x = np.ones((STEPS, 2), "float32")
    begin = keras.callbacks.LambdaCallback(on_train_batch_begin=lambda step, logs: at_step(step))
    before = int(net.optimizer.iterations)
    net.fit(x, np.ones((STEPS, 1)), batch_size=1, shuffle=False, verbose=0, callbacks=[begin])
    return int(net.optimizer.iterations) - before


def test_keras_makes_its_generator_without_a_draw_from_the_script(net: keras.Model) -> None:
    """The next model of a seeded script had other weights than without BroadcastState."""
    keras.utils.clear_session(free_memory=False)
    random.seed(3)
    before = random.getstate()
    all_generators(net)
    assert random.getstate() == before


def test_skipped_steps_take_batches_and_train_nothing(net: keras.Model) -> None:
    assert fit(net, lambda step: skip_steps(net, 4) if step == 0 else None) == STEPS - 4
    assert fit(net) == STEPS


def test_a_train_function_is_replaced_until_it_is_restored(net: keras.Model) -> None:
    """Also within steps that are skipped, whose own replacement is then in force again."""
    seen = []

    def replace(step: int) -> None:
        if step != 0:
            return
        train = net.train_function
        skip_steps(net, 4)

        def see(replaced: Callable[[Iterator[Any]], Any], iterator: Iterator[Any]) -> Any:
            restore()
            seen.append(net.train_function is replaced and replaced is not train)
            return replaced(iterator)

        restore = replace_train_function(net, see)

    assert fit(net, replace) == STEPS - 4
    assert seen == [True]


def test_a_train_function_of_an_interrupted_fit_is_restored(net: keras.Model) -> None:
    """As after Ctrl-C in a notebook: the next `fit` ignored batches of its first epoch."""

    def interrupt(step: int) -> None:
        if step == 0:
            skip_steps(net, 4)
            replace_train_function(net, lambda train, iterator: train(iterator))
            raise KeyboardInterrupt

    fit(net)
    made = net.train_function
    with pytest.raises(KeyboardInterrupt):
        fit(net, interrupt)
    assert net.train_function is not made
    restore_train_function(net)
    assert net.train_function is made and fit(net) == STEPS


def test_a_train_function_that_keras_made_since_stays(net: keras.Model) -> None:
    def replace(step: int) -> None:
        if step == 0:
            restore = replace_train_function(net, lambda train, iterator: {})
            net.make_train_function(force=True)
            made = net.train_function
            restore()
            assert net.train_function is made

    assert fit(net, replace) == STEPS


def test_steps_are_skipped_behind_a_new_trace(net: keras.Model) -> None:
    """As with SwitchScheme behind Checkpoint: a resumed epoch trained its first steps again."""
    made = []

    def skip(step: int) -> None:
        if step == 0:
            made.append(net.train_function)
            skip_steps(net, 4)
            trace_again(net)

    assert fit(net, skip) == STEPS - 4
    assert not hasattr(net.train_function, "replaces") and net.train_function is not made[0]


class OwnTrainFunction(keras.Sequential):
    """Overrides the method as `fit` calls it, without `force`."""

    def make_train_function(self) -> Any:
        return super().make_train_function()


def test_a_users_own_way_to_make_the_train_function_is_traced_again() -> None:
    net = OwnTrainFunction([keras.layers.Input((2,)), keras.layers.Dense(1)])
    net.compile(keras.optimizers.SGD(0.1), loss="mse")
    made = net.make_train_function()
    trace_again(net)
    assert net.train_function is not made
    assert fit(net, lambda step: trace_again(net) if step == 2 else None) == STEPS


def test_new_constants_are_traced_with_a_users_own_way_to_make_the_train_function() -> None:
    """`make_train_function` received `force`, which `fit` never passes: a TypeError."""
    layer = keras.layers.Normalization()
    layer.adapt(np.ones((4, 2)))
    net = OwnTrainFunction([keras.layers.Input((2,)), layer, keras.layers.Dense(1)])
    net.compile(keras.optimizers.SGD(0.1), loss="mse")
    made = net.make_train_function()
    layer.adapt_mean.assign([3.0, 4.0])
    assert finalize_layers(net) and net.train_function is not made


@pytest.mark.parametrize("own", [False, True])
def test_train_steps_begin_with_a_call_until_they_are_restored(net: keras.Model, own: bool) -> None:
    if own:
        net.train_step = lambda data, step=net.train_step: step(data)
    before, traces = vars(net).get("train_step"), []
    begin_train_steps_with(net, lambda data: traces.append(len(data)))
    assert fit(net) == STEPS
    assert traces and set(traces) == {2}  # Inputs and labels
    restore_train_step(net)
    assert vars(net).get("train_step") is before
    traces.clear()
    assert fit(net) == STEPS
    assert not traces
    restore_train_step(net)  # No steps of this model were changed
    assert vars(net).get("train_step") is before


def test_a_step_that_an_interrupted_fit_has_left_is_restored_in_the_next(
    net: keras.Model,
) -> None:
    """`fit` ended with "'NoneType' object is not callable", having made its function before."""
    traces: list[object] = []
    begin_train_steps_with(net, traces.append)
    restore = keras.callbacks.LambdaCallback(on_train_begin=lambda logs: restore_train_step(net))
    net.fit(np.ones((STEPS, 2)), np.ones((STEPS, 1)), verbose=0, callbacks=[restore])
    assert int(net.optimizer.iterations) == 1 and not traces


def test_a_train_function_that_is_not_made_yet_is_replaced(net: keras.Model) -> None:
    """As by the callbacks of a loop of `train_on_batch`: the first batch called None."""
    seen = []

    def see(train: Callable[[Iterator[Any]], Any], iterator: Iterator[Any]) -> Any:
        restore()
        seen.append(net.train_function is train)
        return train(iterator)

    restore = replace_train_function(net, see)
    net.train_on_batch(np.ones((2, 2), "float32"), np.ones((2, 1)))
    assert seen == [True] and int(net.optimizer.iterations) == 1

"""Plain optimizers in a launch of several ranks are named before the end, and no others."""

from __future__ import annotations

import gc
import re
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import keras
import pytest
import tensorflow as tf
from launching import WORKERS, horovodrun

from tfcommx.collectives import unwrapped
from tfcommx.collectives.comm import Comm
from tfcommx.collectives.threads import ThreadComm
from tfcommx.collectives.unwrapped import UnwrappedOptimizers, allow_plain_optimizers
from tfcommx.core import Scheme, Topology
from tfcommx.keras_internals.optimizers import copy_with
from tfcommx.keras_internals.step import ExchangesGradients
from tfcommx.optim.exchanger import Exchanger
from tfcommx.optim.requested_plan import ExchangeSettings


@pytest.mark.extended
@pytest.mark.long_wait
def test_runs_of_two_steps_are_named_before_the_process_ends() -> None:
    ended = horovodrun(2, [str(WORKERS / "unwrapped.py")], OMP_NUM_THREADS="1")
    assert ended.status == 0, ended.output
    said = re.findall(r"Rank (\d): the optimizer '(\w+)' is not wrapped", ended.output)
    names = ("named_copied", "named_made_before")
    assert sorted(said) == [(rank, name) for rank in "01" for name in names], ended.output


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> Iterator[UnwrappedOptimizers]:
    monkeypatch.setattr(unwrapped.atexit, "register", lambda end: None)
    monkeypatch.setattr(unwrapped, "LOOK_SECONDS", 0.01)
    one = UnwrappedOptimizers(rank=1)
    one.watch()
    yield one
    one.end()
    unwrapped._watching = None


def steps_of(
    optimizer: keras.optimizers.Optimizer, traced: bool, method: str = "apply"
) -> Callable[[], None]:
    weight = keras.Variable([1.0])
    optimizer.build([weight])

    def step() -> None:
        getattr(optimizer, method)(
            *([[tf.ones(1)], [weight]] if method == "apply" else [[(tf.ones(1), weight)]])
        )

    return tf.function(step) if traced else step


@pytest.mark.parametrize("traced", [True, False])
@pytest.mark.parametrize("method", ["apply", "apply_gradients"])
def test_the_second_step_is_named_and_once(
    traced: bool, method: str, watch: UnwrappedOptimizers, caplog: pytest.LogCaptureFixture
) -> None:
    step = steps_of(keras.optimizers.Adam(name="mine"), traced, method)
    step()
    watch.look()
    assert "not wrapped" not in caplog.text
    step()
    watch.look()
    assert "the optimizer 'mine' is not wrapped and takes steps" in caplog.text
    step()
    watch.look()
    assert caplog.text.count("not wrapped") == 1


def test_a_run_is_named_while_it_goes_on(
    watch: UnwrappedOptimizers, caplog: pytest.LogCaptureFixture
) -> None:
    step = steps_of(keras.optimizers.SGD(), traced=True)
    step()
    step()
    until = time.monotonic() + 60
    while "not wrapped" not in caplog.text and time.monotonic() < until:
        time.sleep(0.01)
    assert "not wrapped" in caplog.text


@pytest.mark.parametrize("traced", [True, False])
def test_a_step_that_makes_the_state_and_a_restored_count_are_no_training(
    traced: bool, watch: UnwrappedOptimizers, caplog: pytest.LogCaptureFixture
) -> None:
    made, restored = keras.optimizers.SGD(), keras.optimizers.SGD()
    steps_of(made, traced)()
    steps_of(restored, traced)
    restored.iterations.assign(500)
    watch.look()
    assert "not wrapped" not in caplog.text


@pytest.mark.parametrize("traced", [True, False])
def test_what_is_allowed_is_not_named_and_what_follows_is(
    traced: bool, watch: UnwrappedOptimizers, caplog: pytest.LogCaptureFixture
) -> None:
    allowed, other = (steps_of(keras.optimizers.SGD(name=name), traced) for name in ("a", "b"))
    for _ in range(3):
        with allow_plain_optimizers():
            allowed()
        other()
    watch.look()
    assert "'b' is not wrapped" in caplog.text and "'a'" not in caplog.text


class Around(keras.optimizers.SGD):
    """A user's own, which lets another optimizer take its steps."""

    inside: Any = None

    def apply(self, grads: Any, trainable_variables: Any = None) -> None:
        self.inside.apply(grads, trainable_variables)


class OwnStep(keras.optimizers.SGD):
    """A user's own, which takes its steps without Keras's `apply`."""

    def apply(self, grads: Any, trainable_variables: Any = None) -> None:
        self.iterations.assign_add(1)


@pytest.mark.parametrize("traced", [True, False])
def test_a_class_with_a_step_of_its_own_is_named(
    traced: bool, watch: UnwrappedOptimizers, caplog: pytest.LogCaptureFixture
) -> None:
    step = steps_of(OwnStep(name="own"), traced, "apply_gradients")
    step()
    step()
    watch.look()
    assert "'own' is not wrapped" in caplog.text


@pytest.mark.parametrize("traced", [True, False])
@pytest.mark.parametrize("method", ["apply", "apply_gradients"])
def test_optimizers_inside_of_others(
    traced: bool, method: str, watch: UnwrappedOptimizers, caplog: pytest.LogCaptureFixture
) -> None:
    """One that exchanges, inside or outside, is enough; otherwise the innermost is named."""
    inside, scaled, plain = (keras.optimizers.SGD(name=name) for name in ("a", "b", "innermost"))
    inside.exchanger = scaled.exchanger = object()
    around, scales = Around(), keras.optimizers.LossScaleOptimizer(scaled)
    around.inside = inside
    steps = [steps_of(one, traced, method) for one in (around, scales)]
    for step in steps * 2:
        step()
    watch.look()
    assert "not wrapped" not in caplog.text
    step = steps_of(keras.optimizers.LossScaleOptimizer(plain), traced, method)
    step()
    step()
    watch.look()
    assert "'innermost' is not wrapped" in caplog.text


class CallsFirst(keras.optimizers.SGD):
    """A user's own, which lets another optimizer take a step before its own."""

    other: Any = None

    def apply(self, grads: Any, trainable_variables: Any = None) -> None:
        self.other.apply(grads, trainable_variables)
        super().apply(grads, trainable_variables)


def test_an_optimizer_that_a_wrapped_one_calls_is_not_named(
    watch: UnwrappedOptimizers, caplog: pytest.LogCaptureFixture
) -> None:
    def work(comm: Comm) -> None:
        optimizer = copy_with(ExchangesGradients, CallsFirst())
        optimizer.exchanger = Exchanger(comm, Scheme(), ExchangeSettings())
        optimizer.other = keras.optimizers.SGD()
        step = steps_of(optimizer, traced=False)
        step()
        step()

    ThreadComm.run(Topology(1, 1), work)
    watch.look()
    assert "not wrapped" not in caplog.text


def test_an_optimizer_that_is_gone_is_named_and_its_number_is_nobodys(
    watch: UnwrappedOptimizers, caplog: pytest.LogCaptureFixture
) -> None:
    watch._ends.set()  # Only the look at the end sees it
    optimizer = keras.optimizers.SGD(name="gone")
    step = steps_of(optimizer, traced=True)
    step()
    step()
    (key,) = watch._traced
    assert key == id(optimizer)
    del step, optimizer
    gc.collect()
    watch.end()
    assert "'gone' is not wrapped" in caplog.text


def test_looks_leave_other_threads_alone(watch: UnwrappedOptimizers) -> None:
    """A look held every object of the process for a moment, also tuples under construction.

    Python extends a tuple in place only if it has no other reference, so the thread that built it
    got a SystemError. Asking for the referrers of the optimizers' classes returned objects under
    construction, which caused a segmentation fault on 8 ranks.
    """
    step = steps_of(keras.optimizers.SGD(), traced=True)
    step()
    stop, failed = threading.Event(), []

    def make_tuples() -> None:
        try:
            while not stop.is_set():
                tuple(number for number in range(3000))
        except SystemError as error:
            failed.append(error)

    threads = [threading.Thread(target=make_tuples) for _ in range(4)]
    for thread in threads:
        thread.start()
    for _ in range(20):
        watch.look()
    stop.set()
    for thread in threads:
        thread.join()
    assert not failed

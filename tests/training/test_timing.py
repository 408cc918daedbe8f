"""Stamps of a step are of results that exist, also where an op ends when it is only queued."""

from __future__ import annotations

import time
from types import SimpleNamespace

import pytest
import tensorflow as tf

from tfcommx.training import steps


@pytest.mark.parametrize("queued", [True, False])
def test_a_stamp_is_the_time_after_its_tensors(
    queued: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With asynchronous completion the clock was read when the exchange had been queued."""
    waited: list[list[tf.Tensor]] = []
    after = steps.after

    def noted(number: tf.Tensor, tensors: list[tf.Tensor]) -> tf.Tensor:
        waited.append(tensors)
        return after(number, tensors)

    monkeypatch.setattr(steps, "after", noted)
    stamp = tf.Variable(0.0, dtype=tf.float64, trainable=False)

    @tf.function(autograph=False)
    def step(value: tf.Tensor) -> tf.Tensor:
        gradients = [tf.square(value), tf.IndexedSlices(value[:, None], tf.range(3))]
        with steps._stamped(stamp, gradients, queued):
            return tf.identity(value)

    before = time.time()
    step(tf.ones([3]))
    assert before <= stamp.numpy() <= time.time()
    assert list(map(len, waited)) == [3] * queued


@pytest.mark.parametrize("jump", [-7200.0, 7200.0])
def test_a_clock_that_is_set_changes_no_duration(
    jump: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An epoch in which NTP set the clock back by two hours had taken -7199 s."""
    monkeypatch.setattr(steps, "exchanger_of", lambda model: SimpleNamespace(runs=True))
    wall, moved, began = time.time, [0.0], time.monotonic()
    monkeypatch.setattr(steps.time, "time", lambda: wall() + moved[0])
    timing = steps.Timing()
    timing.on_train_begin()
    timing.on_epoch_begin(0)
    for batch in range(3):
        timing.on_train_batch_begin(batch)
        timing.arrived.assign(steps.time.time())
        if batch == 1:
            moved[0] = jump
        time.sleep(0.02)
        timing.ready.assign(steps.time.time())
        timing.exchanged.assign(steps.time.time())
        timing.on_train_batch_end(batch)
    seconds = timing.epoch_seconds()
    assert all(value >= 0 for value in seconds.values())
    assert 0.06 <= sum(seconds.values()) <= time.monotonic() - began
    assert timing.step_seconds() >= 0.06

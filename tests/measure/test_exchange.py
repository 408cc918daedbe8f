"""A measured step has the time at which each bucket's sums are ready."""

from __future__ import annotations

import time
from collections.abc import Mapping

import keras
import numpy as np
import tensorflow as tf

from tfcommx.core import Scheme, Topology
from tfcommx.measure.exchange import measure_exchange
from tfcommx.planner.plan import Gradient, make_plan

MESSAGE_S = 0.1


def test_messages_end_when_their_sums_are_there() -> None:
    """An exchange that waits for a known time, bucket after bucket, in the plan's order."""
    layers = [keras.layers.Input((8,)), *(keras.layers.Dense(8, use_bias=False) for _ in range(2))]
    layers.append(keras.layers.BatchNormalization(center=False, scale=False))
    net = keras.Sequential(layers, name="net")
    net.compile("sgd", loss="mse", jit_compile=False)
    gradients = [Gradient(one.path, (8, 8), "float32") for one in net.trainable_variables]
    plan = make_plan(gradients, {"*": Scheme(merging="each")}, Topology(2, 1))

    def wait(value: np.ndarray) -> np.ndarray:
        time.sleep(MESSAGE_S)
        return value

    def exchange(given: Mapping[str, tf.Tensor]) -> dict[str, tf.Tensor]:
        # Stateful: one after the other
        return {
            name: tf.ensure_shape(tf.numpy_function(wait, [given[name]], tf.float32), (8, 8))
            for bucket in plan.buckets
            for name in bucket.variables
        }

    data = [(np.ones((4, 8), "float32"), np.ones((4, 8), "float32"))]
    before = net.get_weights()
    found = measure_exchange(net, data, plan, exchange, steps=2)
    messages = [span for span in found.timeline.spans if span.kind == "message"]
    assert [span.bucket for span in messages] == [0, 1]
    first, second = messages
    assert first.end_s - first.start_s >= 0.9 * MESSAGE_S and first.resource == "between"
    assert second.start_s == first.end_s and second.end_s - second.start_s >= 0.9 * MESSAGE_S
    assert found.timeline.step_s >= 2 * MESSAGE_S and found.plan == plan
    kinds = {span.kind for span in found.timeline.spans}
    assert kinds == {"forward", "backward", "message", "update"}
    for one, other in zip(before, net.get_weights(), strict=True):
        np.testing.assert_array_equal(one, other)

"""A profile says when gradients are ready: of layers whose passes take a known time."""

from __future__ import annotations

import time
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfcommx as cx
from tfcommx.core import ConfigurationError, Profile
from tfcommx.keras_internals.names import AGREED_NAMES
from tfcommx.measure import profile as measuring
from tfcommx.measure.exchange import measure_exchange
from tfcommx.measure.profile import measure, profile
from tfcommx.planner.plan import Gradient, make_plan
from tfcommx.wire import codec

FORWARD_S, BACKWARD_S = 0.05, 0.2


def waits(tensor: tf.Tensor, seconds: float) -> tf.Tensor:
    """Return the tensor, after some time."""

    def wait(value: np.ndarray) -> np.ndarray:
        time.sleep(seconds)
        return value

    # Not stateful, as other operations: TensorFlow prunes it if its result is unused
    waited = tf.numpy_function(wait, [tensor], tensor.dtype, stateful=False)
    return tf.ensure_shape(waited, tensor.shape)


class Slow(keras.layers.Layer):
    """A layer without weights whose passes take known times."""

    def call(self, inputs: Any) -> Any:
        @tf.custom_gradient
        def slow(value: tf.Tensor) -> Any:
            return waits(value, FORWARD_S), lambda up: waits(up, BACKWARD_S)

        return slow(inputs)


def model() -> keras.Model:
    net = keras.Sequential(
        [
            keras.layers.Input((16,)),
            keras.layers.Dense(64, name="first"),
            keras.layers.BatchNormalization(name="norm"),
            Slow(),
            keras.layers.Dense(4, name="last"),
        ],
        name="net",
    )
    net.compile(keras.optimizers.Adam(0.01), loss="mse", jit_compile=False)
    return net


DATA = [(np.ones((8, 16), "float32"), np.ones((8, 4), "float32"))]


def test_gradients_are_ready_when_their_layers_are_done_and_nothing_changes() -> None:
    net = model()
    before = [variable.numpy() for variable in (*net.variables, *net.optimizer.variables)]
    found = measure(net, DATA, steps=4)
    ready = {row.name: row.ready_s for row in found.profile.variables}
    # Backward order: the last layer's first, before the slow layer's backward pass
    assert list(ready) == [variable.path for variable in reversed(net.trainable_variables)]
    early = [seconds for name, seconds in ready.items() if "last" in name]
    late = [seconds for name, seconds in ready.items() if "last" not in name]
    assert max(early) + 0.4 * BACKWARD_S < min(late) <= found.profile.backward_s
    assert min(late) >= BACKWARD_S
    assert found.profile.forward_s >= FORWARD_S and found.profile.steps == 4
    assert found.profile.batch == 8 and found.profile.update_s > 0
    # The parts are the step
    parts = found.profile.forward_s + found.profile.backward_s
    assert found.plain_s >= FORWARD_S + BACKWARD_S and parts <= 1.5 * found.plain_s
    after = [variable.numpy() for variable in (*net.variables, *net.optimizer.variables)]
    for one, other in zip(before, after, strict=True):
        np.testing.assert_array_equal(one, other)


def test_a_profile_of_a_wrapped_model_fits_its_plan() -> None:
    cx.init()
    inputs = keras.Input((5,), dtype="int32")
    outputs = keras.layers.Dense(3)(keras.layers.Embedding(50, 8)(inputs))
    net = keras.Model(inputs, outputs)
    optimizer = cx.DistributedOptimizer(keras.optimizers.SGD(0.1))
    net.compile(optimizer, loss="mse", jit_compile=False)
    batch = (np.zeros((4, 5), "int32"), np.zeros((4, 5, 3), "float32"))
    found = cx.profile(net, [batch, batch], steps=2, rule="mstopk", density=0.1)
    assert found.timed and found.density == 0.1
    assert all(row.selection_s is not None for row in found.variables)
    assert Profile.from_json(found.to_json()) == found
    gradients = [Gradient(one.path, tuple(one.shape), "float32") for one in net.trainable_variables]
    scheme = cx.Scheme(merging="mg_wfbp")
    plan = make_plan(gradients, {"*": scheme}, cx.Topology(2, 1), profile=found)
    assert sum(len(bucket.variables) for bucket in plan.buckets) == 3


def test_gradients_of_embeddings_are_ready_when_they_are_dense(monkeypatch: Any) -> None:
    shapes, given = [], measuring.stamp
    monkeypatch.setattr(measuring, "stamp", lambda one: (shapes.append(one.shape), given(one))[1])
    net = keras.Sequential([keras.layers.Input((5,), dtype="int32"), keras.layers.Embedding(50, 8)])
    net.compile("sgd", loss="mse", jit_compile=False)
    profile(net, [(np.zeros((4, 5), "int32"), np.zeros((4, 5, 8), "float32"))], steps=1)
    assert shapes == [[], [50, 8]]


def test_the_time_of_a_selection_is_also_that_of_merging(monkeypatch: Any) -> None:
    merge = codec.merge
    slow = lambda *given: waits(merge(*given), FORWARD_S)  # noqa: E731
    monkeypatch.setattr(codec, "merge", slow)
    found = profile(model(), DATA, steps=1, rule="mstopk", density=0.1)
    assert all(row.selection_s >= FORWARD_S for row in found.variables)


class WithEmpty(keras.layers.Layer):
    """A product, and a variable of no entries, which the exchange sends, too."""

    def build(self, shape: Any) -> None:
        self.empty = self.add_weight(shape=(0, 3), name="empty")
        self.kernel = self.add_weight(shape=(shape[-1], 4), name="kernel")

    def call(self, inputs: Any) -> Any:
        return keras.ops.matmul(inputs, self.kernel) + keras.ops.sum(self.empty)


def test_a_variable_of_no_entries_is_measured_with_the_others() -> None:
    net = keras.Sequential([keras.layers.Input((16,)), WithEmpty(name="layer")])
    net.compile("sgd", loss="mse", jit_compile=False)
    found = profile(net, DATA, steps=1, rule="mstopk")
    assert [row.shape for row in found.variables] == [(16, 4), (0, 3)]
    # The other sum of the bucket tells when its message ends
    gradients = [Gradient(row.name, row.shape, row.dtype) for row in found.variables[::-1]]
    plan = make_plan(gradients, {"*": cx.Scheme(merging="single")}, cx.Topology(2, 1))
    step = measure_exchange(
        net, DATA, plan, lambda given: {key: waits(given[key], FORWARD_S) for key in given}, steps=1
    )
    (message,) = (span for span in step.timeline.spans if span.kind == "message")
    assert message.end_s - message.start_s >= 0.9 * FORWARD_S


def test_what_cannot_be_measured_is_refused() -> None:
    net = model()
    with pytest.raises(ConfigurationError):
        profile(net, [])
    with pytest.raises(ConfigurationError, match=r"steps=0\b"):
        profile(net, DATA, steps=0)
    with pytest.raises(ConfigurationError, match="'loose'"):
        profile(
            keras.Sequential([keras.layers.Input((2,)), keras.layers.Dense(1)], name="loose"), DATA
        )
    with pytest.raises(ConfigurationError, match=r"'mstop'.*'mstopk'"):
        profile(net, DATA, steps=1, rule="mstop")


def test_variables_that_the_loss_does_not_depend_on_are_left_out() -> None:
    """Keras exchanges none of their gradients; a constant in their place would be ready at once."""
    inputs = keras.Input((16,))
    outputs = keras.layers.Dense(4, name="used")(inputs)
    unused = keras.layers.Dense(4, name="unused")(inputs)
    net = keras.Model(inputs, [outputs, unused])
    net.compile("sgd", loss=["mse", None], jit_compile=False)
    found = profile(net, DATA, steps=2)
    assert [row.name for row in found.variables] == ["used/bias", "used/kernel"]
    assert found.forward_s > 0


def test_variables_of_equal_paths_get_the_names_that_plans_give_them() -> None:
    """As of two networks of keras.applications, whose layers have the same names."""
    cx.init()
    inputs, parts = keras.Input((16,)), []
    for name in ("one", "other"):
        of_part = keras.Input((16,))
        outputs = keras.layers.Dense(4, name="same")(of_part)
        parts.append(keras.Model(of_part, outputs, name=name)(inputs))
    net = keras.Model(inputs, keras.layers.Add()(parts))
    net.compile("sgd", loss="mse", jit_compile=False)
    names = ["same/bias#2", "same/kernel#2", "same/bias", "same/kernel"]
    assert [row.name for row in profile(net, DATA, steps=1).variables] == names
    # Of a wrapped one: the names of its plan
    net.compile(cx.DistributedOptimizer(keras.optimizers.SGD(0.1)), loss="mse", jit_compile=False)
    net.train_on_batch(*DATA[0])
    (planned,) = net.optimizer.exchanger.runs
    assert [row.name for row in profile(net, DATA, steps=1).variables] == list(reversed(planned))
    assert list(planned) == list(reversed(names))


def test_a_profile_has_the_names_that_ranks_agreed_on() -> None:
    """A rank that built another model first has other paths than its plan."""
    net = model()
    for variable in net.trainable_variables:
        AGREED_NAMES[variable] = f"agreed/{variable.path}"
    names = [row.name for row in profile(net, DATA, steps=1).variables]
    assert names == [f"agreed/{one.path}" for one in reversed(net.trainable_variables)]


@pytest.mark.extended
@pytest.mark.parametrize("base", [keras.optimizers.Adam, cx.optimizers.LAMB])
@pytest.mark.parametrize("wrapped", [False, True])
def test_an_optimizer_that_keras_does_not_know_by_name_is_timed(base: type, wrapped: bool) -> None:
    cx.init()
    mine = type("Mine", (base,), {"__module__": __name__})(0.01)
    net = model()
    net.compile(cx.DistributedOptimizer(mine) if wrapped else mine, loss="mse", jit_compile=False)
    assert sum(row.update_s for row in profile(net, DATA, steps=1).variables) > 0

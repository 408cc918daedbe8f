"""Models that differ between ranks under equal weights are refused, or made equal.

BroadcastState compared variables by position and nothing else, and CompareReplicas found such
replicas identical. Ranks trained each other's embeddings where layers were made in the order of a
set (loss 2.7 in place of 0), and each rank normalised with different constants after `adapt`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import keras
import numpy as np
import pytest
import tensorflow as tf
from drawing import case
from rank_helpers import compiled, fit, weights

import tfcommx as cx
from tfcommx import callbacks
from tfcommx.collectives import process
from tfcommx.collectives.comm import Comm
from tfcommx.optim import replica_forms
from tfcommx.optim.broadcast import require_same_order
from tfcommx.optim.replica_outputs import require_equal_outputs

layers = keras.layers


def net_of(*stack: keras.layers.Layer, shape: Any = (4,), dtype: Any = None) -> keras.Model:
    return keras.Sequential([keras.Input(shape, dtype=dtype), *stack])


def tables_in_order(names: str) -> keras.Model:
    inputs = {name: keras.Input((), dtype="int32", name=name) for name in names}
    tables = [layers.Embedding(5, 2, name=f"table_{name}")(inputs[name]) for name in names]
    return keras.Model(inputs, layers.Dense(1)(layers.Concatenate()(tables)))


class RandomShift(keras.layers.Layer):
    """Adds a constant that NumPy draws while the layer is built."""

    def build(self, shape: Any) -> None:
        self.shift = np.random.default_rng(process.rank()).normal(size=shape[-1])

    def call(self, inputs: tf.Tensor) -> tf.Tensor:
        return inputs + tf.cast(self.shift, inputs.dtype)


class Scaled(keras.layers.Layer):
    """Multiplies by an attribute that no config holds."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = 1.0 + process.rank()

    def call(self, inputs: tf.Tensor) -> tf.Tensor:
        return inputs * self.factor


def lambda_of(rank: int) -> keras.layers.Layer:
    mask = np.random.default_rng(rank).normal(size=4).astype("float32")
    return layers.Lambda(lambda inputs: inputs * mask)


def twice_in_order(rank: int) -> keras.Model:
    """Two layers that Keras names, of equal shapes, called in another order."""
    first, second = layers.Dense(4, activation="relu"), layers.Dense(4)
    first.build((None, 4)), second.build((None, 4))
    order = [first, second] if rank == 0 else [second, first]
    net = net_of(first, second, layers.Dense(1))
    inputs = keras.Input((4,))
    outputs = inputs
    for layer in order:
        outputs = layer(outputs)
    assert net.built

    class Ordered(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second, self.out = first, second, net.layers[-1]
            self.built = True

        def call(self, inputs: tf.Tensor) -> tf.Tensor:
            for layer in order:
                inputs = layer(inputs)
            return self.out(inputs)

    return Ordered()


def frozen(rank: int) -> keras.Model:
    net = net_of(layers.Dense(3, name="base"), layers.Dense(1))
    net.get_layer("base").trainable = rank == 0
    return net


def words(rank: int) -> keras.Model:
    lookup = layers.StringLookup(vocabulary=["cat", "dog"] if rank == 0 else ["dog", "cat"])
    return net_of(lookup, layers.Embedding(3, 2), layers.Flatten(), shape=(4,), dtype="string")


def bins(rank: int) -> keras.Model:
    split = layers.Discretization(num_bins=3)
    split.adapt(np.arange(9.0) * (1 + rank))
    return net_of(split, layers.Embedding(3, 2), layers.Flatten())


def hashed(rank: int) -> keras.Model:
    salted = layers.Hashing(num_bins=3, salt=7 + rank)
    return net_of(salted, layers.Embedding(3, 2), layers.Flatten(), dtype="int32")


def stack(make: Callable[[int], keras.layers.Layer]) -> Callable[[int], keras.Model]:
    return lambda rank: net_of(make(rank), layers.Dense(1))


REFUSED = {
    "order of named layers": (
        lambda rank: tables_in_order("abc" if rank == 0 else "cab"),
        "'table_a/embeddings'.*rank 0.*rank 1.*'table_c/embeddings'",
    ),
    "named otherwise": (
        stack(lambda rank: layers.Dense(4, name="left" if rank == 0 else "right")),
        "left/kernel'.*right/kernel'",
    ),
    "another class": (
        stack(lambda rank: (layers.ReLU if rank == 0 else layers.Softmax)()),
        "ReLU.*rank 0.*Softmax.*rank 1",
    ),
    "rate of dropout": (
        stack(lambda rank: layers.Dropout(0.1 * (1 + rank))),
        "rate = 0.1",
    ),
    "activation": (stack(lambda rank: layers.Dense(4, ["relu", "tanh"][rank])), "activation"),
    "regularizer": (
        stack(lambda rank: layers.Dense(4, kernel_regularizer=keras.regularizers.L2(1 + rank))),
        "regularizer",
    ),
    "regularizer on one rank": (
        stack(lambda rank: layers.Dense(4, kernel_regularizer="l2" if rank else None)),
        "kernel_regularizer = None.*L2",
    ),
    "renormalisation": (
        stack(lambda rank: layers.BatchNormalization(momentum=0.9 + 0.05 * rank)),
        "momentum",
    ),
    "policy": (
        stack(lambda rank: layers.Dense(4, dtype=["float32", "mixed_bfloat16"][rank])),
        "float32.*mixed_bfloat16",
    ),
    "frozen on one rank": (frozen, "dense.*trainable|base/kernel.*trainable"),
    "vocabulary": (words, "string_lookup.*3"),
    "bins": (bins, "discretization.*2"),
    "salt": (hashed, "salt"),
    "random constant": (stack(lambda rank: RandomShift()), r"'random_shift.*\bshift\b"),
    "attribute": (stack(lambda rank: Scaled()), r"'scaled.*\bfactor\b"),
    "closure": (stack(lambda_of), "'lambda"),
    "order of calls": (twice_in_order, "output 0.*rank 0.*rank 1"),
}


def data_of(net: keras.Model) -> tuple[Any, np.ndarray]:
    """Return eight samples for a model's inputs, equal on all ranks, and labels."""
    numbers = np.random.default_rng(3)

    def sample(tensor: Any) -> np.ndarray:
        shape = (8, *(tensor.shape[1:]))
        if tensor.dtype == "string":
            return numbers.choice(["cat", "dog"], shape)
        if tensor.dtype == "int32":
            return numbers.integers(0, 5, shape).astype("int32")
        return numbers.normal(size=shape).astype("float32")

    inputs = net.inputs if hasattr(net, "inputs") and net.inputs else [keras.Input((4,))]
    given = {one.name: sample(one) for one in inputs} if len(inputs) > 1 else sample(inputs[0])
    if inputs[0].dtype == "string":
        given = tf.constant(given)
    return given, np.ones((8, 1), "float32")


def train(net: keras.Model, *extra: Any, optimizer: Any = None, loss: Any = "mse") -> None:
    wrapped = cx.DistributedOptimizer(optimizer or keras.optimizers.SGD(0.01), cx.Scheme())
    net.compile(wrapped, loss, jit_compile=False)
    x, y = data_of(net)
    beginning = extra or (callbacks.BroadcastState(),)
    net.fit(x, y, batch_size=4, shuffle=False, verbose=0, callbacks=list(beginning))


# Found as a regularizer is, in the config of a layer
ALIKE = {"rate of dropout", "activation", "regularizer on one rank", "renormalisation", "salt"}


@pytest.mark.parametrize("name", [case(name, kept=name not in ALIKE) for name in REFUSED])
def test_models_that_differ_are_refused(comm: Comm, name: str) -> None:
    build, difference = REFUSED[name]
    net = build(comm.rank)
    if comm.topology.size == 1:
        train(net)
        return
    with pytest.raises(cx.ConfigurationError, match=f"(?s){difference}"):
        train(net)


def test_settings_of_compile_that_differ_are_refused(comm: Comm) -> None:
    if comm.topology.size == 1:
        pytest.skip("takes several ranks")
    net = net_of(layers.Dense(1))
    with pytest.raises(cx.ConfigurationError, match=r"'sgd.*momentum = 0\.5\b.*rank 0\b"):
        train(net, optimizer=keras.optimizers.SGD(0.1, momentum=0.5 + 0.1 * comm.rank))
    steps = 2 if comm.rank else None
    with pytest.raises(cx.ConfigurationError, match=r"gradient_accumulation_steps = None\b.* 2\b"):
        train(net, optimizer=keras.optimizers.SGD(0.1, gradient_accumulation_steps=steps))
    rates = keras.optimizers.schedules.ExponentialDecay(0.1 * (1 + comm.rank), 10, 0.9)
    with pytest.raises(cx.ConfigurationError, match=r"learning_rate"):
        train(net, optimizer=keras.optimizers.SGD(rates))
    scale = 1.0 + comm.rank
    with pytest.raises(cx.ConfigurationError, match=r"\bloss\b.*rank 0\b.*rank 1\b"):
        train(net, loss=lambda y, out: scale * tf.reduce_mean(tf.square(y - out)))


def test_other_numbers_of_keras_pair_by_position(comm: Comm) -> None:
    """A rank that made layers before, in another order, has other numbers for the same layers."""
    if comm.rank:
        layers.Dense(1), layers.Dense(2)
    second = layers.Dense(1) if comm.rank else None
    first = layers.Dense(4)
    both_ways = layers.Bidirectional(layers.SimpleRNN(2, unroll=True))
    net = net_of(both_ways, first, second or layers.Dense(1), shape=(3, 4))
    train(net)
    everyone = comm.gather_objects([value.tobytes() for value in weights(net)])
    assert all(other == everyone[0] for other in everyone)


@pytest.mark.parametrize("how", ["each rank adapts", "one rank loads"])
def test_normalization_uses_the_weights_that_it_has(comm: Comm, how: str, folder: Any) -> None:
    def build() -> keras.Model:
        return net_of(layers.Normalization(), layers.Dense(1))

    net, data = build(), np.random.default_rng(comm.rank).normal(10 * comm.rank, 1, (64, 4))
    if how == "each rank adapts":
        net.layers[0].adapt(data)
    else:
        train(net)  # has traced a step with the constants of before
        if comm.rank == 0:
            other = build()
            other.layers[0].adapt(100 + data)
            other.save_weights(folder / "old.weights.h5")
            net.load_weights(folder / "old.weights.h5")
    train(net)
    norm = net.layers[0]
    np.testing.assert_array_equal(np.ravel(norm.mean), norm.adapt_mean.numpy())
    probe = np.full((1, 4), 5.0, "float32")
    everyone = comm.gather_objects((norm.adapt_mean.numpy(), net.predict(probe, verbose=0)))
    for mean, output in everyone:
        np.testing.assert_array_equal(mean, everyone[0][0])
        np.testing.assert_array_equal(output, everyone[0][1])


class Noise(keras.layers.Layer):
    """Adds noise in inference mode, too, and counts its calls."""

    def __init__(self, seed: int | None) -> None:
        super().__init__()
        self.generator = None if seed is None else keras.random.SeedGenerator(seed)

    def build(self, shape: Any) -> None:
        self.calls = self.add_weight(shape=(), initializer="zeros", trainable=False, name="calls")

    def call(self, inputs: tf.Tensor) -> tf.Tensor:
        self.calls.assign_add(1.0)
        if self.generator is None:
            return inputs + tf.random.normal(tf.shape(inputs))
        return inputs + keras.random.normal(tf.shape(inputs), seed=self.generator)


@pytest.mark.extended
def test_random_layers_raise_no_alarm_and_no_state_changes(
    comm: Comm, caplog: pytest.LogCaptureFixture
) -> None:
    """Statistics, counts of calls and seeds are the same with and without the comparison."""
    seen = []
    for compare in (False, True):
        keras.utils.set_random_seed(4)
        net = net_of(
            Noise(7 + comm.rank),
            layers.Dropout(0.5, seed=comm.rank),
            layers.BatchNormalization(),
            layers.Dense(1),
        )
        train(net, callbacks.BroadcastState(compare=compare))
        seen.append([one.numpy() for one in net.variables if "dense" not in one.path])
        seen[-1] += weights(net)
    for one, other in zip(*seen, strict=True):
        np.testing.assert_array_equal(one, other)

    tf.random.set_seed(comm.rank)
    with caplog.at_level(logging.WARNING, "tfcommx"):
        train(net_of(Noise(None), layers.Dense(1)))
    told = [one for one in caplog.records if "other outputs each time" in one.getMessage()]
    assert len(told) == (comm.topology.size > 1 and comm.rank == 0)


def test_the_first_batch_is_trained_once(comm: Comm) -> None:
    """The comparison takes several batches of the data set and returns them to the training."""
    results = []
    for compare in (False, True):
        taken: list[int] = []

        def rows(taken: list[int] = taken) -> Any:
            for row in range(11):
                taken.append(row)
                yield {"a": [row + comm.rank], "b": ["cat"]}, [1.0]

        spec = (
            {
                "a": tf.TensorSpec([1], tf.float32),
                "b": tf.TensorSpec([1], tf.string),
            },
            tf.TensorSpec([1], tf.float32),
        )
        data = tf.data.Dataset.from_generator(rows, output_signature=spec).batch(2)
        keras.utils.set_random_seed(2)
        a, b = keras.Input((1,), name="a"), keras.Input((1,), dtype="string", name="b")
        word = layers.Flatten()(
            layers.Embedding(3, 1)(layers.StringLookup(vocabulary=["cat", "dog"])(b))
        )
        net = keras.Model({"a": a, "b": b}, layers.Dense(1)(layers.Concatenate()([a, word])))
        traces: list[int] = []

        def loss(y: Any, out: Any, traces: list[int] = traces) -> Any:
            traces.append(1)
            return tf.reduce_mean(tf.square(y - out))

        net.compile(
            cx.DistributedOptimizer(keras.optimizers.SGD(1e-3), cx.Scheme()),
            loss,
            steps_per_execution=4,
            jit_compile=False,
        )
        done = net.fit(data, verbose=0, callbacks=[callbacks.BroadcastState(compare=compare)])
        results.append((done.history["loss"], weights(net), taken))
        steps = int(net.optimizer.iterations.numpy())
        assert steps == 6 and taken == list(range(11))
    assert results[0][0] == results[1][0]
    for one, other in zip(results[0][1], results[1][1], strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("divided", [False, case(True, kept=False)])
def test_ranks_that_train_on_the_same_data_are_told(
    comm: Comm, caplog: pytest.LogCaptureFixture, divided: bool
) -> None:
    """With equal seeds, and data that no one has divided, two ranks learn as much as one."""
    x = np.random.default_rng(1).normal(size=(32, 4)).astype("float32")
    if divided:
        x = x[comm.rank :: comm.topology.size]
    keras.utils.set_random_seed(4)
    for values in (x, np.ones_like(x)):  # Made-up data are no mistake
        net = net_of(layers.Dense(1))
        net.compile(cx.DistributedOptimizer(keras.optimizers.SGD(0.1)), "mse", jit_compile=False)
        net.fit(values, values[:, :1], verbose=0, callbacks=[callbacks.BroadcastState()])
    told = [text for text in caplog.messages if "same first batch" in text]
    assert len(told) == (comm.topology.size > 1 and comm.rank == 0 and not divided)


class OwnStep(keras.Model):
    """A model without a call."""

    def __init__(self) -> None:
        super().__init__()
        self.part = layers.Dense(1)
        self.part.build((None, 4))
        self.built = True

    def train_step(self, data: Any) -> dict[str, Any]:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(self.part(data["image"]))
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply(gradients, self.trainable_variables)
        return {"loss": loss}


class Fails(OwnStep):
    def call(self, inputs: Any) -> Any:
        raise RuntimeError(f"no model for {object()}")


class ReturnsAnObject(OwnStep):
    def call(self, inputs: Any) -> Any:
        return {"outputs": self.part(inputs["image"]), "owner": object()}


class TakesFourParts(OwnStep):
    """Learns from transitions; `fit` failed in the comparison, which knows three parts."""

    def call(self, inputs: Any) -> Any:
        return self.part(inputs)

    def train_step(self, data: Any) -> dict[str, Any]:
        state, _, _, after = data
        return super().train_step({"image": state + after})


@pytest.mark.extended
@pytest.mark.parametrize("kind", [OwnStep, Fails, ReturnsAnObject, TakesFourParts])
def test_models_with_a_step_of_their_own_train(
    comm: Comm, kind: type[OwnStep], caplog: pytest.LogCaptureFixture
) -> None:
    """One that fails got no warning; one with an object was not compared, for its address."""
    net = kind()
    net.compile(cx.DistributedOptimizer(keras.optimizers.SGD(0.1), cx.Scheme()), jit_compile=False)
    image = np.ones((2, 4), "float32")
    parts = (image, np.ones(2), np.ones(2), image) if kind is TakesFourParts else {"image": image}
    data = tf.data.Dataset.from_tensors(parts)
    with caplog.at_level(logging.WARNING, "tfcommx"):
        net.fit(data, verbose=0, callbacks=[callbacks.BroadcastState()])
    warns = kind is Fails and comm.topology.size > 1 and comm.rank == 0
    assert ("were not compared" in caplog.text) == warns


class Difference(NamedTuple):
    left: tf.Tensor
    right: tf.Tensor


class TakesNames(keras.Model):
    def call(self, inputs: Any) -> tf.Tensor:
        return (inputs.left - inputs.right) * (1 + process.rank())


def test_models_whose_inputs_have_names_are_compared(comm: Comm) -> None:
    if comm.topology.size == 1:
        pytest.skip("takes several ranks")
    inputs = Difference(tf.ones([2, 3]), tf.zeros([2, 3]))
    with pytest.raises(cx.ConfigurationError, match=r"output 0\b.*rank 1\b"):
        require_equal_outputs(TakesNames(), (inputs,), 0)


def test_models_with_penalties_are_compared(comm: Comm) -> None:
    """Their loss could not be computed, and a warning said so."""
    if comm.topology.size == 1:
        pytest.skip("takes several ranks")
    net = net_of(layers.Dense(2, kernel_regularizer="l2"))
    net.compile(keras.optimizers.SGD(0.1), lambda _, out: tf.reduce_mean(out) * process.rank())
    cx.broadcast_variables(net.weights)
    with pytest.raises(cx.ConfigurationError, match=r"the loss\b.*rank 1\b"):
        require_equal_outputs(net, (np.ones((2, 4)), np.zeros(2)), 0)


@pytest.mark.extended
def test_models_with_a_loss_of_16_bits_are_compared_and_trained(comm: Comm) -> None:
    """TensorFlow gives NumPy no array for a scalar of bfloat16: `fit` ended with a ValueError."""
    keras.config.set_floatx("bfloat16")
    try:
        optimizer = cx.DistributedOptimizer(keras.optimizers.SGD(0.1))
        net = compiled(optimizer, metrics=["accuracy"])
        assert fit(net, comm, epochs=1).identical and net.weights[0].dtype == "bfloat16"
    finally:
        keras.config.set_floatx("float32")


def test_a_saved_model_may_be_in_a_folder_of_each_rank(comm: Comm, tmp_path: Path) -> None:
    """The path of a TFSMLayer was compared, and refused."""
    plain = net_of(layers.Dense(2))
    plain.export(tmp_path / "saved", verbose=False)
    paths = comm.gather_objects(str(tmp_path))
    assert len(set(paths)) == comm.topology.size
    part = layers.TFSMLayer(str(tmp_path / "saved"), call_endpoint="serve", name="part")
    replica_forms.require_equal_forms(net_of(part))


def test_models_whose_sequences_continue_are_compared(comm: Comm) -> None:
    """Each rank has the states of its rows, which are no difference of the models."""
    recurrent = layers.SimpleRNN(3, stateful=True, kernel_initializer="ones")
    net = keras.Sequential([keras.Input(batch_shape=(2, 3, 1)), layers.Bidirectional(recurrent)])
    cx.broadcast_variables(net.weights)
    own = np.full((2, 3, 1), 0.1 * (comm.rank + 1), "float32")
    net(own)
    both = net.layers[0].forward_layer, net.layers[0].backward_layer
    before = [layer.states[0].numpy() for layer in both]
    require_equal_outputs(net, (own,), 0)
    for layer, states in zip(both, before, strict=True):
        np.testing.assert_array_equal(layer.states[0], states)
        assert np.any(states)


def test_variables_in_another_order_are_refused_in_a_loop(comm: Comm) -> None:
    if comm.topology.size == 1:
        pytest.skip("takes several ranks")
    names = ["b", "a"] if comm.rank else ["a", "b"]
    net = net_of(*[layers.Dense(4, name=f"part_of_{name}") for name in names])
    with pytest.raises(cx.ConfigurationError, match=r"part_of_[ab]/kernel'.*part_of_[ab]/kernel'"):
        cx.broadcast_variables(net.weights)


@pytest.mark.one_rank
def test_ranks_of_another_model_refuse_an_order_too() -> None:
    """Each rank compared only its own: rank 0 waited in a broadcast for the two that refused."""
    names = [["net/dense/kernel", "net/out/kernel"], ["a/kernel", "b/kernel"], ["b/kernel"] * 2]
    require_same_order([*names, ["net_1/dense_7/kernel", "net_1/out_3/kernel"]])
    with pytest.raises(cx.ConfigurationError, match=r"1\b.*'a/kernel'.*\b3\b.*'b/kernel'"):
        require_same_order([*names, names[1][::-1]])


@pytest.mark.one_rank
def test_bins_and_vocabularies_have_digests() -> None:
    first, second = (replica_forms.tables_of(words(rank)) for rank in (0, 1))
    assert len(first) == len(second) == 1 and first != second
    assert not replica_forms.tables_of(compiled(cx.DistributedOptimizer(keras.optimizers.SGD(0.1))))

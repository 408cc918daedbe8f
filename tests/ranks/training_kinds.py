"""Uses of Keras around the training loop, each as one function of a Trainer.

The same function trains on ranks, each with its own batches, and in one process with the joint
batches of all ranks. It returns the weights after each step.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

import tfcommx as cx
from tfcommx.collectives.comm import Comm
from tfcommx.kernels.traced import untraced
from tfcommx.optim.wrapped import exchanger_in

layers = keras.layers
# Samples of one rank in a step, and steps of an epoch
ROWS, STEPS = 6, 4
SCHEMES = {
    "plain": cx.Scheme(),
    "sparse": cx.Scheme("hitopk", "mstopk", 0.1, dense_below=0),
    "momentum": None,
}
Weights = list[list[np.ndarray]]


class Kind(NamedTuple):
    """A use of Keras, and how near its weights come to those of one process."""

    train: Callable[[Trainer], Weights]
    # Largest difference; None: the joint batch has another loss, as with sums over a batch
    tolerance: float | None = 1e-5


KINDS: dict[str, Kind] = {}


def kind(tolerance: float | None = 1e-5) -> Callable[..., Callable[[Trainer], Weights]]:
    """Decorate the training of a kind."""

    def add(train: Callable[[Trainer], Weights]) -> Callable[[Trainer], Weights]:
        KINDS[train.__name__] = Kind(train, tolerance)
        return train

    return add


def cross_entropy() -> keras.losses.Loss:
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)


class Ledger:
    """The sums of the tensors that one wrapped optimizer has sent and received, by variable."""

    def __init__(self, optimizer: keras.optimizers.Optimizer) -> None:
        self.exchanger = exchanger_in(optimizer)
        self.sent: dict[str, tf.Variable] = {}
        self.received: dict[str, tf.Variable] = {}
        self._exchange = self.exchanger.exchange
        self.exchanger.exchange = tf.autograph.experimental.do_not_convert(self.exchange)

    def exchange(self, gradients: Any, rate: tf.Tensor, steps: tf.Tensor) -> list[tf.Tensor]:
        variables = self.exchanger.guard.step.variables
        results = self._exchange(gradients, rate, steps)
        names = self.exchanger.names.of(variables)
        for book, tensors in ((self.sent, gradients), (self.received, results)):
            for name, tensor, variable in zip(names, tensors, variables, strict=True):
                if name not in book:
                    with untraced():
                        zeros = tf.zeros(variable.shape, tf.float64)
                        book[name] = tf.Variable(zeros, trainable=False)
                book[name].assign_add(tf.cast(tensor, tf.float64))
        return results


def require_conservation(comm: Comm, ledgers: Sequence[Ledger], tolerance: float) -> None:
    """Require that received averages plus residuals are what all ranks have sent."""
    # Summed over all optimizers, because one takes residuals of another over
    sent, received, unsent = (defaultdict[str, Any](float) for _ in range(3))
    for ledger in ledgers:
        assert ledger.received, "an optimizer has exchanged nothing"
        for total, book in ((sent, ledger.sent), (received, ledger.received)):
            for name, variable in book.items():
                total[name] = total[name] + variable.numpy()
        for name, residual in ledger.exchanger.export().residuals.items():
            unsent[name] = unsent[name] + np.float64(residual)
    everyone = comm.gather_objects((dict(sent), dict(unsent)))
    for name, average in received.items():
        total = np.asarray(sum(of_rank[name] for of_rank, _ in everyone))
        residuals = sum(of_rank.get(name, 0) for _, of_rank in everyone)
        found = average * comm.topology.size
        if np.ndim(residuals):
            found = found + np.reshape(residuals, total.shape)
        scale = max(1.0, np.max(np.abs(total), initial=0.0))
        np.testing.assert_allclose(found, total, rtol=0, atol=tolerance * scale, err_msg=name)


class Record(keras.callbacks.Callback):
    """Keeps the weights after each batch."""

    def __init__(self, rows: Weights) -> None:
        super().__init__()
        self.rows = rows

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.rows.append([np.array(variable.numpy()) for variable in self.model.weights])


class Trainer:
    """Trains with the batches of some ranks: this one, or all as one process would."""

    def __init__(self, comm: Comm, scheme: str, joint: bool = False) -> None:
        keras.utils.clear_session()
        keras.utils.set_random_seed(1)
        self.scheme, self.joint = scheme, joint
        self.ranks = range(comm.topology.size) if joint else [comm.rank]
        self.ledgers: list[Ledger] = []
        self.rows: Weights = []

    def optimizer(self, rate: Any = 0.05, **options: Any) -> keras.optimizers.Optimizer:
        """Return an optimizer, wrapped unless one process trains with the joint batches."""
        plain: keras.optimizers.Optimizer
        if self.scheme == "momentum":
            plain = cx.optimizers.LowBitSGD(rate, dense_below=8, **options)
        else:
            momentum = 0.9 if self.scheme == "plain" else 0.0
            plain = keras.optimizers.SGD(rate, momentum, **options)
        if self.joint:
            return plain
        wrapped = cx.DistributedOptimizer(plain, SCHEMES[self.scheme])
        self.ledgers.append(Ledger(wrapped))
        return wrapped

    def arrays(self, *shape: int, tokens: int = 0) -> tuple[np.ndarray, np.ndarray]:
        """Return inputs and labels, step by step, in each step those of each rank."""
        numbers = [
            np.random.default_rng([7, rank, step]) for step in range(STEPS) for rank in self.ranks
        ]
        shape = (ROWS, *(shape or (12,)))
        inputs = [
            one.integers(0, tokens, shape, "int32")
            if tokens
            else one.normal(size=shape).astype("float32")
            for one in numbers
        ]
        return np.concatenate(inputs), np.concatenate([one.integers(0, 3, ROWS) for one in numbers])

    def batches(self, *arrays: Any) -> tf.data.Dataset:
        return tf.data.Dataset.from_tensor_slices(arrays).batch(ROWS * len(self.ranks))

    def fit(
        self,
        net: keras.Model,
        optimizer: keras.optimizers.Optimizer | None,
        data: tf.data.Dataset | None = None,
        fit: dict[str, Any] | None = None,
        callbacks: tuple[keras.callbacks.Callback, ...] = (),
        **compile_options: Any,
    ) -> Weights:
        """Train an epoch; return the weights after each step so far. None: do not compile."""
        if optimizer is not None:
            options = {"loss": cross_entropy(), "jit_compile": False, **compile_options}
            net.compile(optimizer, **options)
        data = self.batches(*self.arrays()) if data is None else data
        first = () if self.joint else (cx.callbacks.BroadcastState(),)
        every = [*first, Record(self.rows), *callbacks]
        net.fit(data, verbose=0, callbacks=every, **(fit or {}))
        return self.rows

    def loop(self, step: Callable[[tf.Tensor, tf.Tensor], Any], net: keras.Model) -> Weights:
        """Call a step for each batch; return the weights after each."""
        for inputs, labels in self.batches(*self.arrays()):
            step(inputs, labels)
            self.rows.append([variable.numpy() for variable in net.weights])
        return self.rows


def dense(**options: Any) -> keras.Model:
    return keras.Sequential(
        [
            layers.Input((12,)),
            layers.Dense(16, activation="relu", **options),
            layers.Dense(3),
        ]
    )


# --- Data and losses -----------------------------------------------------------------------------


@kind()
def class_weights(trainer: Trainer) -> Weights:
    weights = {"class_weight": {0: 1.0, 1: 2.0, 2: 0.5}}
    return trainer.fit(dense(), trainer.optimizer(), fit=weights)


@kind()
def ragged_inputs(trainer: Trainer) -> Weights:
    class Net(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.parts = [layers.Embedding(12, 8, mask_zero=True), layers.GlobalAveragePooling1D()]
            self.parts.append(layers.Dense(3))

        def call(self, inputs: Any) -> tf.Tensor:
            if isinstance(inputs, tf.RaggedTensor):
                inputs = inputs.to_tensor(shape=[None, 6])
            for part in self.parts:
                inputs = part(inputs)
            return inputs

    def ragged(tokens: tf.Tensor, labels: tf.Tensor) -> tuple[tf.RaggedTensor, tf.Tensor]:
        lengths = 1 + tf.reduce_sum(tokens, axis=1) % 6
        return tf.RaggedTensor.from_tensor(tokens + 1, lengths), labels

    tokens, labels = trainer.arrays(6, tokens=11)
    net = Net()
    net(tokens)
    return trainer.fit(net, trainer.optimizer(), trainer.batches(tokens, labels).map(ragged))


@kind()
def sparse_inputs(trainer: Trainer) -> Weights:
    inputs, labels = trainer.arrays()
    inputs[np.abs(inputs) < 0.7] = 0
    data = trainer.batches(inputs, labels).map(lambda x, y: (tf.sparse.from_dense(x), y))
    source = layers.Input((12,), sparse=True)
    hidden = layers.Dense(16, activation="relu")(source)
    return trainer.fit(keras.Model(source, layers.Dense(3)(hidden)), trainer.optimizer(), data)


@kind()
def own_loss_and_metrics(trainer: Trainer) -> Weights:
    class Net(keras.Sequential):
        def compute_loss(  # With a metric, as Keras's guide of custom losses
            self, x: Any = None, y: Any = None, y_pred: Any = None, sample_weight: Any = None
        ) -> tf.Tensor:
            loss = cross_entropy()(y, y_pred) + 0.1 * tf.reduce_mean(y_pred**2)
            self.seen.update_state(loss)
            return loss

    net = Net([layers.Input((12,)), layers.Dense(16), layers.Dense(3)])
    net.seen = keras.metrics.Mean(name="seen")
    return trainer.fit(net, trainer.optimizer(), loss=None)


@kind()
def added_losses(trainer: Trainer) -> Weights:
    class Adds(layers.Layer):
        def call(self, inputs: tf.Tensor) -> tf.Tensor:
            self.add_loss(0.1 * tf.reduce_mean(inputs**2))
            return inputs

    net = [layers.Dense(16, kernel_regularizer="l2"), Adds(), layers.Dense(3)]
    return trainer.fit(keras.Sequential([layers.Input((12,)), *net]), trainer.optimizer())


@kind(tolerance=None)
def activity_regularizer(trainer: Trainer) -> Weights:
    return trainer.fit(dense(activity_regularizer="l2"), trainer.optimizer())


# --- Models --------------------------------------------------------------------------------------


@kind()
def many_layers(trainer: Trainer) -> Weights:
    """Masks, attention, a tied embedding, a layer of a layer, a recomputed one, two outputs."""
    source = layers.Input((6,), dtype="int32")
    table = layers.ReversibleEmbedding(11, 8, mask_zero=True)
    tokens = table(source)
    attended = layers.MultiHeadAttention(2, 4)(tokens, tokens)
    mixed = layers.LayerNormalization()(layers.Add()([tokens, attended]))
    mixed = layers.TimeDistributed(layers.Dense(8, kernel_constraint="max_norm"))(mixed)
    shared = layers.Dense(8)
    mixed = shared(shared(mixed))
    mixed = Recomputed(8)(mixed)
    pooled = layers.GlobalAveragePooling1D()(mixed)
    hidden = layers.SpectralNormalization(layers.Dense(8))(pooled)
    nested = keras.Sequential([layers.Input((8,)), keras.Sequential([layers.Dense(3)])])
    outputs = {"label": nested(hidden), "next": table(mixed, reverse=True)}
    net = keras.Model(source, outputs)
    tokens, labels = trainer.arrays(6, tokens=11)
    data = trainer.batches(tokens, labels).map(lambda x, y: (x, {"label": y, "next": (x + 1) % 11}))
    loss = {"label": cross_entropy(), "next": Unmasked()}
    weights = {"label": 1.0, "next": 0.3}
    return trainer.fit(net, trainer.optimizer(), data, loss=loss, loss_weights=weights)


class Recomputed(layers.Dense):
    """Is computed again in the backward pass; Keras's RematScope is for other backends' graphs."""

    def call(self, inputs: tf.Tensor) -> tf.Tensor:
        return keras.remat(lambda one: tf.nn.relu(tf.matmul(one, self.kernel)))(inputs)


class Unmasked(keras.losses.Loss):
    """Cross entropy over all positions: Keras divides by the unmasked ones of each batch."""

    def __call__(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> tf.Tensor:
        losses = tf.nn.sparse_softmax_cross_entropy_with_logits(tf.cast(y_true, tf.int32), y_pred)
        return tf.reduce_mean(losses)


class Odd(layers.Layer):
    """Has weights of unusual dtypes and shapes."""

    def build(self, shape: Any) -> None:
        self.whole = self.add_weight(shape=(3,), dtype="int32", initializer="ones", name="whole")
        self.flag = self.add_weight(shape=(2,), dtype="bool", initializer="zeros", trainable=False)
        self.wide = self.add_weight(shape=(16, 16), dtype="float64", initializer="ones", name="w")
        self.empty = self.add_weight(shape=(0, 4), initializer="zeros", name="empty")
        self.scale = self.add_weight(shape=(), initializer="ones", name="scale")

    def call(self, inputs: tf.Tensor) -> tf.Tensor:
        wide = tf.matmul(tf.cast(inputs, tf.float64), tf.convert_to_tensor(self.wide) / 16)
        return self.scale * tf.cast(wide, inputs.dtype) + tf.reduce_sum(self.empty)


@kind()
def odd_variables(trainer: Trainer) -> Weights:
    net = [layers.Input((12,)), layers.Dense(16), Odd(), layers.Dense(3)]
    return trainer.fit(keras.Sequential(net), trainer.optimizer())


@kind(tolerance=0.03)
def dtype_policies(trainer: Trainer) -> Weights:
    policies = ("mixed_float16", "bfloat16", "float16", "float64", "float32")
    parts = [layers.Dense(3 if one == "float32" else 16, dtype=one) for one in policies]
    return trainer.fit(keras.Sequential([layers.Input((12,)), *parts]), trainer.optimizer())


@kind()
def built_by_the_first_step(trainer: Trainer) -> Weights:
    return trainer.fit(keras.Sequential([layers.Dense(16), layers.Dense(3)]), trainer.optimizer())


@kind(tolerance=None)
def layers_by_condition(trainer: Trainer) -> Weights:
    """Ranks take different branches in the same step."""

    class Net(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second, self.last = (layers.Dense(16) for _ in range(3))

        def build(self, shape: Any) -> None:
            self.first.build(shape)
            self.second.build(shape)
            self.last.build((None, 16))
            self.built = True

        def call(self, inputs: tf.Tensor) -> tf.Tensor:
            takes_first = tf.reduce_mean(inputs) > 0
            hidden = tf.cond(takes_first, lambda: self.first(inputs), lambda: self.second(inputs))
            return self.last(hidden)

    net = Net()
    net.build((None, 12))
    return trainer.fit(net, trainer.optimizer())


# --- Changes in the middle of a training ---------------------------------------------------------


@kind()
def frozen_and_thawed(trainer: Trainer) -> Weights:
    """With and without a second compile, while residuals are unsent."""
    net, optimizer = dense(), trainer.optimizer()
    trainer.fit(net, optimizer)
    net.layers[0].trainable = False
    trainer.fit(net, None)
    trainer.fit(net, optimizer)
    net.layers[0].trainable = True
    return trainer.fit(net, optimizer)


@kind()
def lora_and_int8(trainer: Trainer) -> Weights:
    net = dense()
    trainer.fit(net, trainer.optimizer())
    keras.utils.set_random_seed(5)
    net.layers[0].enable_lora(2)
    trainer.fit(net, trainer.optimizer())
    net.quantize("int8")
    return trainer.fit(net, trainer.optimizer())


@kind()
def gradients_that_are_none_at_times(trainer: Trainer) -> Weights:
    variables = [keras.Variable(np.ones((6, 6), "float32"), name=name) for name in "abc"]
    optimizer = trainer.optimizer()
    optimizer.build(variables)
    for step in range(6):
        parts = [
            [np.random.default_rng([rank, step, n]).normal(size=(6, 6)) for n in range(3)]
            for rank in trainer.ranks
        ]
        gradients: list[Any] = list(np.mean(parts, axis=0).astype("float32"))
        if step % 2:
            gradients[step % 3] = None
        optimizer.apply(gradients, variables)
        trainer.rows.append([variable.numpy() for variable in variables])
    return trainer.rows


# --- Ways to call the step -----------------------------------------------------------------------


@kind()
def several_steps_a_call(trainer: Trainer) -> Weights:
    """Gradients accumulate over two steps, and the last call has one step."""
    optimizer = trainer.optimizer(gradient_accumulation_steps=2)
    return trainer.fit(dense(), optimizer, steps_per_execution=3)


@kind()
def batch_by_batch(trainer: Trainer) -> Weights:
    net = dense()
    net.compile(trainer.optimizer(), loss=cross_entropy(), run_eagerly=True)
    return trainer.loop(net.train_on_batch, net)


@kind()
def xla_in_fit(trainer: Trainer) -> Weights:
    return trainer.fit(dense(), trainer.optimizer(), jit_compile=not trainer.joint)


@kind()
def steps_by_condition(trainer: Trainer) -> Weights:
    net, optimizer = dense(), trainer.optimizer()
    optimizer.build(net.trainable_variables)
    taken = tf.Variable(0)

    @tf.function
    def step(inputs: tf.Tensor, labels: tf.Tensor) -> None:
        with tf.GradientTape() as tape:
            loss = cross_entropy()(labels, net(inputs, training=True))
        gradients = tape.gradient(loss, net.trainable_variables)
        if taken % 2 == 0:
            optimizer.apply(gradients, net.trainable_variables)
        taken.assign_add(1)

    return trainer.loop(step, net)


@kind()
def two_optimizers_of_one_layer(trainer: Trainer) -> Weights:
    class Net(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.trunk, self.heads = layers.Dense(16), [layers.Dense(3), layers.Dense(3)]
            for layer, width in ((self.trunk, 12), *((head, 16) for head in self.heads)):
                layer.build((None, width))
            self.built = True

        def call(self, inputs: tf.Tensor) -> tf.Tensor:
            return self.heads[0](self.trunk(inputs))

        def train_step(self, data: Any) -> dict[str, tf.Tensor]:
            inputs, labels = data
            for optimizer, head in zip(self.optimizers, self.heads, strict=True):
                with tf.GradientTape() as tape:
                    loss = cross_entropy()(labels, head(self.trunk(inputs)))
                variables = [*self.trunk.trainable_variables, *head.trainable_variables]
                optimizer.apply(tape.gradient(loss, variables), variables)
            return {"loss": loss}

    net = Net()
    net.optimizers = [trainer.optimizer(), trainer.optimizer()]
    net.compile(jit_compile=False)
    return trainer.fit(net, None)


@kind()
def falling_rate(trainer: Trainer) -> Weights:
    rate = keras.optimizers.schedules.PiecewiseConstantDecay([1, 2], [0.05, 0.02, 0.01])
    return trainer.fit(dense(), trainer.optimizer(rate, weight_decay=0.1))


@kind()
def swapped_averages(trainer: Trainer) -> Weights:
    data = trainer.batches(*trainer.arrays())
    swap = keras.callbacks.SwapEMAWeights(swap_on_epoch=True)
    optimizer = trainer.optimizer(use_ema=True, ema_momentum=0.5)
    options = {"epochs": 2, "validation_data": data}
    return trainer.fit(dense(), optimizer, data, options, (swap,))

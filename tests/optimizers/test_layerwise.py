"""LARS and LAMB against float64 NumPy, against Keras, and with every option of its optimizers."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from drawing import case

import tfcommx as cx
from tfcommx.kernels.lars import lars_update, lars_update_definition

SHAPES = {"kernel": (31, 17), "bias": (17,), "norm/gamma": (17,), "out": (5003,), "still": (4,)}
STEPS = 50
KINDS = {
    "lars": lambda **more: cx.optimizers.LARS(0.5, weight_decay=0.01, **more),
    "lamb": lambda **more: cx.optimizers.LAMB(0.01, weight_decay=0.01, **more),
}


class Path_(keras.Variable):
    """A variable with the path that a layer would give it."""

    def __init__(self, value: np.ndarray, path: str) -> None:
        super().__init__(value, name=path.replace("/", "_"))
        self._path = path


def started() -> dict[str, np.ndarray]:
    random = np.random.default_rng(3)
    values = {path: random.normal(size=shape) for path, shape in SHAPES.items()}
    values["still"] = np.zeros(SHAPES["still"])  # a norm of zero
    return {path: value.astype(np.float32) for path, value in values.items()}


def gradients(step: int) -> dict[str, np.ndarray]:
    random = np.random.default_rng([7, step])
    values = {path: random.normal(size=shape) for path, shape in SHAPES.items()}
    return {path: value.astype(np.float32) for path, value in values.items()}


def trained(optimizer: keras.optimizers.Optimizer, steps: int = STEPS) -> list[np.ndarray]:
    variables = [Path_(value, path) for path, value in started().items()]
    optimizer.build(variables)
    step = tf.function(lambda *grads: optimizer.apply(list(grads), variables))
    for number in range(steps):
        step(*map(tf.constant, gradients(number).values()))
    return [variable.numpy() for variable in variables]


def rate_of(step: int) -> float:
    return 0.5 / (1 + 0.1 * step)


class Falling(keras.optimizers.schedules.LearningRateSchedule):
    def __call__(self, step: tf.Tensor) -> tf.Tensor:
        return 0.5 / (1 + 0.1 * tf.cast(step, tf.float32))


def excluded(path: str) -> bool:
    return path.endswith(("bias", "gamma"))


def ratio_of(weight: np.ndarray, update: np.ndarray, formula: Any) -> float:
    norms = np.linalg.norm(weight), np.linalg.norm(update)
    return formula(*norms) if min(norms) > 0 else 1.0


def lars_in_float64(momentum: float, nesterov: bool, decay: float) -> list[np.ndarray]:
    weights = {path: value.astype(np.float64) for path, value in started().items()}
    moved = {path: np.zeros_like(value) for path, value in weights.items()}
    for step in range(STEPS):
        for path, gradient in gradients(step).items():
            weight, ratio, own = weights[path], 1.0, 0.0
            if not excluded(path):
                own = decay
                ratio = ratio_of(weight, gradient, lambda w, g: 0.001 * w / (g + decay * w))
            update = rate_of(step) * ratio * (gradient + own * weight)
            moved[path] = momentum * moved[path] - update
            weights[path] = weight + (momentum * moved[path] - update if nesterov else moved[path])
    return list(weights.values())


def lamb_in_float64(decay: float, inside: bool) -> list[np.ndarray]:
    weights = {path: value.astype(np.float64) for path, value in started().items()}
    first = {path: np.zeros_like(value) for path, value in weights.items()}
    second = {path: np.zeros_like(value) for path, value in weights.items()}
    for step in range(STEPS):
        rate = rate_of(step)
        for path, gradient in gradients(step).items():
            first[path] = 0.9 * first[path] + 0.1 * gradient
            second[path] = 0.999 * second[path] + 0.001 * gradient.astype(np.float64) ** 2
            mean = first[path] / (1 - 0.9 ** (step + 1))
            update = mean / (np.sqrt(second[path] / (1 - 0.999 ** (step + 1))) + 1e-7)
            ratio = 1.0
            if not excluded(path):
                if inside:
                    update = update + decay * weights[path]
                else:
                    weights[path] = weights[path] * (1 - rate * decay)
                ratio = ratio_of(weights[path], update, lambda w, u: w / u)
            weights[path] = weights[path] - rate * ratio * update
    return list(weights.values())


@pytest.mark.parametrize(
    ("momentum", "nesterov", "decay"), [(0.9, False, 0.01), (0.9, True, 0.01), (0.0, False, 0.0)]
)
def test_lars_in_float64(momentum: float, nesterov: bool, decay: float) -> None:
    mine = trained(cx.optimizers.LARS(Falling(), momentum, nesterov, weight_decay=decay))
    for one, other in zip(mine, lars_in_float64(momentum, nesterov, decay), strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize(("decay", "inside"), [(0.01, True), (0.01, False), (0.0, True)])
def test_lamb_in_float64(decay: float, inside: bool) -> None:
    mine = trained(cx.optimizers.LAMB(Falling(), weight_decay=decay, decay_in_ratio=inside))
    for one, other in zip(mine, lamb_in_float64(decay, inside), strict=True):
        np.testing.assert_allclose(one, other, rtol=5e-5, atol=5e-5)


@pytest.mark.parametrize("decay", [None, 0.02])
def test_lamb_equals_keras(decay: float | None) -> None:
    ours = cx.optimizers.LAMB(0.02, weight_decay=decay, decay_in_ratio=False, exclude=())
    for one, other in zip(
        trained(ours), trained(keras.optimizers.Lamb(0.02, weight_decay=decay)), strict=True
    ):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


@pytest.mark.usefixtures("native")
@pytest.mark.parametrize("nesterov", [False, True])
def test_the_native_update_equals_its_definition(nesterov: bool) -> None:
    def updated(update: Any) -> list[bytes]:
        weights = [tf.Variable(value) for value in started().values()]
        momenta = [tf.Variable(value[::-1]) for value in started().values()]
        rates, decays = tf.constant([0.1, 0.2, 0.3, 0.4, 0.5]), [0.01, 0.0, 0.0, 0.3, 0.1]
        held = weights[0].read_value(), momenta[3].read_value()
        before = [one.numpy().copy() for one in held]
        for step in range(3):
            grads = [tf.constant(value) for value in gradients(step).values()]
            update(weights, momenta, grads, rates, decays, 0.9, nesterov)
        for one, other in zip(held, before, strict=True):  # tensors read before do not change
            np.testing.assert_array_equal(one.numpy(), other)
        return [one.numpy().tobytes() for one in weights + momenta]

    assert updated(lars_update) == updated(lars_update_definition)


@pytest.fixture
def native() -> None:
    from tfcommx.kernels import loader

    assert loader.library() is not None, "set-up builds the native library"


@pytest.mark.usefixtures("native")
def test_the_native_update_refuses_what_does_not_fit() -> None:
    one, other = tf.Variable([1.0]), tf.Variable([0.0])
    rest = ([0.0], 0.9)
    with pytest.raises(tf.errors.InvalidArgumentError, match=r"float/\[1\]"):
        lars_update([one], [one], [tf.constant([1.0])], tf.constant([0.1]), *rest)
    with pytest.raises(tf.errors.InvalidArgumentError, match=r"\[2\].*float/\[1\]"):
        lars_update([one], [other], [tf.constant([1.0, 2.0])], tf.constant([0.1]), *rest)
    with pytest.raises(tf.errors.InvalidArgumentError, match=r"`rates`.*\b1\b.*\[2\]"):
        lars_update([one], [other], [tf.constant([1.0])], tf.constant([0.1, 2.0]), *rest)


@pytest.mark.parametrize("kind", KINDS)
def test_a_norm_of_zero_has_the_ratio_1(kind: str) -> None:
    """Weights of zero move; a gradient of zero leaves weights without decay as they are."""
    optimizer = cx.optimizers.LARS(0.1) if kind == "lars" else cx.optimizers.LAMB(0.1)
    zero, one = keras.Variable(np.zeros(3, "f")), keras.Variable(np.ones(3, "f"))
    optimizer.apply([tf.ones(3), tf.zeros(3)], [zero, one])
    np.testing.assert_allclose(zero.numpy(), -0.1, rtol=1e-5)
    np.testing.assert_array_equal(one.numpy(), 1)


@pytest.mark.parametrize("kind", KINDS)
def test_excluded_variables_are_found_by_pattern(kind: str) -> None:
    net = keras.Sequential([keras.layers.Dense(3), keras.layers.BatchNormalization()])
    net.build((None, 2))
    optimizer = KINDS[kind]()
    optimizer.build(net.trainable_variables)
    assert optimizer.adapted == (True, False, False, False)
    own = KINDS[kind](exclude=["*dense*"])
    own.build(net.trainable_variables)
    assert own.adapted == (False, False, True, True)


@pytest.mark.parametrize("kind", KINDS)
def test_not_finite_gradients_come_through(kind: str) -> None:
    for value in (np.nan, np.inf):
        weight = keras.Variable(np.ones(3, "f"))
        KINDS[kind]().apply([tf.constant([1.0, value, 1.0])], [weight])
        assert not np.isfinite(weight.numpy()).all()


def network(optimizer: keras.optimizers.Optimizer, **options: Any) -> keras.Model:
    keras.utils.set_random_seed(1)
    net = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(3), keras.layers.Dense(1)])
    net.compile(optimizer, loss="mse", **options)
    return net


def fitted(net: keras.Model, epochs: int = 2) -> list[np.ndarray]:
    x = np.random.default_rng(1).normal(size=(16, 4)).astype("f")
    net.fit(x, x[:, :1] * 2, batch_size=4, epochs=epochs, shuffle=False, verbose=0)
    return [variable.numpy() for variable in net.trainable_variables]


@pytest.mark.parametrize("kind", [case(kind, kept=kind == "lamb") for kind in KINDS])
def test_saved_and_loaded_by_plain_keras(kind: str, tmp_path: Path) -> None:
    """And continues as if it had not stopped."""
    net = network(KINDS[kind](name="own", clipnorm=1.0, exclude=["*bias"]))
    fitted(net)
    net.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    assert type(loaded.optimizer) is type(net.optimizer)
    assert loaded.optimizer.get_config() == net.optimizer.get_config()
    for one, other in zip(fitted(net), fitted(loaded), strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("kind", KINDS)
def test_state_is_what_keras_counts(kind: str) -> None:
    optimizer = KINDS[kind]()
    trained(optimizer, steps=1)
    moments = {"lars": 1, "lamb": 2}[kind]
    assert len(optimizer.variables) == 2 + moments * len(SHAPES)  # iteration, learning rate
    assert copy.deepcopy(optimizer.get_config()) == optimizer.get_config()


@pytest.mark.extended
@pytest.mark.parametrize("kind", [case(kind, kept=kind == "lamb") for kind in KINDS])
def test_compiled_by_xla_it_takes_the_same_steps(kind: str) -> None:
    plain, compiled = network(KINDS[kind]()), network(KINDS[kind](), jit_compile=True)
    for one, other in zip(fitted(plain, 1), fitted(compiled, 1), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_sparse_gradients_and_half_precision(kind: str) -> None:
    """An embedding's gradient becomes dense; float16 variables are updated in float16."""
    dense, sparse = (keras.Variable(np.ones([4, 2], "f")) for _ in range(2))
    rows = tf.IndexedSlices(tf.ones([2, 2]), tf.constant([1, 1]), [4, 2])
    KINDS[kind]().apply([rows], [sparse])
    KINDS[kind]().apply([tf.convert_to_tensor(rows)], [dense])
    np.testing.assert_array_equal(sparse.numpy(), dense.numpy())
    half = keras.Variable(np.ones(3), dtype="float16")
    KINDS[kind]().apply([tf.ones(3, tf.float16)], [half])
    assert half.dtype == "float16" and (half.numpy() < 1).all()


@pytest.mark.parametrize(
    "arguments",
    [
        {"momentum": 1.0},
        {"trust_coefficient": 0.0},
        {"weight_decay": -0.1},
        {"exclude": "*bias"},
    ],
)
def test_wrong_arguments_are_refused(arguments: dict[str, Any]) -> None:
    with pytest.raises(cx.ConfigurationError, match=f"`{next(iter(arguments))}`"):
        cx.optimizers.LARS(0.1, **arguments)


def test_several_replicas_in_one_process_are_refused() -> None:
    class TwoReplicas:
        num_replicas_in_sync = 2

    weight, optimizer = keras.Variable([1.0]), cx.optimizers.LARS(0.1)
    optimizer.build([weight])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tf.distribute, "get_strategy", TwoReplicas)
        with pytest.raises(cx.ConfigurationError, match=r"LARS .*tf\.distribute .*\b2\b"):
            optimizer.apply([tf.ones(1)], [weight])


@pytest.mark.parametrize("kind", KINDS)
def test_what_keras_excludes_from_weight_decay_does_not_decay(kind: str) -> None:
    """Keras's method, beside `exclude`: the ratio stays, the decay is dropped."""
    without = KINDS[kind]()
    without.exclude_from_weight_decay(var_names=["kernel", "out", "still"])
    none = KINDS[kind]()
    none.weight_decay = None
    found = trained(without, 5)
    for mine, expected in zip(found, trained(none, 5), strict=True):
        np.testing.assert_array_equal(mine, expected)
    assert not np.array_equal(found[0], trained(KINDS[kind](), 5)[0])

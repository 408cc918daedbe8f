"""Measure the profile of a model on this rank: the times of its gradients and of its update.

    step    | forward |  grad z  | grad y |   grad x   |
    stamps            |          |        |            |

The step is that of Keras: the model's call, `compute_loss`, gradients. A stamp reads the clock when
one entry of a tensor is on the host. The difference to steps without stamps is their cost.
"""

import contextlib
import itertools
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from tfcommx import selection
from tfcommx.collectives.unwrapped import allow_plain_optimizers
from tfcommx.core import SPARSE_WIRES, ConfigurationError, Profile, VariableProfile
from tfcommx.keras_internals.names import VariableNames
from tfcommx.keras_internals.optimizers import inner_optimizer
from tfcommx.kernels.traced import stamp
from tfcommx.measure.engine import typical_seconds
from tfcommx.wire import codec

# Number of vector lengths for which selection is timed; times of others are interpolated
SELECTION_SIZES = 6
# Number of steps that do not count; the first is traced
WARM_UP = 2


class MeasuredProfile(NamedTuple):
    """A profile, and the time of steps without its stamps."""

    profile: Profile
    # Median seconds of forward and backward pass without stamps, measured alternately
    plain_s: float


def profile(
    model: keras.Model,
    data: Iterable[Any],
    steps: int = 10,
    rule: str | None = None,
    density: float = 0.01,
) -> Profile:
    """Measure the times at which the gradients of a compiled model are ready, without changing it.

    >>> layers = [keras.layers.Input((4,)), keras.layers.Dense(2, name="out")]
    >>> model = keras.Sequential(layers, name="small")
    >>> model.compile("sgd", loss="mse")
    >>> measured = profile(model, [(np.ones((8, 4)), np.ones((8, 2)))], steps=2)
    >>> measured.model, measured.batch, [row.name.rpartition("/")[2] for row in measured.variables]
    ('small', 8, ['bias', 'kernel'])

    Args:
        model: compiled and built model.
        data: batches (inputs, targets) or (inputs, targets, weights), of one shape; repeated if
            they are too few.
        steps: number of steps to measure, >= 1, after two that do not count.
        rule: a selection rule such as "mstopk", whose selection, encoding and merging are timed;
            None: not timed.
        density: entries selected / entries, in (0, 1].

    Returns:
        Variables in backward order; means and standard deviations over the steps.

    **Ranks:** local; the plan of a launch needs one profile, the same on all ranks.
    **Cost:** twice `steps` + 2 steps, two tracings, the temporary state of an optimizer.
    **Raises:** ConfigurationError for a model that is not compiled or not built, or without data.
    """
    return measure(model, data, steps, rule, density).profile


def measure(
    model: keras.Model,
    data: Iterable[Any],
    steps: int = 10,
    rule: str | None = None,
    density: float = 0.01,
) -> MeasuredProfile:
    """Measure a profile, as `profile` does, and the slowdown by its stamps."""
    timing = StepTiming(model, data, steps)
    for _ in range(steps + WARM_UP):
        timing.step()
    return timing.measured(rule, density)


class StepTiming:
    """Times a model's step, one call per step, which allows other measurements in between.

    >>> model = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(2)])
    >>> model.compile("sgd", loss="mse")
    >>> timing = StepTiming(model, [(np.ones((8, 4)), np.ones((8, 2)))])
    >>> for _ in range(3):
    ...     timing.step()
    >>> timing.measured().profile.steps
    1
    """

    def __init__(self, model: keras.Model, data: Iterable[Any], steps: int = 1) -> None:
        """Check the model, and take batches for `steps` steps; see `profile`."""
        self._model, self._variables = model, _check(model, steps)
        self._batches = batches_of(data, steps + WARM_UP)
        # Positions of the variables that have a gradient, the only ones that Keras exchanges
        self._connected: list[int] = []
        self._stamped = _step(model, self._connected, stamps=True)
        self._plain = _step(model, self._connected, stamps=False)
        self._rows: list[np.ndarray] = []
        self._plain_s: list[float] = []

    def step(self) -> None:
        """Take a step with stamps and one without; the first WARM_UP do not count."""
        batch = self._batches[len(self._rows) % len(self._batches)]
        with statistics_kept(self._model):
            start = time.perf_counter()
            stamps = self._stamped(*batch).numpy() - start
            start = time.perf_counter()
            self._plain(*batch).numpy()
            self._plain_s.append(time.perf_counter() - start)
        self._rows.append(stamps)

    def measured(self, rule: str | None = None, density: float = 0.01) -> MeasuredProfile:
        """Return the profile of the steps so far; time selection and update, too."""
        model, batches = self._model, self._batches
        variables = [self._variables[position] for position in self._connected]
        update_s = _update_seconds(model, variables)
        select = _selection_times(variables, rule, density) if rule else lambda size: None
        rows = np.array(self._rows[WARM_UP:])
        all_names = variable_names(model)
        names = [all_names[position] for position in self._connected]
        fields = _profile(model, names, variables, rows, update_s, select)
        samples = int(tf.nest.flatten(batches[0][0])[0].shape[0])
        fields |= {"batch": samples, "steps": len(rows), "density": density if rule else None}
        return MeasuredProfile(Profile(**fields), statistics.median(self._plain_s[WARM_UP:]))


@contextlib.contextmanager
def statistics_kept(model: keras.Model) -> Iterator[None]:
    """Restore the values that steps without update change, such as batch norm's means."""
    values = [variable.numpy() for variable in model.non_trainable_variables]
    try:
        yield
    finally:
        for variable, value in zip(model.non_trainable_variables, values, strict=True):
            variable.assign(value)
        # `compute_loss` has added the batches of the measurement to them
        model.reset_metrics()


def _check(model: keras.Model, steps: int) -> list[keras.Variable]:
    if not model.compiled or not model.built:
        raise ConfigurationError(
            f"A compiled model that is built is required. Received {model.name!r}, which is not "
            f"{'compiled' if model.built else 'built'}. Call model.compile(...), and give it an "
            "Input or call it once."
        )
    if steps < 1 or not model.trainable_variables:
        raise ConfigurationError(
            f"Steps >= 1 and trainable variables are required. Received steps={steps} and "
            f"{len(model.trainable_variables)} variables."
        )
    return list(model.trainable_variables)


def batches_of(data: Iterable[Any], count: int) -> list[tuple[Any, Any, Any]]:
    """Return the first batches as tensors. **Raises:** ConfigurationError if there are none."""
    batches = [_tensors(batch) for batch in itertools.islice(data, count)]
    if not batches:
        raise ConfigurationError("Batches to measure with are required. Received none.")
    return batches


def _tensors(batch: Any) -> tuple[Any, Any, Any]:
    parts = keras.utils.unpack_x_y_sample_weight(batch)
    inputs, targets, weights = tf.nest.map_structure(
        lambda part: None if part is None else tf.convert_to_tensor(part), parts
    )
    return inputs, targets, weights


def _step(model: keras.Model, connected: list[int], stamps: bool) -> Callable[..., tf.Tensor]:
    """Return a traced step without update; it returns times, or entries, of [loss, gradients...].

    Tracing fills `connected` with the positions of the variables that have gradients.
    """

    def step(*batch: Any) -> tf.Tensor:
        loss, gradients = loss_and_gradients(model, batch, model.trainable_variables)
        connected[:] = [
            position for position, gradient in enumerate(gradients) if gradient is not None
        ]
        timed = [with_entries(gradients[position], loss) for position in connected]
        if stamps:
            return tf.stack([stamp(tensor) for tensor in (loss, *timed)])
        # Returned as data, because TensorFlow prunes ops that only a control dependency needs
        entries = [tf.reshape(tensor, [-1])[0] for tensor in (loss, *timed)]
        return tf.stack([tf.cast(entry, tf.float32) for entry in entries])

    traced: Callable[..., tf.Tensor] = tf.function(step, autograph=False)
    return traced


def loss_and_gradients(
    model: keras.Model, batch: Sequence[Any], variables: Sequence[keras.Variable]
) -> tuple[tf.Tensor, list[tf.Tensor | None]]:
    """Return the loss of a batch and the gradients; None for a variable without. Traced code."""
    x, y, weights = batch
    with tf.GradientTape() as tape:
        outputs = model(x, training=True)
        loss = model.compute_loss(x=x, y=y, y_pred=outputs, sample_weight=weights)
    gradients = tape.gradient(loss, [variable.value for variable in variables])
    # Gradients of embeddings become dense, as in an exchange
    return loss, [one if one is None else tf.convert_to_tensor(one) for one in gradients]


def with_entries(tensor: tf.Tensor, loss: tf.Tensor) -> tf.Tensor:
    """Return the tensor to stamp: without entries, the loss, because a stamp copies one."""
    return loss if tensor.shape.num_elements() == 0 else tensor


def variable_names(model: keras.Model) -> list[str]:
    """Return the trainable variables' names in plans: of the optimizer's plan, if it has one."""
    exchanger = getattr(model.optimizer, "exchanger", None)
    names: VariableNames = VariableNames() if exchanger is None else exchanger.names
    return names.of(model.trainable_variables)


def _profile(
    model: keras.Model,
    names: Sequence[str],
    variables: Sequence[keras.Variable],
    stamps: np.ndarray,
    update_s: float,
    select: Callable[[int], float | None],
) -> dict[str, Any]:
    """Turn stamps [steps, 1 + variables], in seconds from the start, into fields of a profile."""
    entries = sum(int(np.prod(variable.shape)) for variable in variables)
    # The stamp of the loss may be late; the backward pass does not wait for it
    forward = stamps.min(axis=1, keepdims=True)
    ready = stamps[:, 1:] - forward
    mean, spread = ready.mean(axis=0), ready.std(axis=0)
    rows = []
    for position in reversed(range(len(variables))):
        variable = variables[position]
        size = int(np.prod(variable.shape))
        rows.append(
            VariableProfile(
                names[position],
                tuple(variable.shape),
                keras.backend.standardize_dtype(variable.dtype),
                ready_s=float(mean[position]),
                ready_spread_s=float(spread[position]),
                selection_s=select(size),
                update_s=update_s * size / entries,
            )
        )
    return {
        "model": model.name,
        "variables": tuple(rows),
        "forward_s": float(forward.mean()),
        "backward_s": float(ready.max(axis=1).mean()),
    }


def _update_seconds(model: keras.Model, variables: Sequence[keras.Variable]) -> float:
    # On copies, because the model must not change
    original = model.optimizer
    # Classes of the user, because Keras does not know their names; without the wrapper's
    classes = {
        cls.__name__: cls
        for part_optimizer in (original, inner_optimizer(original))
        for cls in reversed(type(part_optimizer).__mro__[hasattr(part_optimizer, "exchanger") :])
        if not cls.__module__.startswith("tfcommx.")
    }
    optimizer = keras.optimizers.deserialize(keras.optimizers.serialize(original), classes)
    for part_optimizer in (optimizer, inner_optimizer(optimizer)):
        part_optimizer.gradient_accumulation_steps = None  # Or only some steps would update
    copies = [keras.Variable(variable, dtype=variable.dtype) for variable in variables]
    optimizer.build(copies)
    gradients = [tf.zeros(copy.shape, copy.dtype) for copy in copies]
    update = tf.function(lambda: optimizer.apply(gradients, copies), autograph=False)
    with allow_plain_optimizers():
        return typical_seconds(lambda: (update(), copies[0].numpy()))


def _selection_times(
    variables: Sequence[keras.Variable], rule: str, density: float
) -> Callable[[int], float]:
    """Time a sparse bucket's work without messages, from the smallest to the largest variable.

    A rank copies into the flat vector, selects, encodes (in the plain format) and merges (here only
    its own entries).
    """
    chosen = selection.rule(rule)
    # Without those of no entries, which are never selected
    lengths = [size for variable in variables if (size := int(np.prod(variable.shape)))]
    sizes = np.unique(np.geomspace(min(lengths), max(lengths), SELECTION_SIZES).round())

    def seconds_of(size: int) -> float:
        vector, k = tf.random.stateless_normal([size], [1, size]), max(1, round(density * size))
        residual = tf.Variable(tf.zeros([size]))

        @tf.function(autograph=False)
        def work(first: tf.Tensor, second: tf.Tensor) -> tf.Tensor:
            flat = tf.ensure_shape(tf.concat([first, second], axis=0), residual.shape)
            sparse = chosen.select_with_residual(flat, residual, k, 7)
            words = codec.encode(sparse, SPARSE_WIRES[0])
            return codec.merge(words, k, flat.shape[0], SPARSE_WIRES[0])[-1]

        # In two parts, so that the copy into a flat vector is timed, too
        parts = tf.split(vector, [size // 2, size - size // 2])
        return typical_seconds(lambda: work(*parts).numpy())

    seconds = [seconds_of(int(size)) for size in sizes]
    return lambda size: float(np.interp(size, sizes, seconds))

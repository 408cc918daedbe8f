"""Find the Keras metrics whose variables are sums, because only sums can be added over ranks.

Keras's own metrics keep only sums: totals, counts, confusion matrices. A user's class may keep a
maximum or a moving average. Its update is therefore tried on made-up arguments, from several
states:

    state          0.0    1.3    -1700
    total += x     +x     +x     +x        a sum: the increment does not depend on the state
    max(state, x)  +x     +0     +1700+x   no sum
"""

import inspect
import weakref
from collections.abc import Iterable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

# Rows of made-up arguments
ROWS = 4

# Metric -> its last update's arguments, with tensors as tf.TensorSpec; metric -> True if its update
# adds. Kept by metric, not by callback, because a later `fit` does not trace the step again.
_forms: weakref.WeakKeyDictionary[keras.metrics.Metric, Any] = weakref.WeakKeyDictionary()
_adds: weakref.WeakKeyDictionary[keras.metrics.Metric, bool] = weakref.WeakKeyDictionary()


def metrics_in(metrics: Iterable[keras.metrics.Metric]) -> list[keras.metrics.Metric]:
    """Return the metrics, with Keras's container of `compile` metrics replaced by its members."""
    result: list[keras.metrics.Metric] = []
    for metric in metrics:
        holds_others = _is_trusted(type(metric)) and hasattr(metric, "metrics")
        result += metrics_in(metric.metrics) if holds_others else [metric]
    return result


def watch_update(metric: keras.metrics.Metric) -> None:
    """Record the form of the arguments of a user's own metric, at its next update.

    Later steps are not affected, because Keras traces the update once.
    """
    if _update_is_trusted(metric) or metric in _forms or metric in _adds:
        return
    update, before = metric.update_state, vars(metric).get("update_state")
    if hasattr(before, "watches"):
        return

    def form_of(value: Any) -> Any:
        is_array = hasattr(value, "shape") and hasattr(value, "dtype")
        return tf.TensorSpec(value.shape, value.dtype) if is_array else value

    def update_state(*args: Any, **kwargs: Any) -> Any:
        unwatch_update(metric)
        # Without the tensors, because those of a graph must not outlive its trace
        _forms[metric] = tf.nest.map_structure(form_of, (args, kwargs))
        return update(*args, **kwargs)

    marked: Any = update_state
    marked.watches = [] if before is None else [before]
    metric.update_state = marked


def unwatch_update(metric: keras.metrics.Metric) -> None:
    """Restore a metric's own update, if it is being watched."""
    watching = vars(metric).get("update_state")
    if hasattr(watching, "watches"):
        del metric.update_state
        for before in watching.watches:
            metric.update_state = before


def sums_in(metric: keras.metrics.Metric) -> list[np.ndarray | None] | None:
    """Return for each variable its value after `reset_state`; None for a constant.

    None in place of the list if the variables cannot be added over ranks.

    **Ranks:** local. **Cost:** a user's own class is tried once on made-up arguments.
    """
    unwatch_update(metric)
    variables = metric.variables
    if not variables or any(_dtype(variable).kind not in "iuf" for variable in variables):
        return None
    if hasattr(type(metric).result, "get_concrete_function"):
        return None  # Compiled alone, it would not see other values of the variables
    starts = _reset_values(metric)
    if any(start is not None and not np.all(np.isfinite(start)) for start in starts):
        return None
    if metric not in _adds:
        _adds[metric] = _update_is_trusted(metric) or _update_adds(metric, starts)
    return starts if _adds[metric] else None


def _is_trusted(owner: object) -> bool:
    return getattr(owner, "__module__", "").partition(".")[0] in ("keras", "tfcommx")


def _update_is_trusted(metric: keras.metrics.Metric) -> bool:
    cls = type(metric)
    # An instance may have a user's method, although its class is Keras's
    return _is_trusted(cls.update_state) and "update_state" not in vars(metric)


def _dtype(variable: keras.Variable) -> np.dtype:
    name = keras.backend.standardize_dtype(variable.dtype)
    # NumPy has no bfloat16
    return np.dtype("float32" if name == "bfloat16" else name)


def _reset_values(metric: keras.metrics.Metric) -> list[np.ndarray | None]:
    """Return each variable's value after `reset_state`; None if it does not set the variable."""
    # Stateless, because the metric must keep its present values
    with keras.StatelessScope() as scope:
        metric.reset_state()
    values = [scope.get_current_value(variable) for variable in metric.variables]
    return [None if value is None else np.asarray(value, np.float64) for value in values]


def _update_adds(metric: keras.metrics.Metric, starts: list[np.ndarray | None]) -> bool:
    """Return True if the update's increments of the variables do not depend on their values."""
    # A fixed seed, because all ranks must come to the same conclusion
    numbers = np.random.default_rng(1)
    states: list[list[np.ndarray]] = [[], [], []]
    for variable, start in zip(metric.variables, starts, strict=True):
        start = np.asarray(variable, np.float64) if start is None else start
        unsigned = _dtype(variable).kind == "u"
        for state, (low, high) in zip(states, ((0, 0), (1, 2), (-2000, -1000)), strict=True):
            low, high = (abs(low), abs(high)) if unsigned else (low, high)
            state.append(start + np.round(numbers.uniform(low, high, variable.shape), 3))
    for arguments in _arguments_for(metric):
        try:
            added = [_added(metric, state, *arguments) for state in states]
        except Exception:  # Any, because made-up arguments need not suit the class
            continue
        for variable, start, parts in zip(
            metric.variables, starts, zip(*added, strict=True), strict=True
        ):
            if start is None and np.any(parts[0]):
                return False  # `reset_state` would not reset this sum for a new epoch
            dtype = _dtype(variable)
            precision = np.finfo(dtype).eps if dtype.kind == "f" else 0
            # Sums of states up to 2000 are rounded to the dtype
            tolerance = 1e-3 * (1 + np.abs(parts[0])) + 16e3 * precision
            if not all(np.all(np.abs(part - parts[0]) <= tolerance) for part in parts):
                return False
        return True
    return False


def _added(
    metric: keras.metrics.Metric, state: list[np.ndarray], args: Any, kwargs: Any
) -> list[np.ndarray]:
    """Return the increments of one update, after rounding to the variables' dtypes."""
    before = [
        keras.ops.convert_to_tensor(value.astype(_dtype(variable)), dtype=variable.dtype)
        for variable, value in zip(metric.variables, state, strict=True)
    ]
    after = metric.stateless_update_state(before, *args, **kwargs)
    return [
        np.asarray(new, np.float64) - np.asarray(old, np.float64)
        for old, new in zip(before, after, strict=True)
    ]


def _arguments_for(metric: keras.metrics.Metric) -> list[tuple[Any, Any]]:
    """Return made-up arguments of the update, (args, kwargs), of its recorded or a likely form."""
    numbers = np.random.default_rng(2)

    def made_up(form: Any) -> Any:
        if not isinstance(form, tf.TensorSpec):
            return form
        shape = [size or ROWS for size in form.shape]
        # Zeros are valid labels for any number of classes
        values = numbers.uniform(size=shape) if form.dtype.is_floating else np.zeros(shape)
        return tf.cast(values, form.dtype)

    if metric in _forms:
        return [tf.nest.map_structure(made_up, _forms[metric])]
    # A metric in a user's own training loop has no recorded form
    parameters = inspect.signature(type(metric).update_state).parameters.values()
    required = [
        parameter
        for parameter in parameters
        if parameter.default is parameter.empty
        and parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
    ][1:]
    column, classes = (tf.TensorSpec([ROWS, width]) for width in (1, 3))
    labels, row = tf.TensorSpec([ROWS], tf.int32), tf.TensorSpec([ROWS])
    likely = (
        [(column,), (row,)]
        if len(required) == 1
        else [(column, column), (labels, classes), (classes, classes), (row, row)]
    )
    return [(tuple(map(made_up, forms)), {}) for forms in likely]

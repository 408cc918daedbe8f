"""Which variables of a Keras metric are sums, so that those of several ranks can be added.

Keras's own metrics keep sums alone: totals, counts, confusion matrices. A class of the user's may
keep a maximum or a moving average. Its update is therefore tried on made-up arguments, from several
states:

    state          0.0    1.3    -1700
    total += x     +x     +x     +x        a sum: what is added does not depend on the state
    max(state, x)  +x     +0     +1700+x   no sum
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Iterable
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

# Rows of made-up arguments
ROWS = 4

# Metric -> its last update's arguments, as tf.TensorSpec where they are tensors; and whether its
# update adds. By metric and not by callback: a later `fit` does not trace the step again.
_forms: weakref.WeakKeyDictionary[keras.metrics.Metric, Any] = weakref.WeakKeyDictionary()
_adds: weakref.WeakKeyDictionary[keras.metrics.Metric, bool] = weakref.WeakKeyDictionary()


class SumState(NamedTuple):
    """A variable of a metric that is a sum, or constant."""

    # What `reset_state` sets it to; None: it is constant, the same on all ranks
    start: np.ndarray | None


def metrics_in(metrics: Iterable[keras.metrics.Metric]) -> list[keras.metrics.Metric]:
    """Return metrics, those of `compile` in the place of the one that holds them."""
    result: list[keras.metrics.Metric] = []
    for metric in metrics:
        holds_others = _is_trusted(type(metric)) and hasattr(metric, "metrics")
        result += metrics_in(metric.metrics) if holds_others else [metric]
    return result


def watch_update(metric: keras.metrics.Metric) -> None:
    """Record the form of the arguments of a user's own metric, at its next update.

    Keras traces the update once, so nothing is added to later steps.
    """
    if _update_is_trusted(metric) or metric in _forms or metric in _adds:
        return
    update, before = metric.update_state, vars(metric).get("update_state")
    if hasattr(before, "watches"):
        return

    def update_state(*args: Any, **kwargs: Any) -> Any:
        unwatch_update(metric)
        _forms[metric] = tf.nest.map_structure(_form_of, (args, kwargs))
        return update(*args, **kwargs)

    marked: Any = update_state
    marked.watches = [] if before is None else [before]
    metric.update_state = marked


def unwatch_update(metric: keras.metrics.Metric) -> None:
    """Give a metric its own update back, if it is being watched."""
    watching = vars(metric).get("update_state")
    if hasattr(watching, "watches"):
        del metric.update_state
        for before in watching.watches:
            metric.update_state = before


def sums_in(metric: keras.metrics.Metric) -> list[SumState] | None:
    """Return what is known of a metric's variables; None if they cannot be added over ranks.

    **Ranks:** local. **Cost:** a user's own class is tried once on made-up arguments.
    """
    unwatch_update(metric)
    variables = metric.variables
    if not variables or any(_dtype(one).kind not in "iuf" for one in variables):
        return None
    if hasattr(type(metric).result, "get_concrete_function"):
        return None  # Traced by itself, it would not see other values of the variables
    starts = _reset_values(metric)
    if any(start is not None and not np.all(np.isfinite(start)) for start in starts):
        return None
    if metric not in _adds:
        _adds[metric] = _update_is_trusted(metric) or _update_adds(metric, starts)
    return [SumState(start) for start in starts] if _adds[metric] else None


def _is_trusted(owner: object) -> bool:
    return getattr(owner, "__module__", "").partition(".")[0] in ("keras", "tfcommx")


def _update_is_trusted(metric: keras.metrics.Metric) -> bool:
    cls = type(metric)
    return _is_trusted(cls.update_state) and "update_state" not in vars(metric)


def _dtype(variable: keras.Variable) -> np.dtype:
    name = keras.backend.standardize_dtype(variable.dtype)
    return np.dtype("float32" if name == "bfloat16" else name)


def _reset_values(metric: keras.metrics.Metric) -> list[np.ndarray | None]:
    """Return what each variable is set to by `reset_state`; None for those that it leaves."""
    with keras.StatelessScope() as scope:
        metric.reset_state()
    values = [scope.get_current_value(variable) for variable in metric.variables]
    return [None if one is None else np.asarray(one, np.float64) for one in values]


def _update_adds(metric: keras.metrics.Metric, starts: list[np.ndarray | None]) -> bool:
    """Return True if the metric's update adds to its variables what does not depend on them."""
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
        except Exception:  # Of any kind: made-up arguments need not suit the class
            continue
        for variable, start, parts in zip(
            metric.variables, starts, zip(*added, strict=True), strict=True
        ):
            if start is None and np.any(parts[0]):
                return False  # A new epoch would not begin it anew
            tolerance = 1e-3 * (1 + np.abs(parts[0])) + 16e3 * _precision(variable)
            if not all(np.all(np.abs(part - parts[0]) <= tolerance) for part in parts):
                return False
        return True
    return False


def _precision(variable: keras.Variable) -> float:
    kind = _dtype(variable)
    return float(np.finfo(kind).eps) if kind.kind == "f" else 0.0


def _added(
    metric: keras.metrics.Metric, state: list[np.ndarray], args: Any, kwargs: Any
) -> list[np.ndarray]:
    """Return what one update adds to a state, after rounding to the variables' dtypes."""
    before = [
        keras.ops.convert_to_tensor(value.astype(_dtype(one)), dtype=one.dtype)
        for one, value in zip(metric.variables, state, strict=True)
    ]
    after = metric.stateless_update_state(before, *args, **kwargs)
    return [
        np.asarray(keras.ops.convert_to_numpy(new), np.float64)
        - np.asarray(keras.ops.convert_to_numpy(old), np.float64)
        for old, new in zip(before, after, strict=True)
    ]


def _form_of(value: Any) -> Any:
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        return tf.TensorSpec(value.shape, value.dtype)
    return value


def _arguments_for(metric: keras.metrics.Metric) -> list[tuple[Any, Any]]:
    """Return made-up arguments of the update, (args, kwargs): of the form that it had, or likely.

    A metric of a loop of the user's own has shown no update.
    """
    numbers = np.random.default_rng(2)

    def made_up(form: Any) -> Any:
        if not isinstance(form, tf.TensorSpec):
            return form
        shape = [size or ROWS for size in form.shape]
        values = numbers.uniform(size=shape) if form.dtype.is_floating else np.zeros(shape)
        return tf.cast(values, form.dtype)

    if metric in _forms:
        return [tf.nest.map_structure(made_up, _forms[metric])]
    parameters = inspect.signature(type(metric).update_state).parameters.values()
    required = [
        one
        for one in parameters
        if one.default is one.empty and one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD)
    ][1:]
    column, classes = (tf.TensorSpec([ROWS, width]) for width in (1, 3))
    labels, row = tf.TensorSpec([ROWS], tf.int32), tf.TensorSpec([ROWS])
    likely = (
        [(column,), (row,)]
        if len(required) == 1
        else [(column, column), (labels, classes), (classes, classes), (row, row)]
    )
    return [(tuple(map(made_up, forms)), {}) for forms in likely]

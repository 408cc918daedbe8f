r"""Metrics over the samples of all ranks: their sums are added before the result is computed.

    rank 0   true positives 8, false positives 2     \   added: 9 and 7    precision 9 / 16
    rank 1   true positives 1, false positives 5     /                    (their mean is .483)

An average of results is right only for a mean over equally many samples.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from tfcommx.collectives import process
from tfcommx.core import log
from tfcommx.keras_internals.metrics import metrics_in, sums_in
from tfcommx.keras_internals.optimizers import array_of, entries_of

Results = dict[str, np.ndarray]
# For each variable of a metric its value after a reset; None: a constant, the same on all ranks
Starts = list[np.ndarray | None]

_OVERFLOW = (
    "%r is the mean of the ranks' own values, and not the value over all samples: the sum over the "
    "ranks is beyond the dtype of one of its variables. Make them float32 or int64."
)
# Reasons for a mean in place of the value over all samples
_NOT_A_SUM = (
    "its metric has other state than sums that begin anew in each epoch, or its update_state could "
    "not be tried. Let update_state add to the metric's variables, and reset_state reset them"
)
_NO_RESULT = (
    "it is no result of model.metrics at the epoch's end, such as a loss that train_step returns. "
    "Keep it in a keras.metrics.Mean, and return its result"
)


class MetricState(NamedTuple):
    """The variables of some metrics as they were at one time on this rank."""

    metrics: list[keras.metrics.Metric]
    # Variables of each metric, read once because some metrics make theirs at the first update
    variables: list[list[keras.Variable]]
    values: list[list[np.ndarray]]
    # Returns the results of all metrics by name, from their variables
    results: Callable[[], Mapping[str, Any]]

    @classmethod
    def of(
        cls, metrics: Iterable[keras.metrics.Metric], results: Callable[[], Mapping[str, Any]]
    ) -> MetricState:
        """Copy the variables of metrics. **Cost:** TensorFlow's steps so far are waited for."""
        flat = metrics_in(metrics)
        variables = [list(metric.variables) for metric in flat]
        # Copied, because the result may share the memory of the variable, which changes in the next
        # step
        values = [[entries_of(variable) for variable in several] for several in variables]
        return cls(flat, variables, values, results)

    @property
    def starts(self) -> list[Starts | None]:
        """The start values of each metric's sums; None if they cannot be added."""
        # Some metrics make variables late, which these values lack
        return [
            starts if starts is not None and len(starts) == len(values) else None
            for starts, values in zip(map(sums_in, self.metrics), self.values, strict=True)
        ]

    def results_with(self, values: list[list[np.ndarray]]) -> Results:
        """Return the results that the metrics would have with other values of their variables."""
        pairs = [
            (variable, keras.ops.convert_to_tensor(value, dtype=variable.dtype))
            for several, their_values in zip(self.variables, values, strict=True)
            for variable, value in zip(several, their_values, strict=True)
        ]
        with keras.StatelessScope(pairs):
            return numbers_in(self.results())


# A metric as the ranks compare it, because its sums are added only if all have the same: the shapes
# of its variables; for each of them True: a sum, False: a constant. None: they cannot be added
Form = tuple[tuple[tuple[int, ...], ...], tuple[bool, ...] | None]


def metrics_over_ranks(
    metrics: keras.Model | Iterable[keras.metrics.Metric],
) -> dict[str, float | np.ndarray]:
    """Return the results of metrics over the samples of all ranks, as one process would have them.

    For custom loops, and behind `model.evaluate`, whose own results are of this rank's samples;
    `fit` does it at each epoch's end with the callback BroadcastState or AverageMetrics. Shards may
    be unequal, and samples weighted. The metrics stay as they are.

    A metric's variables are added over the ranks: each of Keras's metrics, and a custom one whose
    `update_state` adds to its variables and whose `reset_state` resets them. The result of any
    other, such as a maximum, becomes the mean of the ranks' results, and a warning names it.

    >>> import keras
    >>> import tfcommx as cx
    >>> _ = cx.init()
    >>> loss = keras.metrics.Mean(name="loss")
    >>> loss.update_state([1.0, 3.0])
    >>> cx.metrics_over_ranks([loss])
    {'loss': 2.0}

    Args:
        metrics: some, or a model, which stands for `model.metrics`.

    Returns:
        Metric's name -> result: float, or an array if the metric has several numbers; equal to the
        bit on all ranks.

    **Ranks:** all, with the same metrics, outside of traced code. **Cost:** an allreduce of the
    sums in float64, and two exchanges of the results.
    """
    if isinstance(metrics, keras.Model):
        model = metrics
        state = MetricState.of(model.metrics, model.get_metrics_result)
    else:
        metrics = list(metrics)
        state = MetricState.of(metrics, lambda: _results_of(metrics))
    results = state.results_with(state.values)
    combined = metric_results_over_ranks({"": state}, results, set())
    return {name: value if value.ndim else float(value) for name, value in combined.items()}


def _results_of(metrics: Iterable[keras.metrics.Metric]) -> dict[str, Any]:
    results: dict[str, Any] = {}
    for metric in metrics:
        result = metric.result()
        results |= result if isinstance(result, dict) else {metric.name: result}
    return results


def numbers_in(logs: Mapping[str, Any]) -> Results:
    """Return the numbers and arrays of numbers, also those in mappings."""
    numbers: Results = {}
    for name, value in logs.items():
        if isinstance(value, Mapping):
            numbers |= numbers_in(value)
            continue
        array = array_of(value)
        if array.dtype.name == "bfloat16":
            array = array.astype(np.float32)
        if array.dtype.kind in "biuf":
            numbers[name] = array
    return numbers


def metric_results_over_ranks(
    states: Mapping[str, MetricState], numbers: Results, warned: set[str]
) -> Results:
    """Return numbers over all ranks, those that any rank has.

    Args:
        states: prefix of names ("", "val_") -> state of the metrics. A rank may lack one.
        warned: names of which the user has been warned; those of this call are added.

    **Ranks:** all, outside of traced code. **Cost:** an allreduce of the sums in float64, and two
    exchanges of the numbers.
    """
    comm = process.current()
    if comm.topology.size == 1:
        return numbers
    starts = {prefix: state.starts for prefix, state in states.items()}
    own_forms = {prefix: _forms_of(state, starts[prefix]) for prefix, state in states.items()}
    explained = [
        name for prefix, state in states.items() for name in _explained(prefix, state, numbers)
    ]
    gathered = comm.gather_objects((own_forms, explained, numbers))
    all_forms, all_explained, all_numbers = zip(*gathered, strict=True)
    # Prefix -> the first rank that has this state: it computes the results
    leads: dict[str, int] = {}
    # Backwards, so that the lowest rank is assigned last
    for rank, rank_forms in reversed(list(enumerate(all_forms))):
        leads |= dict.fromkeys(rank_forms, rank)
    # Sorted, because all ranks add their sums in one flat vector, by position
    prefixes = sorted(leads)
    forms = {
        prefix: _common_forms([part[prefix] for part in all_forms if prefix in part])
        for prefix in prefixes
    }
    totals = _add(states, starts, forms)
    combined = {
        prefix: _combine(states[prefix], starts[prefix], forms[prefix], totals[prefix], warned)
        for prefix in prefixes
        if leads[prefix] == comm.rank
    }
    everyone = comm.gather_objects(combined)
    results: Results = {}
    not_sums: set[str] = set()
    for prefix in prefixes:
        of_metrics, names = everyone[leads[prefix]][prefix]
        results |= {prefix + name: value for name, value in of_metrics.items()}
        not_sums |= {prefix + name for name in names}
    return _choose(all_numbers, all_explained, results, not_sums, warned)


def _forms_of(state: MetricState, starts: list[Starts | None]) -> list[Form]:
    return [
        (
            tuple(value.shape for value in values),
            None if parts is None else tuple(start is not None for start in parts),
        )
        for values, parts in zip(state.values, starts, strict=True)
    ]


def _explained(prefix: str, state: MetricState, numbers: Results) -> list[str]:
    """Return the names of the numbers that are the results of a state, to rounding."""
    # Others are of a training step of the user's that returns its last loss, or of metrics that
    # another evaluation has reset since
    results = {prefix + name: value for name, value in state.results_with(state.values).items()}
    return [
        name
        for name, value in results.items()
        if name in numbers
        and np.shape(numbers[name]) == np.shape(value)
        and np.allclose(numbers[name], value, rtol=1e-5, atol=1e-7, equal_nan=True)
    ]


def _common_forms(of_ranks: Sequence[list[Form]]) -> list[Form]:
    """Return the forms on which all ranks agree; a metric in which they differ has no sums."""
    lengths = set(map(len, of_ranks))
    return [
        (shapes, adds if len(lengths) == 1 and len({forms[i] for forms in of_ranks}) == 1 else None)
        for i, (shapes, adds) in enumerate(of_ranks[0])
    ]


def _add(
    states: Mapping[str, MetricState],
    starts: Mapping[str, list[Starts | None]],
    forms: Mapping[str, list[Form]],
) -> dict[str, list[list[np.ndarray]]]:
    """Add over the ranks the increase of each variable since its reset, in float64.

    Returns:
        Prefix -> of each metric, of each variable that is a sum, the sum; no entries for others.
    """
    shapes, increases = [], []
    for prefix, of_phase in forms.items():
        for position, (form_shapes, form_adds) in enumerate(of_phase):
            for number, adds in enumerate(form_adds or ()):
                if not adds:
                    continue
                shapes.append(form_shapes[number])
                if prefix in states:
                    parts = starts[prefix][position]
                    start = None if parts is None else parts[number]
                    assert start is not None, "a form adds only variables that are sums"
                    value = states[prefix].values[position][number].astype(np.float64)
                    increases.append(np.ravel(value - start))
                else:
                    # A rank that lacks this phase, as one without validation data, still takes part
                    # in the allreduce
                    increases.append(np.zeros(int(np.prod(shapes[-1]))))
    if not shapes:
        return {prefix: [[] for _ in of_phase] for prefix, of_phase in forms.items()}
    with tf.device("/cpu:0"):
        flat = process.current().allreduce(
            tf.constant(np.concatenate(increases)), "world", "tfcommx/metrics"
        )
    ends = np.cumsum([part.size for part in increases])[:-1]
    totals = map(np.reshape, np.split(flat.numpy(), ends), shapes)
    return {
        prefix: [[next(totals) for is_sum in adds or () if is_sum] for _, adds in of_phase]
        for prefix, of_phase in forms.items()
    }


def _combine(
    state: MetricState,
    starts: list[Starts | None],
    forms: list[Form],
    totals: list[list[np.ndarray]],
    warned: set[str],
) -> tuple[Results, list[str]]:
    """Return the results from the sums of all ranks, and the names of those not from sums alone."""
    values, not_added = [], []
    for metric, local, parts, (_, adds), added in zip(
        state.metrics, state.values, starts, forms, totals, strict=True
    ):
        combined, overflows = local, False
        if parts is not None and adds is not None:
            combined, overflows = _with_sums(local, parts, added)
        # Here, because the ranks' own values may be equal, of which nothing else warns
        if overflows and metric.name not in warned:
            log.warning(_OVERFLOW, metric.name)
            warned.add(metric.name)
        if adds is None or overflows:
            not_added.append(metric)
            combined = local
        values.append(combined)
    results = state.results_with(values)
    if not not_added:
        return results, []
    # A result that changes with these variables depends on them
    changed = state.results_with(
        [
            [part_state + np.ones_like(part_state) for part_state in parts]
            if metric in not_added
            else parts
            for metric, parts in zip(state.metrics, values, strict=True)
        ]
    )
    names = {metric.name for metric in not_added}
    for metric in not_added:
        names |= numbers_in(_results_of([metric])).keys()
    # Names in the logs may have the prefix of an output, such as "head_accuracy"
    return results, [
        name
        for name, value in results.items()
        if not np.array_equal(value, changed[name], equal_nan=True)
        or any(name == ending or name.endswith(f"_{ending}") for ending in names)
    ]


def _with_sums(
    local: list[np.ndarray], starts: Starts, added: list[np.ndarray]
) -> tuple[list[np.ndarray], bool]:
    """Return a metric's values with the sums of all ranks, in the dtypes of its variables.

    Returns:
        Also True if a dtype does not hold its sum: float16 ends at 65,504, int32 at 2^31 - 1.
    """
    remaining, values, overflows = iter(added), [], False
    for value, start in zip(local, starts, strict=True):
        if start is not None:
            total = start + next(remaining)
            with np.errstate(over="ignore", invalid="ignore"):
                value = total.astype(value.dtype)
            # Rounding to 16 bits changes less
            near = np.isclose(value.astype(np.float64), total, rtol=0.01, atol=1)
            overflows |= bool(np.any(np.isfinite(total) & ~near))
        values.append(value)
    return values, overflows


def _choose(
    all_numbers: Sequence[Results],
    all_explained: Sequence[list[str]],
    results: Results,
    not_sums: set[str],
    warned: set[str],
) -> Results:
    """Return the result of the sums if it exists, else the mean of the ranks' numbers."""
    chosen: Results = {}
    for name in sorted(set().union(*all_numbers)):
        having = [rank for rank, numbers in enumerate(all_numbers) if name in numbers]
        values = [all_numbers[rank][name] for rank in having]
        is_result = name in results and all(name in all_explained[rank] for rank in having)
        if is_result and name not in not_sums:
            chosen[name] = results[name]
        # Equal numbers stay as they are: a mean may change their last bit, or their type
        elif all(np.array_equal(values[0], value, equal_nan=True) for value in values):
            chosen[name] = values[0]
        elif len({np.shape(value) for value in values}) == 1:
            chosen[name] = np.mean(values, axis=0)
            if process.current().rank == 0 and name not in warned:
                log.warning(
                    "%r is the mean of the ranks' own values, which differ, and not the value over "
                    "all samples: %s.",
                    name,
                    _NOT_A_SUM if is_result else _NO_RESULT,
                )
            warned.add(name)
    return chosen

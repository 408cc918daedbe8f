"""Measure a step with its exchange: the times of its gradients and of their sums.

compute   | forward |  grad c  |  grad b  |  grad a  |            | update |
between                        | bucket 0 |          |  bucket 1  |
stamps              |          |          |          |            |
"""

import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfcommx.core import (
    Bucket,
    ConfigurationError,
    MeasuredStep,
    Piece,
    Plan,
    Profile,
    Span,
    Timeline,
)
from tfcommx.kernels.traced import stamp
from tfcommx.measure.profile import (
    WARM_UP,
    StepTiming,
    batches_of,
    loss_and_gradients,
    statistics_kept,
    variable_names,
    with_entries,
)

Exchange = Callable[[Mapping[str, tf.Tensor]], Mapping[str, tf.Tensor]]


def measure_exchange(
    model: keras.Model, data: Iterable[Any], plan: Plan, exchange: Exchange, steps: int = 10
) -> MeasuredStep:
    """Measure the steps of a model whose gradients travel by a plan; weights are not updated.

    The start of a message is assumed: the last gradient of its bucket is ready, and the previous
    message has ended. Residuals change as in any step; make a new optimizer for training.

    Args:
        data: batches (inputs, targets) or (inputs, targets, weights), of one shape.
        exchange: maps gradients by name to their sums, as `PlanExecutor.exchange` does.
        steps: number of steps to measure, >= 1.

    Returns:
        Means over the steps on this rank, and its profile.

    **Ranks:** all, with equal plans. **Cost:** three times `steps` + 2 steps, three tracings.
    **Raises:** ConfigurationError for a model that is not compiled or not built, without data, or
    for a plan of other variables.
    """
    timing = StepTiming(model, data, steps)
    for _ in range(steps + WARM_UP):
        timing.step()
    profile = timing.measured().profile
    # Gradients become ready from the last layer back
    names = [row.name for row in reversed(profile.variables)]
    if plan.paths != set(names):
        raise ConfigurationError(
            "A plan of the variables that the loss depends on is required. Received one that "
            f"differs in {sorted(plan.paths ^ set(names))[:3]}. Leave variables without a gradient "
            "out of both."
        )
    step, rows = _step(model, names, plan, exchange), []
    batches = batches_of(data, steps + WARM_UP)
    for number in range(steps + WARM_UP):
        # Weights are not updated, so the layers' statistics must not change either
        with statistics_kept(model):
            start = time.perf_counter()
            rows.append(step(*batches[number % len(batches)]).numpy() - start)
    stamps = np.array(rows[WARM_UP:]).mean(axis=0)
    ready, arrived = stamps[: 1 + len(names)], stamps[1 + len(names) :]
    times = dict(zip(names, map(float, ready[1:]), strict=True))
    # The earliest stamp ends the forward pass, because that of the loss may be late
    return MeasuredStep(profile, plan, _timeline(float(ready.min()), times, arrived, plan, profile))


def _step(
    model: keras.Model, names: list[str], plan: Plan, exchange: Exchange
) -> Callable[..., tf.Tensor]:
    """Return a traced step that returns times of [loss, gradients..., one sum per bucket...]."""
    by_name = dict(zip(variable_names(model), model.trainable_variables, strict=True))

    def step(*batch: Any) -> tf.Tensor:
        loss, gradients = loss_and_gradients(model, batch, [by_name[name] for name in names])
        sums = exchange(dict(zip(names, gradients, strict=True)))
        ends = [sums[_stands_for(bucket)] for bucket in plan.buckets]
        return tf.stack([stamp(with_entries(one, loss)) for one in (loss, *gradients, *ends)])

    traced: Callable[..., tf.Tensor] = tf.function(step, autograph=False)
    return traced


def _stands_for(bucket: Bucket) -> str:
    """Return the path of one variable, because all sums of a bucket arrive with one message."""
    # With entries, because a stamp copies one
    filled = [name for name, size in zip(bucket.variables, bucket.sizes, strict=True) if size]
    return Piece.of((filled or bucket.variables)[-1]).path


def _timeline(
    forward_s: float, ready: Mapping[str, float], arrived: np.ndarray, plan: Plan, profile: Profile
) -> Timeline:
    """Turn measured times, in seconds from the start of the step, into spans."""
    spans, before = [Span("compute", "forward", "forward", 0.0, forward_s)], forward_s
    for name in sorted(ready, key=ready.__getitem__):
        spans.append(Span("compute", "backward", name, before, ready[name]))
        before = ready[name]
    port, end = ("between" if plan.topology.nodes > 1 else "inside"), before
    busy_until = 0.0
    # In the order of arrival, because a port carries one message at a time
    for number in np.argsort(arrived):
        bucket = plan.buckets[number]
        complete = max(ready[Piece.of(name).path] for name in bucket.variables)
        start, stop = max(complete, busy_until), float(arrived[number])
        spans.append(Span(port, "message", bucket.name, min(start, stop), stop, int(number)))
        busy_until, end = stop, max(end, stop)
    step_s = end + profile.update_s
    spans.append(Span("compute", "update", "update", end, step_s))
    done = tuple(
        sorted((span for span in spans if span.end_s > span.start_s), key=lambda s: s.start_s)
    )
    return Timeline(done, step_s, profile.compute_s, profile.batch, plan.topology.size)

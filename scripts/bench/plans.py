"""Plans in use: the routes of the gradients, the state of a trial, and a check of a step."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np

import tfcommx as cx
from bench.checks import gradient, weighted_sum
from tfcommx.collectives.comm import Comm
from tfcommx.core import DENSE_CODES, PLAIN, Plan
from tfcommx.runtime.trial import TrialExecutor


def executors(optimizer: Any) -> list[Any]:
    """Return the executors of an optimizer's plans; an empty list if it is not wrapped."""
    exchanger = getattr(optimizer, "exchanger", None)
    return [] if exchanger is None else [run.executor for run in exchanger.runs.values()]


def is_decided(optimizer: Any) -> bool:
    """Return True if no trial is running, because its steps with several plans must not count."""
    trials = [one for one in executors(optimizer) if isinstance(one, TrialExecutor)]
    return all(one.chosen is not None for one in trials)


def selects(plan: Plan) -> bool:
    """Return True if any bucket sends a selection of its entries."""
    return any(bucket.k is not None for bucket in plan.buckets)


def in_words(plan: Plan) -> str:
    """Return the routes and wire formats of a plan's buckets, and their number."""
    kinds = dict.fromkeys(
        bucket.route + ("" if bucket.wire == PLAIN else f" {bucket.wire}")
        for bucket in plan.buckets
    )
    return f"{' + '.join(kinds)}, {len(plan.buckets)} bucket{'s' * (len(plan.buckets) > 1)}"


def sums_are_right(
    comm: Comm,
    optimizer: keras.optimizers.Optimizer,
    variables: list[keras.Variable],
    exchanges: bool = True,
) -> bool:
    """Take one step with known gradients from weights of zero; then restore the weights.

    This checks the plan currently in use. Residuals are dropped before and afterwards.

    Args:
        comm: of this rank.
        optimizer: SGD without momentum, wrapped or not; or LowBitSGD, wrapped.
        variables: that it trains.
        exchanges: False: each rank must keep its own gradients.

    Returns:
        True if the weights became minus the average of the gradients over the ranks, up to the
        residuals.

    **Ranks:** all.
    """
    ranks = comm.topology.size
    given = [gradient(comm.rank, int(np.prod(variable.shape))) for variable in variables]
    # Momentum of the steps before would be part of the update
    moved = [*variables, *_sent_momenta(optimizer)]
    before, rate = [variable.numpy() for variable in moved], float(optimizer.learning_rate)
    _drop_residuals(optimizer, variables)
    for variable in moved:
        variable.assign(np.zeros(variable.shape, "float32"))
    optimizer.learning_rate = 1.0
    shaped = [part.reshape(row.shape) for part, row in zip(given, variables, strict=True)]
    tensors = map(keras.ops.convert_to_tensor, shaped)
    optimizer.apply_gradients(list(zip(tensors, variables, strict=True)))
    arrived = sum(weighted_sum(-variable.numpy().ravel()) for variable in variables)
    kept = 0.0
    if executors(optimizer):
        kept = sum(map(weighted_sum, optimizer.exchanger.export().residuals.values()))
    _drop_residuals(optimizer, variables)
    for variable, value in zip(moved, before, strict=True):
        variable.assign(value)
    optimizer.learning_rate = rate
    mine = sum(map(weighted_sum, given))
    everyone = comm.gather_objects((arrived, kept, mine))
    if not exchanges:
        return all(got == own for got, _, own in everyone)
    averages, residuals, gradients = zip(*everyone, strict=True)
    size = sum(weighted_sum(abs(part)) for part in given)
    apart = abs(ranks * averages[0] + sum(residuals) - sum(gradients))
    # A sum over 3 ranks, divided by 3, is not exact
    allowed = 0 if ranks & (ranks - 1) == 0 else 1e-7 * size * ranks
    buckets = [bucket for one in executors(optimizer) for bucket in one.plan.buckets]
    if any(bucket.compresses or bucket.wire in DENSE_CODES for bucket in buckets):
        # Products of factors are rounded to float32: 5e-10 of ResNet-50 on 4 ranks; so are codes
        allowed = max(allowed, 1e-8 * size * ranks)
    return len(set(averages)) == 1 and apart <= allowed


def _sent_momenta(optimizer: keras.optimizers.Optimizer) -> list[keras.Variable]:
    sends = isinstance(optimizer, cx.optimizers.LowBitSGD)
    return list(optimizer.momentums) if sends else []


def _drop_residuals(optimizer: keras.optimizers.Optimizer, variables: list[keras.Variable]) -> None:
    for executor in executors(optimizer):
        executor.clear(set(optimizer.exchanger.names.of(variables)))

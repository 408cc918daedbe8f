"""Checks a step of any optimizer by gradients whose sum over the ranks is known."""

from __future__ import annotations

import keras
import numpy as np
from plan_at_work import executors
from verify_sums import gradient, weighted_sum

from tfcommx.comm.base import Comm


def sums_are_right(
    comm: Comm,
    optimizer: keras.optimizers.Optimizer,
    variables: list[keras.Variable],
    exchanges: bool = True,
) -> bool:
    """Take one step with known gradients from weights of zero; then put everything back.

    The plan that is at work then is what is checked. Residuals are dropped before and afterwards.

    Args:
        comm: of this rank.
        optimizer: SGD without momentum, wrapped or not.
        variables: that it trains.
        exchanges: False: each rank must keep its own gradients.

    Returns:
        Whether the weights became minus the average over the ranks of what was not kept.

    **Ranks:** all.
    """
    ranks = comm.topology.size
    given = [gradient(comm.rank, int(np.prod(variable.shape))) for variable in variables]
    before, rate = [variable.numpy() for variable in variables], float(optimizer.learning_rate)
    _drop_residuals(optimizer, variables)
    for variable in variables:
        variable.assign(np.zeros(variable.shape, "float32"))
    optimizer.learning_rate = 1.0
    shaped = [part.reshape(row.shape) for part, row in zip(given, variables, strict=True)]
    tensors = map(keras.ops.convert_to_tensor, shaped)
    optimizer.apply_gradients(list(zip(tensors, variables, strict=True)))
    arrived = sum(weighted_sum(-variable.numpy().ravel()) for variable in variables)
    kept = 0.0
    if executors(optimizer):
        kept = sum(map(weighted_sum, optimizer.exchanger.all_residuals().values()))
    _drop_residuals(optimizer, variables)
    for variable, value in zip(variables, before, strict=True):
        variable.assign(value)
    optimizer.learning_rate = rate
    mine = sum(map(weighted_sum, given))
    everyone = comm.gather_objects((arrived, kept, mine))
    if not exchanges:
        return all(got == own for got, _, own in everyone)
    averages, residuals, gradients = zip(*everyone, strict=True)
    # A sum over 3 ranks, divided by 3, is not exact
    size = sum(weighted_sum(abs(part)) for part in given)
    apart = abs(ranks * averages[0] + sum(residuals) - sum(gradients))
    exact = ranks & (ranks - 1) == 0
    return len(set(averages)) == 1 and apart <= (0 if exact else 1e-7 * size * ranks)


def _drop_residuals(optimizer: keras.optimizers.Optimizer, variables: list[keras.Variable]) -> None:
    for executor in executors(optimizer):
        executor.export_residuals(set(optimizer.exchanger.names.of(variables)))

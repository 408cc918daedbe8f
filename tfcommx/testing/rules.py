"""The laws of a rule of selection."""

from __future__ import annotations

import numpy as np
import tensorflow as tf

from tfcommx import selection
from tfcommx.testing import laws
from tfcommx.testing.laws import require


def check_rule(name: str) -> None:
    """Hold a rule of selection to its laws.

    Args:
        name: of the table, or "module:MEMBER", whose `select` is as `selection.base.Selector` says.

    **Ranks:** none: everything runs in this process. **Cost:** some seconds.
    **Raises:** LawBroken; PlanError for a name that is none.
    """
    _check_choice(name)
    laws.check_on_sparse_routes(repr(name), selection=name)


def _check_choice(name: str) -> None:
    """Check what is chosen of single vectors."""
    rule, numbers = selection.rule(name), np.random.default_rng(0)
    laws.check_traces(lambda vector: rule.select(vector, 10, seed=5)[:2], repr(name), (100,))
    for size, k in ((1, 1), (10, 10), (1000, 1), (1000, 100), (70_000, 700)):
        given = numbers.normal(size=size).astype(np.float32)
        bad = numbers.integers(size)
        given[bad] = np.nan
        where = f"{name!r}, k = {k} of {size} entries, one of them NaN"
        chosen, again = (rule.select(tf.constant(given), k, seed=5) for _ in range(2))
        indices, values = chosen.indices.numpy(), chosen.values.numpy()
        require(
            indices.shape == (k,) and indices.dtype == np.int32,
            "k indices of int32 must be chosen.",
            where,
            f"{indices.shape} of {indices.dtype} came.",
        )
        require(
            bool((np.diff(indices) > 0).all() and indices[0] >= 0 and indices[-1] < size),
            "Indices must be unique, ascending and in range.",
            where,
            f"{indices[:5].tolist()} ... came.",
        )
        require(
            bool(np.array_equal(values, given[indices], equal_nan=True)),
            "Values must be those of the vector at the indices.",
            where,
            "Others came.",
        )
        require(bad in indices, "NaN and Inf must be chosen before all else.", where, "It was not.")
        require(
            bool(np.array_equal(indices, again.indices.numpy())),
            "Equal inputs and seeds must give equal choices.",
            where,
            "Two calls differ.",
        )

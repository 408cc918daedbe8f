"""Fits alpha and beta of a link to times of several sizes, without TensorFlow."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tfcommx.terms import PlanError

# Seconds per byte, faster than any memory: noise must not make a link free
SMALLEST_BETA = 1e-13


def fit(points: Sequence[tuple[float, float, float]]) -> tuple[float, float]:
    """Fit a latency and a time per byte to measured times.

    >>> alpha, beta = fit([(1, 1000, 1.5), (1, 2000, 2.5)])
    >>> round(alpha, 9), round(beta, 9)
    (0.5, 0.001)

    It minimizes the squared relative error: small messages count as much as large ones, or alpha
    would vanish in beta's noise.

    Args:
        points: (latency terms, bytes, seconds) of each measurement.

    Returns:
        alpha (seconds, >= 0) and beta (seconds per byte, > 0).

    **Raises:** PlanError for fewer than two sizes or times that are not positive.
    """
    latencies, sizes, seconds = np.array(points, np.float64).reshape(-1, 3).T
    if len(set(sizes)) < 2 or (seconds <= 0).any():
        raise PlanError(
            "A fit of alpha and beta needs times > 0 of two or more sizes. Received "
            f"{list(points)}."
        )
    rows = np.stack([latencies, sizes], axis=1) / seconds[:, None]
    alpha, beta = np.linalg.lstsq(rows, np.ones(len(seconds)), rcond=None)[0]
    if alpha < 0:  # Fit without latency
        alpha, beta = 0.0, rows[:, 1].sum() / (rows[:, 1] ** 2).sum()
    if beta < SMALLEST_BETA:
        alpha, beta = rows[:, 0].sum() / (rows[:, 0] ** 2).sum(), SMALLEST_BETA
    return float(alpha), float(beta)

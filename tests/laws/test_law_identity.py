"""Law 1: with rule `all` every route returns the plain sum, in the gradient's dtype."""

from __future__ import annotations

import numpy as np
import pytest
from drawing import squares
from laws_helpers import (
    SHAPES,
    TOPOLOGIES,
    gradients,
    name_of,
    plan_for,
    play,
    scheme,
)

from tfcommx import routes
from tfcommx.core import Topology


@pytest.mark.parametrize(
    ("route", "topology", "operation"),
    squares(list(routes.ROUTES), TOPOLOGIES, ["average", "sum"]),
    ids=name_of,
)
def test_law_1_identity(route: str, operation: str, topology: Topology) -> None:
    """Rule `all` returns the plain sum, on every route."""
    for rank_log in play(plan_for(scheme(route), topology, operation), steps=2):
        for step, (_, result, residuals, *_) in enumerate(rank_log):
            for path in SHAPES:
                total = sum(
                    gradients(rank, step)[path].astype(np.float64) for rank in range(topology.size)
                )
                expected = total / topology.size if operation == "average" else total
                np.testing.assert_allclose(result[path], expected, rtol=2e-7, atol=0)
                assert not residuals[path].any()


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
@pytest.mark.parametrize("route", routes.ROUTES)
def test_dtypes_come_back(route: str, dtype: str) -> None:
    for log in play(
        plan_for(scheme(route), Topology(2, 2), "sum", dtype),
        steps=1,
        source=lambda rank, step: gradients(rank, step, dtype),
    ):
        assert {str(value.dtype) for value in log[0][1].values()} == {dtype}

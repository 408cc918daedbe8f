"""Laws 3 and 5: all ranks get the same bits, and a NaN or Inf in the same step."""

from __future__ import annotations

import numpy as np
import pytest
from drawing import case, squares
from laws_helpers import (
    COMPRESSED,
    LOSSY,
    SCHEMES,
    SEARCHED,
    SHAPES,
    WIRED,
    gradients,
    name_of,
    plan_for,
    play,
    with_topologies,
)

from tfcommx import routes
from tfcommx.core import Scheme, Topology
from tfcommx.testing.laws import check_agreement, normal_numbers

NOT_FINITE = [np.nan, np.inf, -np.inf]
QUICK = [one for one in SCHEMES if one not in SEARCHED]


@with_topologies(QUICK + LOSSY + COMPRESSED, Topology(3, 1), WIRED + SEARCHED)
def test_law_3_agreement(scheme: Scheme, topology: Topology) -> None:
    """All ranks get the same bits, also for numbers whose sum depends on the order."""
    logs = play(plan_for(scheme, topology, "average"), steps=2, source=normal_numbers)
    check_agreement(logs, name_of(scheme))


@pytest.mark.parametrize(
    ("scheme", "topology", "bad"),
    squares(QUICK + WIRED + LOSSY + COMPRESSED, [Topology(2, 2)], NOT_FINITE)
    + [case(scheme, Topology(2, 2), bad, kept=False) for scheme in SEARCHED for bad in NOT_FINITE]
    + [
        case(scheme, topology, bad, kept=False)
        for scheme in SCHEMES + WIRED + LOSSY + COMPRESSED
        for topology in (Topology(1, 1), Topology(3, 1))
        for bad in NOT_FINITE
    ],
    ids=name_of,
)
def test_law_5_non_finite(scheme: Scheme, topology: Topology, bad: float) -> None:
    """A NaN or Inf of one rank reaches all ranks in the same step, and never enters a residual."""

    def poisoned(rank: int, step: int) -> dict[str, np.ndarray]:
        given = gradients(rank, step)
        if step == 1 and rank == topology.size - 1:
            for path in given:
                given[path].flat[given[path].size // 2] = bad
        return given

    for log in play(plan_for(scheme, topology), steps=3, source=poisoned):
        for path in SHAPES:
            assert np.isfinite(log[0][1][path]).all() and not np.isfinite(log[1][1][path]).all()
            assert all(np.isfinite(log[step][2][path]).all() for step in range(3))
            if scheme.selection != "all" or scheme.route in routes.DENSE:
                assert np.isfinite(log[2][1][path]).all()

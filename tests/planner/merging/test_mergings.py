"""Every merging solver, and the optimal one against all merges of small models."""

from __future__ import annotations

import math
import random
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st
from merging_helpers import brute_force, profile_of, random_case

from tfcommx.core import ConfigurationError
from tfcommx.planner import merging
from tfcommx.planner.merging.merging import Prices, finish_s
from tfcommx.simulator.assumptions import sorting_time


@pytest.mark.parametrize("name", merging.MERGINGS)
@given(st.lists(st.tuples(st.integers(0, 50), st.floats(0, 2)), max_size=12))
def test_every_gradient_once_and_in_order(name: str, rows: list[tuple[int, float]]) -> None:
    profile = profile_of([size for size, _ in rows], [seconds for _, seconds in rows], rest=1.0)
    prices = Prices(lambda entries: 0.5 + 0.1 * entries, sorting_time(0.01))
    groups = merging.get(name).groups(profile, prices)
    assert [position for group in groups for position in group] == list(range(len(rows)))
    assert all(groups) and groups == merging.get(name).groups(profile, prices)


@pytest.mark.parametrize("seed", range(120))
def test_optimal_is_the_best_of_all_merges(seed: int) -> None:
    """Models of 1 to 9 gradients; those of 14 are below."""
    draw = random.Random(seed)
    profile, prices = random_case(draw, draw.randint(1, 9))
    best = brute_force(profile, prices)
    groups = merging.get("optimal").groups(profile, prices)
    assert finish_s(groups, profile, prices) == pytest.approx(best, rel=1e-9)
    for name in merging.MERGINGS:
        found = finish_s(merging.get(name).groups(profile, prices), profile, prices)
        assert found >= best * (1 - 1e-12), name


@pytest.mark.parametrize("seed", [1, 2, pytest.param(3, marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("place", ["compute", "beside"])
def test_optimal_is_the_best_of_all_merges_of_fourteen(seed: int, place: str) -> None:
    draw = random.Random(seed)
    sizes = [draw.randrange(1, 4000) for _ in range(14)]
    profile = profile_of(sizes, [draw.random() for _ in range(14)])
    prices = Prices(lambda n: 0.4 + 3e-4 * n, sorting_time(2e-5), place)
    groups = merging.get("optimal").groups(profile, prices)
    found = finish_s(groups, profile, prices)
    assert found == pytest.approx(brute_force(profile, prices), rel=1e-9)
    assert len(groups) > 1


@pytest.mark.parametrize("seed", range(20))
def test_optimal_with_prices_of_steps(seed: int) -> None:
    """Padding, rounding and tables make steps: prices need not be linear, only rise."""
    draw = random.Random(seed)
    sizes = [draw.randrange(0, 300) for _ in range(8)]
    profile = profile_of(sizes, [draw.random() for _ in range(8)])
    prices = Prices(
        lambda n: 0.2 + 0.1 * math.ceil(n / 100) + (2.0 if n > 700 else 0.0),
        lambda n: 0.3 if n > 250 else 0.0,
    )
    found = finish_s(merging.get("optimal").groups(profile, prices), profile, prices)
    assert found == pytest.approx(brute_force(profile, prices), rel=1e-9)


def test_each_and_single_as_drawn() -> None:
    """a, b, c take 1 s each, selections 1, messages 1: 3 + 3 + 1, or 3 + 1 + 1."""
    profile = profile_of([1, 1, 1], [1.0, 1.0, 1.0])
    prices = Prices(lambda entries: 1.0, lambda entries: 1.0)
    each, single = (merging.get(name).groups(profile, prices) for name in ("each", "single"))
    assert (each, single) == ([[0], [1], [2]], [[0, 1, 2]])
    assert finish_s(each, profile, prices) == 7 and finish_s(single, profile, prices) == 5


def test_mg_wfbp_waits_less_than_a_latency_term() -> None:
    """As drawn: b is ready 0.5 after a, less than the latency of 0.9; c 2 after both."""
    prices = Prices(lambda entries: 0.9 + 0.1 * entries)
    profile = profile_of([1, 1, 1], [1.0, 0.5, 2.0])
    assert merging.get("mg_wfbp").groups(profile, prices) == [[0, 1], [2]]
    for later, groups in ((0.89, [[0, 1, 2]]), (0.91, [[0, 1], [2]])):
        profile = profile_of([1, 1, 1], [1.0, 0.5, later])
        assert merging.get("mg_wfbp").groups(profile, prices) == groups
    # While the port is busy, waiting costs nothing: a message of 10.9 s, then all that is ready
    busy = profile_of([100, 1, 1, 1], [1.0, 2.0, 3.0, 4.0])
    assert merging.get("mg_wfbp").groups(busy, prices) == [[0], [1, 2, 3]]


def test_unknown_names_and_prices_are_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"'optimum'.*'optimal'"):
        merging.get("optimum")
    with pytest.raises(ConfigurationError, match="`bucket_bytes`"):
        Prices(lambda entries: 1.0, bucket_bytes=0)
    with pytest.raises(ConfigurationError, match="'gpu'"):
        Prices(lambda entries: 1.0, selection_on="gpu")


@pytest.mark.parametrize(("gamma", "alpha"), [(0.0, 1e-3), (2e-10, 1e-3), (2e-10, 0.02)])
def test_the_optimum_of_500_gradients_is_found_fast(gamma: float, alpha: float) -> None:
    """Some times the goal of 2 s, because other processes may run; the last case is the hardest."""
    draw = random.Random(1)
    sizes = [draw.choice([256, 2048, 65_536, 1_000_000]) for _ in range(500)]
    profile = profile_of(sizes, [0.3 / 500 * draw.random() * 2 for _ in range(500)])
    prices = Prices(lambda n: alpha + n * 1e-9, sorting_time(gamma))
    start = time.process_time()
    groups = merging.get("optimal").groups(profile, prices)
    assert time.process_time() - start < 20
    found = finish_s(groups, profile, prices)
    for name in ("single", "each", "threshold", "mg_wfbp", "omgs"):
        assert found <= finish_s(merging.get(name).groups(profile, prices), profile, prices)

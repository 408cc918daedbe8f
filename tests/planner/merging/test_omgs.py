"""OMGS: Algorithm 1 line by line beside our one pass; and where it is not optimal."""

from __future__ import annotations

import random

import pytest
from merging_helpers import brute_force, profile_of, random_case

from tfcommx.core import Profile
from tfcommx.planner import merging
from tfcommx.planner.merging.merging import Prices, finish_s, ready_times


def algorithm_1(profile: Profile, prices: Prices) -> list[bool]:
    """FindMergedLayers: is layer l merged into l - 1? Layer L, here the last index, comes first."""
    ready = ready_times(profile)
    takes = [b - a for a, b in zip([0.0, *ready], ready, strict=False)]
    t_b = takes[::-1]
    d = [row.size for row in profile.variables][::-1]
    length = len(d)
    alpha = prices.startup_s

    def tkpm(size: int) -> float:
        return prices.selection_s(size) if size else 0.0

    def agpm(size: int) -> float:
        return prices.message_s(size) if size else 0.0

    def ccps(t_b: list[float], d: list[int], start: float) -> tuple[list[float], ...]:
        t_s = [tkpm(size) for size in d]
        tau_b, tau_s = [start] * len(d), [0.0] * len(d)
        for layer in reversed(range(len(d))):
            if layer < len(d) - 1:
                tau_b[layer] = tau_s[layer + 1] + t_s[layer + 1]
            tau_s[layer] = tau_b[layer] + t_b[layer]
        return tau_b, tau_s, t_s

    def ccms(tau_s: list[float], t_s: list[float], d: list[int]) -> tuple[list[float], ...]:
        t_c = [agpm(size) for size in d]
        tau_c = [0.0] * length
        for layer in reversed(range(length)):
            before = tau_c[layer + 1] + t_c[layer + 1] if layer < length - 1 else 0.0
            tau_c[layer] = max(before, tau_s[layer] + t_s[layer])
        return tau_c, t_c

    tau_b, tau_s, t_s = ccps(t_b, d, 0.0)
    tau_c, _ = ccms(tau_s, t_s, d)
    merged = [False] * length
    for layer in reversed(range(1, length)):
        mu = tau_b[layer] + t_b[layer] + t_b[layer - 1]
        q3 = mu + tkpm(d[layer]) + tkpm(d[layer - 1]) < tau_c[layer] + agpm(d[layer])
        q5 = tau_c[layer] + alpha > mu + tkpm(d[layer] + d[layer - 1])
        if q3 and q5:
            t_b[layer - 1], t_b[layer] = t_b[layer - 1] + t_b[layer], 0.0
            d[layer - 1], d[layer] = d[layer - 1] + d[layer], 0
            tail = slice(0, layer + 1)
            tau_b[tail], tau_s[tail], t_s[tail] = ccps(t_b[tail], d[tail], tau_b[layer])
            tau_c, _ = ccms(tau_s, t_s, d)
            merged[layer] = True
    return merged


@pytest.mark.parametrize("seed", range(60))
def test_one_pass_equals_the_printed_algorithm(seed: int) -> None:
    draw = random.Random(seed)
    profile, prices = random_case(draw, draw.randint(1, 15))
    groups = merging.get("omgs").groups(profile, prices)
    merged = [position != group[-1] for group in groups for position in group]
    assert merged == algorithm_1(profile, prices)[::-1]


def test_condition_q3_where_a_selection_is_mostly_launching() -> None:
    """Q5 implies Q3 where merged selections cost more; here one costs 2 s however long it is.

    a is selected and sent before b could be: b does not wait, so it is not merged.
    """
    profile = profile_of([1, 1], [1.0, 0.5])
    prices = Prices(lambda entries: 1.0 + 0.01 * entries, lambda entries: 2.0)
    assert merging.get("omgs").groups(profile, prices) == [[0], [1]]
    assert not any(algorithm_1(profile, prices))


def test_cases_c1_to_c3_of_the_paper() -> None:
    """Two gradients: b late (C1), the port busy until after both (C2), in between (C3)."""
    prices = Prices(lambda entries: 1.0 + 0.1 * entries)
    omgs = merging.get("omgs")
    assert omgs.groups(profile_of([1, 1], [1.0, 3.0]), prices) == [[0], [1]]
    assert omgs.groups(profile_of([50, 1, 1], [1.0, 2.0, 2.0]), prices) == [[0], [1, 2]]
    assert omgs.groups(profile_of([1, 1], [1.0, 0.9]), prices) == [[0, 1]]


def test_omgs_is_not_optimal() -> None:
    """Gradients of 2, 1 and 5 entries after 1, 3 and 6 s; a message takes 3 s and 1 an entry.

        seconds   0     1     2     3     4     5     6     7  ...
        omgs                        |          0 1         ... 9 |        2        ... 17
        optimal         |       0       ...             6 |       1 2      ... 15

    Alone, gradient 0 would end at 6; merged with 1, both end at 9 instead of 10, so the pair
    gains. But then waiting until 2 is ready gains nothing, so 2 pays a separate latency; in a
    message with 1 it would have paid none.
    """
    prices = Prices(lambda entries: 3.0 + entries)
    profile = profile_of([2, 1, 5], [1.0, 2.0, 3.0])
    greedy = merging.get("omgs").groups(profile, prices)
    optimal = merging.get("optimal").groups(profile, prices)
    assert (greedy, optimal) == ([[0, 1], [2]], [[0], [1, 2]])
    assert finish_s(greedy, profile, prices) == 17
    assert finish_s(optimal, profile, prices) == brute_force(profile, prices) == 15

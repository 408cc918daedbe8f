"""Steps to merge, at random, and all merges of a small one."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator

from tfcommx.core import Profile, VariableProfile
from tfcommx.planner.merging.merging import Prices, finish_s
from tfcommx.simulator.assumptions import sorting_time


def profile_of(sizes: list[int], seconds: list[float], rest: float = 0.0) -> Profile:
    """Make a profile of a backward pass in which each gradient takes some seconds."""
    ready = list(itertools.accumulate(seconds))
    rows = tuple(
        VariableProfile(f"v{i}", (size,), ready_s=at)
        for i, (size, at) in enumerate(zip(sizes, ready, strict=True))
    )
    return Profile("m", rows, 1.0, (ready[-1] if ready else 0.0) + rest, batch=1)


def all_groups(count: int) -> Iterator[list[list[int]]]:
    """Every way to cut positions into consecutive groups: 2^(count - 1) of them."""
    for cuts in itertools.product((False, True), repeat=count - 1):
        groups = [[0]]
        for position, cut in enumerate(cuts, start=1):
            groups.append([position]) if cut else groups[-1].append(position)
        yield groups


def random_case(draw: random.Random, count: int) -> tuple[Profile, Prices]:
    """A step in which neither compute nor messages always wait for the other."""
    sizes = [draw.choice([1, 10, 100, 1000, 5000]) + draw.randrange(50) for _ in range(count)]
    seconds = [draw.choice([0.0, 0.1, 1.0, 3.0]) * draw.random() for _ in range(count)]
    alpha, beta = draw.choice([0.01, 0.3, 1.0]), draw.choice([1e-5, 3e-4, 1e-3])
    gamma = draw.choice([0.0, 1e-5, 1e-4])
    return profile_of(sizes, seconds, draw.choice([0.1, 2.0])), Prices(
        message_s=lambda entries: alpha + beta * entries,
        selection_s=sorting_time(gamma),
        selection_on=draw.choice(["compute", "beside"]),
        entry_bytes=1,
        bucket_bytes=1000,
    )


def brute_force(profile: Profile, prices: Prices) -> float:
    return min(finish_s(groups, profile, prices) for groups in all_groups(len(profile.variables)))

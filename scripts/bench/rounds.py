"""Times of contestants that take turns: their order, and how they are compared."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

One = TypeVar("One")


def turns(contestants: Iterable[One], number: int) -> list[One]:
    """Return the contestants in the order of a round: another one in each, the same on all ranks.

    >>> turns("abc", 1) == turns("abc", 1), sorted(turns("abc", 2))
    (True, ['a', 'b', 'c'])
    """
    everyone = list(contestants)
    return random.Random(number).sample(everyone, len(everyone))


def seconds_of(step: Callable[[], Any], comm: Any = None) -> float:
    """Return how long a step takes, which returns when it is done; on ranks, the slowest one's."""
    if comm is not None:
        comm.gather_objects("ready")
    start = time.perf_counter()
    step()
    taken = time.perf_counter() - start
    return taken if comm is None else max(comm.gather_objects(taken))


def take_turns(
    steps: Mapping[str, Callable[[], Any]], repeats: int, comm: Any = None, warm_up: int = 2
) -> dict[str, list[float]]:
    """Time all contestants in turn, so that other work on the machine slows all of them alike.

    Args:
        steps: name -> a step, which returns when it is done.
        repeats: timed rounds.
        comm: of this rank, if the ranks take each step together.
        warm_up: rounds before them: the first one traces, the second touches memory.

    Returns:
        Name -> seconds of each timed round.

    **Ranks:** all, if there is a comm.
    """
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for number in range(-warm_up, repeats):
        for name in turns(steps, number):
            taken = seconds_of(steps[name], comm)
            if number >= 0:
                seconds[name].append(taken)
    return seconds


def paired_ratio(seconds: Sequence[float], base: Sequence[float]) -> float:
    """Return the median, over the rounds, of the time over the other's in the same round.

    >>> paired_ratio([2.0, 20.0, 8.0], [1.0, 10.0, 2.0])
    2.0
    """
    return statistics.median(mine / other for mine, other in zip(seconds, base, strict=True))

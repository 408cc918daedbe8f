"""Times of contestants that take turns: who is next, and how they are compared."""

from __future__ import annotations

import random
import statistics
from collections.abc import Iterable, Sequence
from typing import TypeVar

One = TypeVar("One")


def turns(contestants: Iterable[One], number: int) -> list[One]:
    """Return the contestants in the order of a round: another one in each, the same on all ranks.

    >>> turns("abc", 1) == turns("abc", 1), sorted(turns("abc", 2))
    (True, ['a', 'b', 'c'])
    """
    everyone = list(contestants)
    return random.Random(number).sample(everyone, len(everyone))


def paired_ratio(seconds: Sequence[float], base: Sequence[float]) -> float:
    """Return the median, over the rounds, of the time over the other's in the same round.

    >>> paired_ratio([2.0, 20.0, 8.0], [1.0, 10.0, 2.0])
    2.0
    """
    return statistics.median(mine / other for mine, other in zip(seconds, base, strict=True))


def of_windows(seconds: Sequence[float], steps: int) -> list[float]:
    """Return the mean seconds of a step in each window of so many consecutive steps.

    What happens once in so many steps is in each of them, while the median over single steps does
    not see it. Steps at the end that fill no window are left out.

    >>> of_windows([1.0, 1.0, 1.0, 5.0, 1.0, 1.0, 5.0, 1.0, 9.0], 4)
    [2.0, 2.0]
    """
    return [
        statistics.fmean(seconds[start : start + steps])
        for start in range(0, len(seconds) - steps + 1, steps)
    ]

"""The interval in which nine of ten steps lie that were predicted so.

    predicted   |        compute        |     exposed exchange     |
    interval    |        compute        |  shortest  |  ...  longest  | ... compute takes longer |

A prediction is missed for two reasons. Messages take another time than their price, by what is left
out of the price and by what varies from one measurement to the next; and a step takes longer than
its computing and its exchange together, where the exchange slows the computing that hides it. Both
were counted on published steps that nothing here was tuned to.

Source: `scripts/reproduce/intervals.py`; docs/laboratory/reproduction.md has the table.
"""

from __future__ import annotations

import math
from typing import NamedTuple


class Misses(NamedTuple):
    """How far published steps lie from predicted ones; 2.5 % of them lie beyond each number."""

    # Exposed exchange, published / predicted: at least, and at most.
    message_low: float
    message_high: float
    # A step whose exchange is hidden, published / predicted: at most.
    compute_high: float


# Of all sources of docs/laboratory/reproduction.md together.
MISSES = Misses(0.69, 1.6, 1.23)
# Standard deviations of a normal distribution beyond which 5 % lie.
NINETY = 1.645


class Interval(NamedTuple):
    """Seconds."""

    low: float
    high: float


def interval(
    compute_s: float, exposed_s: float, spread: float = 0.0, misses: Misses = MISSES
) -> Interval:
    """Return the interval of a predicted step.

    >>> interval(2.0, 1.0, misses=Misses(0.5, 1.5, 1.0))
    Interval(low=2.5, high=3.5)

    Args:
        compute_s: of the step without exchange, >= 0.
        exposed_s: by how much the exchange lengthens it, >= 0.
        spread: standard deviation / mean of what messages took in the probe, >= 0.
        misses: how far predictions are known to lie off.
    """
    varies = NINETY * spread
    shorter = math.hypot(1 - misses.message_low, varies)
    longer = math.hypot(misses.message_high - 1, varies)
    return Interval(
        compute_s + exposed_s * max(1 - shorter, 0.0),
        compute_s * misses.compute_high + exposed_s * (1 + longer),
    )

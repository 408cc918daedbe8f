"""The interface of merging solvers: their prices, and the finish that they minimize.

Gradients a, b, c become ready one after another; a and b travel together:

    compute   |  a  | b | select ab |     c     | select c |
    port                            |   message ab   |     |  message c |
                                                                        finish
"""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tfcommx.core import Profile, check_name, check_whole

# Entries of a group -> seconds.
Seconds = Callable[[int], float]
# The positions, in backward order, of the gradients of each group.
Groups = list[list[int]]


@dataclass(frozen=True)
class Prices:
    """The cost of a group of gradients, and the size of a bucket that the user requests.

    >>> prices = Prices(message_s=lambda entries: 0.5 + 0.25 * entries)
    >>> prices.startup_s
    0.5
    """

    # Price of the collectives of a group; a longer message never costs less.
    message_s: Seconds
    # Price of the selection from a group before its message; a longer vector never costs less.
    selection_s: Seconds = lambda entries: 0.0
    # "compute": the selection delays the backward pass; "beside": it has a separate stream.
    selection_on: str = "compute"
    # Bytes of an entry of the flat vector, >= 1.
    entry_bytes: int = 4
    # Size of a bucket of merging "threshold", >= 1.
    bucket_bytes: int = 1

    def __post_init__(self) -> None:
        check_name("place of the selection", self.selection_on, ("compute", "beside"))
        for name in ("entry_bytes", "bucket_bytes"):
            check_whole(name, getattr(self, name), least=1)

    @property
    def startup_s(self) -> float:
        """Seconds of a message without its entries: the papers' alpha."""
        # Extrapolated from one and two entries, because some routes price a message of none at 0
        return max(2 * self.message_s(1) - self.message_s(2), 0.0)


@dataclass(frozen=True)
class Merging:
    """A way to decide which gradients travel together."""

    # Name in the table and in `Scheme.merging`.
    name: str
    # (profile of the gradients in backward order, prices) -> the positions of each group,
    # ascending; every position is in exactly one group. A pure function, so equal on every rank.
    groups: Callable[[Profile, Prices], Groups]
    # True if it needs the ready times of gradients; otherwise a profile of sizes suffices.
    needs_times: bool = True


def ready_times(profile: Profile) -> list[float]:
    """Return when all gradients up to each position are ready, from the start of the backward pass.

    `plan.make_plan` refuses a profile without times.
    """
    return list(itertools.accumulate((row.ready_s for row in profile.variables), max))


def finish_s(groups: Sequence[Sequence[int]], profile: Profile, prices: Prices) -> float:
    """Return the seconds from the start of the backward pass to the end of it and all messages.

    `simulator.step.simulate` gives the same under the assumptions `IDEAL`.
    """
    ready, sizes = ready_times(profile), [row.size for row in profile.variables]
    delay = port = beside = 0.0
    for group in groups:
        size = sum(sizes[position] for position in group)
        seconds = prices.selection_s(size)
        if prices.selection_on == "compute":
            delay += seconds
            start = ready[group[-1]] + delay
        else:
            beside = start = max(beside, ready[group[-1]]) + seconds
        port = max(port, start) + prices.message_s(size)
    return max(port, profile.backward_s + delay)

"""Whether it pays to start again on more hosts.

A restart costs the steps that are not taken meanwhile; afterwards more are taken in a second:

    pays after  seconds * before / (after - before)

of training on the larger cluster. How long the run will last is not known: it is taken to last
once more as long as it has lasted.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from tfcommx.elastic.generation import Generation

# Of training, before its rate counts
RATE_SECONDS = 1.0


class Price(NamedTuple):
    """What a restart costs and gives."""

    # Without a step
    seconds: float
    # Batches of all ranks in a second
    before: float
    after: float

    @property
    def pays_after(self) -> float:
        """Return the seconds after which it has paid."""
        return self.seconds * self.before / (self.after - self.before)

    def in_words(self) -> str:
        """Say it in a sentence."""
        return (
            f"A restart costs {self.seconds:.1f} s, as the last one; {self.before:.3g} batches/s "
            f"now, {self.after:.3g} predicted (linear in ranks): it pays after "
            f"{self.pays_after:.0f} s."
        )


def price(generations: Sequence[Generation], ranks: int) -> Price | None:
    """Return the price of starting the last generation again on more ranks.

    Args:
        generations: all of the run.
        ranks: of the next one, more than the last one has.

    Returns:
        None before the last one's rate is known.
    """
    now, before = generations[-1], generations[-2:-1]
    rate = now.steps_per_second
    if rate is None or now.training_seconds < RATE_SECONDS:
        return None
    return Price(pause_before(now, *before), rate * now.ranks, rate * ranks)


def pause_before(generation: Generation, before: Generation | None = None) -> float:
    """Return the seconds without a step before a generation's first one.

    They begin with the last known step of the generation before, or the start of the ranks.
    """
    since = before.last_step_at if before and before.steps is not None else generation.began
    return generation.first_step_at - since

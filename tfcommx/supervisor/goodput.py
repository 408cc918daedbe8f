"""Goodput: the share of steps and seconds that count, and whether a restart on more hosts pays.

A restart costs the steps that are not taken meanwhile; afterwards more are taken in a second:

    pays after  seconds * before / (after - before)

of training on the larger cluster. How long the run will last is not known: it is taken to last
once more as long as it has lasted.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tfcommx.core import write_text
from tfcommx.supervisor.generation import Generation
from tfcommx.supervisor.hosts import in_words


class Goodput(NamedTuple):
    """Steps that count among all that were taken, and seconds of training among all."""

    steps: int
    steps_taken: int
    training_seconds: float
    seconds: float

    def in_words(self) -> str:
        """Say it in a sentence."""
        seconds = f"{_share(self.training_seconds, self.seconds)} of {self.seconds:.0f} s"
        if not self.steps_taken:
            return f"Nothing is known of the steps; the run took {self.seconds:.0f} s."
        return (
            f"{self.steps} of {self.steps_taken} steps count "
            f"({_share(self.steps, self.steps_taken)}); the ranks trained for {seconds}."
        )


def _share(part: float, whole: float) -> str:
    return f"{100 * part / whole:.1f} %" if whole else "all"


def goodput(generations: Sequence[Generation]) -> Goodput:
    """Return the goodput of a run; steps that were repeated do not count."""
    known = [one for one in generations if one.steps is not None]
    return Goodput(
        steps=(known[-1].steps or 0) - known[0].began_at_step if known else 0,
        steps_taken=sum(one.steps_taken for one in known),
        training_seconds=sum(one.training_seconds for one in known),
        seconds=generations[-1].ended - generations[0].began,
    )


def _row(one: Generation) -> list[str]:
    source = "-" if one.resumed is None else f"{one.resumed.source}, {one.resumed.total}"
    return [
        str(one.number),
        str(one.ranks),
        in_words(one.hosts),
        source,
        "-" if one.steps is None else str(one.steps),
        f"{one.ended - one.began:.1f}",
        "-" if one.steps is None else f"{one.training_seconds:.1f}",
        one.how,
    ]


HEADER = [
    "generation",
    "ranks",
    "hosts",
    "goes on from",
    "to step",
    "seconds",
    "training",
    "how it ended",
]


def table(generations: Sequence[Generation]) -> str:
    """Return a line for each generation, under a header."""
    rows = [HEADER, *map(_row, generations)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
    return "\n".join(lines)


def to_json(generations: Sequence[Generation]) -> dict[str, Any]:
    """Return what `table` says, for programs. Times are seconds since the start of the run."""
    start = generations[0].began
    rows = []
    for one in generations:
        known = one.steps is not None
        rows.append(
            {
                "generation": one.number,
                "ranks": one.ranks,
                "hosts": {host.name: host.slots for host in one.hosts},
                "linked": one.linked,
                "resumed": one.resumed._asdict() if one.resumed else None,
                "steps": one.steps,
                "began": round(one.began - start, 3),
                "first_step": round(one.first_step_at - start, 3) if known else None,
                "last_step": round(one.last_step_at - start, 3) if known else None,
                "ended": round(one.ended - start, 3),
                "snapshots": len(one.snapshots),
                "snapshot_seconds": sum(seconds for seconds, _ in one.snapshots),
                "snapshot_bytes": max((size for _, size in one.snapshots), default=0),
                "how": one.how,
            }
        )
    return {"generations": rows, "goodput": goodput(generations)._asdict()}


def write(generations: Sequence[Generation], path: Path) -> None:
    """Write `to_json` into a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, json.dumps(to_json(generations), indent=1) + "\n")


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

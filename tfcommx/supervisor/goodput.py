"""Goodput: the share of useful steps and seconds, and the price of a restart on more hosts.

A restart costs the steps of its pause; the rate in steps per second is higher afterwards:

    pays after  seconds * before / (after - before)

seconds of training on the larger cluster. The remaining duration of the run, which is unknown, is
assumed to equal the duration so far.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tfcommx.core import json_text, write_text
from tfcommx.supervisor.generation import Generation
from tfcommx.supervisor.hosts import in_words


class Goodput(NamedTuple):
    """Useful steps among all steps, and seconds of training among all seconds."""

    steps: int
    steps_taken: int
    training_seconds: float
    seconds: float

    def in_words(self) -> str:
        seconds = f"{_share(self.training_seconds, self.seconds)} of {self.seconds:.0f} s"
        if not self.steps_taken:
            return f"Nothing is known of the steps; the run took {self.seconds:.0f} s."
        return (
            f"{self.steps} of {self.steps_taken} steps count "
            f"({_share(self.steps, self.steps_taken)}); the ranks trained for {seconds}."
        )


def _share(part: float, total: float) -> str:
    return f"{100 * part / total:.1f} %" if total else "all"


def goodput(generations: Sequence[Generation]) -> Goodput:
    """Return the goodput of a run; repeated steps do not count."""
    linked = [generation for generation in generations if generation.steps is not None]
    return Goodput(
        # By a difference, because a generation repeats steps that the one before it had taken
        steps=(linked[-1].steps or 0) - linked[0].began_at_step if linked else 0,
        steps_taken=sum(generation.steps_taken for generation in linked),
        training_seconds=sum(generation.training_seconds for generation in linked),
        seconds=generations[-1].ended - generations[0].began,
    )


def _row(generation: Generation) -> list[str]:
    resumed, has_steps = generation.resumed, generation.steps is not None
    return [
        str(generation.number),
        str(generation.ranks),
        in_words(generation.hosts),
        f"{resumed.source}, {resumed.total}" if resumed else "-",
        str(generation.steps) if has_steps else "-",
        f"{generation.ended - generation.began:.1f}",
        f"{generation.training_seconds:.1f}" if has_steps else "-",
        generation.how,
    ]


HEADER = ["generation", "ranks", "hosts", "continues from", "to step", "seconds", "training"]
HEADER += ["how it ended"]


def table(generations: Sequence[Generation]) -> str:
    rows = [HEADER, *map(_row, generations)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)


def to_json(generations: Sequence[Generation]) -> dict[str, Any]:
    """Return the contents of `table` as JSON. Times are seconds since the start of the run."""
    start = generations[0].began
    rows = []
    for generation in generations:
        has_steps = generation.steps is not None
        rows.append(
            {
                "generation": generation.number,
                "ranks": generation.ranks,
                "hosts": {host.name: host.slots for host in generation.hosts},
                "linked": generation.linked,
                "resumed": generation.resumed._asdict() if generation.resumed else None,
                "steps": generation.steps,
                "began": round(generation.began - start, 3),
                "first_step": round(generation.first_step_at - start, 3) if has_steps else None,
                "last_step": round(generation.last_step_at - start, 3) if has_steps else None,
                "ended": round(generation.ended - start, 3),
                "snapshots": len(generation.snapshots),
                "snapshot_seconds": sum(seconds for seconds, _ in generation.snapshots),
                "snapshot_bytes": max((size for _, size in generation.snapshots), default=0),
                "how": generation.how,
            }
        )
    return {"generations": rows, "goodput": goodput(generations)._asdict()}


def write(generations: Sequence[Generation], path: Path) -> None:
    write_text(path, json_text(to_json(generations), indent=1) + "\n")


# Seconds of training before its rate counts
RATE_SECONDS = 1.0


class Price(NamedTuple):
    """Cost and benefit of a restart."""

    # Pause without a step
    seconds: float
    # Batches per second of all ranks, before and after the restart
    before: float
    after: float

    @property
    def pays_after(self) -> float:
        """Seconds of training after which the restart has paid."""
        return self.seconds * self.before / (self.after - self.before)

    def in_words(self) -> str:
        return (
            f"A restart costs {self.seconds:.1f} s, as the last one; {self.before:.3g} batches/s "
            f"now, {self.after:.3g} predicted (linear in ranks): it pays after "
            f"{self.pays_after:.0f} s."
        )


def price(generations: Sequence[Generation], ranks: int) -> Price | None:
    """Return the price of starting the last generation on more ranks; None before it is known."""
    last, before = generations[-1], generations[-2:-1]
    rate = last.steps_per_second
    if rate is None or last.training_seconds < RATE_SECONDS:
        return None
    return Price(pause_before(last, *before), rate * last.ranks, rate * ranks)


def pause_before(generation: Generation, before: Generation | None = None) -> float:
    """Return the seconds without a step before a generation's first step."""
    # Since the last known step, because the time to notice the loss is a part of the pause
    since = before.last_step_at if before and before.steps is not None else generation.began
    return generation.first_step_at - since

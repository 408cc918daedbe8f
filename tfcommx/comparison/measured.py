"""Measures what a step takes on hosts: a short dry run of each method.

A dry run has a phase's steps on made-up data. What of a step is not spent waiting for gradients
counts as computing: the predictions for these hosts begin with that, so that the ratio of
prediction to measurement tests what is predicted, the exchange.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from tfcommx.comparison.trainings import LOG, Setup, TrainingError, run_command
from tfcommx.recipes.recipe import Recipe
from tfcommx.terms import reading


class MeasuredSteps(NamedTuple):
    """What a dry run has measured of a method, phase by phase."""

    # Seconds of a step
    steps: tuple[float, ...]
    # Of these, without waiting for gradients
    computing: tuple[float, ...]


def measure(setup: Setup, method: str, settings: Sequence[str], hosts: str) -> MeasuredSteps:
    """Measure a method's steps on hosts, unless it was done before.

    Args:
        setup: of the comparison.
        method: its name.
        settings: all changes of the recipe.
        hosts: as `tfcommx train -H` takes them, such as node0:1,node1:1.

    **Raises:** TrainingError if a rank failed.
    """
    folder = setup.folder / "measured" / setup.name(method, [*settings, hosts])
    if not (folder / "dry_run.json").exists():
        words = ["train", str(setup.recipe), "--output", str(folder), "--dry-run", "-H", hosts]
        words += [word for setting in settings for word in ("--set", setting)]
        run_command(words, folder / LOG)
    file = folder / "dry_run.json"
    with reading("A dry run", file, "Delete the file: it is measured anew.", TrainingError):
        phases = json.loads(file.read_text())["phases"]
        steps = tuple(phase["step_seconds"] for phase in phases)
        waits = [phase["gradients_seconds"] for phase in phases]
    return MeasuredSteps(steps, tuple(step - wait for step, wait in zip(steps, waits, strict=True)))


def computing(measured: Sequence[MeasuredSteps]) -> list[float]:
    """Return the seconds of computing in a step of each phase: the median over the methods.

    >>> computing([MeasuredSteps((3.0,), (1.0,)), MeasuredSteps((2.0,), (1.5,))])
    [1.25]
    """
    return [
        statistics.median(one) for one in zip(*(each.computing for each in measured), strict=True)
    ]


def replaced(
    predicted: Mapping[str, Sequence[float]],
    measured: Mapping[str, MeasuredSteps],
    recipes: Mapping[str, Recipe],
) -> tuple[dict[str, list[float]], dict[str, float]]:
    """Put measured steps in the place of predicted ones.

    Epochs with a density of `warm_up`, which dry runs leave out, stay as predicted.

    Args:
        predicted: method -> seconds of a step in each epoch.
        measured: method -> what was measured.
        recipes: of the methods.

    Returns:
        Seconds of a step in each epoch, and predicted over measured seconds of all epochs that were
        measured, by method; no ratio for a method of whose epochs none was.
    """
    seconds: dict[str, list[float]] = {}
    ratios: dict[str, float] = {}
    for name, recipe in recipes.items():
        numbers = [number for number, one in enumerate(recipe.phases) for _ in range(one.epochs)]
        schemes = recipe.scheme_of_epoch()
        rows = zip(predicted[name], numbers, schemes, strict=True)
        seconds[name], sums = [], [0.0, 0.0]
        for step, number, scheme in rows:
            known = scheme == recipe.phases[number].scheme
            seconds[name].append(measured[name].steps[number] if known else step)
            if known:
                sums = [sums[0] + step, sums[1] + seconds[name][-1]]
        if sums[1]:
            ratios[name] = sums[0] / sums[1]
    return seconds, ratios

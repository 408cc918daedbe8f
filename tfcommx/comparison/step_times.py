"""The seconds of a step: predicted at a bandwidth by the simulator, or measured on hosts.

Predictions begin with a profile of the model. The profile is measured by `tfcommx profile` in one
process, once for each phase. So a node is assumed to have cores of its own, as fast as those of
this machine.

    strategy synchronous          | forward | backward, with the exchange | update |
    weight averaging, every = 3   | step | step | step | exchange || step | ...   the mean counts
                     overlap = 2  | step | step | step || step | step ...
                                                       | exchange |

Step-ahead error feedback is as averaging with every = 1, and gathers in the node what the scheme
does not.

An epoch of 8 steps has 3 such exchanges: the last round ends with the epoch, and nothing hides it.

On hosts each method has a short dry run: a phase's steps on made-up data. What of a step is not
spent waiting for gradients counts as computing: the predictions for these hosts begin with that, so
that the ratio of prediction to measurement tests what is predicted, the exchange.
"""

from __future__ import annotations

import dataclasses
import json
import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tfcommx import engines, routes
from tfcommx.comparison.trainings import LOG, Setup, TrainingError, run_command
from tfcommx.core import ENTRY_BYTES, NOMINAL, Link, Links, Profile, Scheme, Topology, reading
from tfcommx.planner.predict import Setting
from tfcommx.recipes.recipe import Recipe
from tfcommx.recipes.strategies import SynchronousRecipe
from tfcommx.routes.route import SparseRoute
from tfcommx.simulator.assumptions import Assumptions, measured_time

# Steps of a profile: other work on the machine comes and goes
PROFILED = 30
# Of the selection whose time is profiled too
SELECTION: dict[str, Any] = {"route": "allgather", "selection": "mstopk", "density": 0.03}


def links_at(bandwidth: float, links: Links = NOMINAL) -> Links:
    """Return what messages cost if a node's link carries so many bits per second."""
    between = links.between
    return links._replace(between=Link(between.alpha_s, 8 / bandwidth, between.gamma_s_per_byte))


def profiles_of(setup: Setup, recipe: Recipe) -> list[Profile]:
    """Return a profile for each phase; measure those that are not there yet.

    Args:
        setup: of the comparison.
        recipe: with the setup's changes.
    """
    found: list[Profile] = []
    for phase in recipe.phases:
        one = {"epochs": phase.epochs, "resolution": phase.resolution, "batch": phase.batch}
        phases = f"phases={json.dumps([{**one, 'scheme': SELECTION}])}"
        settings = setup.settings([phases, "learning_rate.warm_up_epochs=0"])
        file = setup.folder / "profiles" / f"{setup.name('phase', settings)}.json"
        if not file.exists():
            words = ["profile", str(setup.recipe), "--steps", str(PROFILED)]
            words += [word for setting in settings for word in ("--set", setting)]
            half = file.with_suffix(".part")
            run_command([*words, "--output", str(half)], file.with_suffix(".log"))
            half.rename(file)
        found.append(Profile.read(file))
    return found


def step_seconds(
    recipe: Recipe,
    profiles: list[Profile],
    topology: Topology,
    links: Links,
    steps: Sequence[int] = (),
) -> list[float]:
    """Predict the mean step of each epoch of a recipe.

    Args:
        recipe: of a method.
        profiles: of each phase, of one rank.
        topology: the cluster.
        links: what messages cost on it.
        steps: of each epoch; empty: not known, rounds of weight averaging are taken as whole.

    **Raises:** ConfigurationError for a scheme that the cluster cannot carry out.
    """
    numbers = [number for number, phase in enumerate(recipe.phases) for _ in range(phase.epochs)]
    every, hiding = recipe.strategy.every, recipe.strategy.overlapped_steps
    # Exchanges of a step: those that later steps hide, and the last one of an epoch
    rounds = [(math.ceil(count / every) - 1, 1, count) for count in steps]
    rounds = rounds or [(1, 0, every)] * len(numbers)
    in_steps = meets_in_steps(recipe)
    known: dict[tuple[int, Scheme], float] = {}
    found: list[float] = []
    for phase, scheme, (within, last, count) in zip(
        numbers, recipe.scheme_of_epoch(), rounds, strict=True
    ):
        profile = profiles[phase]
        if (phase, scheme) not in known:
            # What is averaged travels after the update
            computing = profile if in_steps else scaled(profile, 0.0)
            setting = Setting(computing, topology, links, Assumptions(measured_time(profile)))
            in_node = recipe.strategy.gathers_in_node * gather_seconds(scheme, profile, setting)
            known[phase, scheme] = setting.predict(scheme).step_s + in_node
        exchange = known[phase, scheme]
        waits = within * max(0.0, exchange - hiding * profile.compute_s) + last * exchange
        found.append(exchange if in_steps else profile.compute_s + waits / count)
    return found


def gather_seconds(scheme: Scheme, profile: Profile, setting: Setting) -> float:
    """Price an all-gather of all gradients in a node; 0 for a scheme that selects by rank."""
    route, topology, links = routes.get(scheme.route), setting.topology, setting.links
    if topology.slots == 1 or not isinstance(route, SparseRoute) or route.shards != "slots":
        return 0.0
    own = sum(row.size for row in profile.variables) * ENTRY_BYTES["float32"] / topology.slots
    return engines.of(links).all_gather(own, Topology(1, topology.slots), links)


def meets_in_steps(recipe: Recipe) -> bool:
    """Tell whether gradients are exchanged in each step, while others are computed."""
    return isinstance(recipe.strategy, SynchronousRecipe)


def scaled(profile: Profile, compute_s: float) -> Profile:
    """Return a profile whose step without exchange takes so many seconds; selections stay.

    >>> slow = scaled(Profile("tiny", (), forward_s=0.1, backward_s=0.3, batch=1), compute_s=0.8)
    >>> slow.forward_s, slow.backward_s
    (0.2, 0.6)
    """
    factor = compute_s / profile.compute_s
    rows = tuple(
        dataclasses.replace(
            row,
            ready_s=factor * row.ready_s,
            forward_s=factor * row.forward_s,
            update_s=factor * (row.update_s or 0.0),
        )
        for row in profile.variables
    )
    times = {name: factor * getattr(profile, name) for name in ("forward_s", "backward_s")}
    return dataclasses.replace(profile, variables=rows, **times)


def read_links(file: Path | None) -> Links:
    """Return the links of a file that `tfcommx probe` wrote; nominal ones without a file."""
    return NOMINAL if file is None else Links.read(file)


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

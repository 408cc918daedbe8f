"""What a step takes at a bandwidth, predicted by the simulator from a profile of the model.

The profile is measured by `tfcommx profile` in one process, once for each phase. So a node is
assumed to have cores of its own, as fast as those of this machine.

    strategy synchronous          | forward | backward, with the exchange | update |
    weight averaging, every = 3   | step | step | step | exchange || step | ...   the mean counts
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from tfcommx.comparison.trainings import Setup, run_command
from tfcommx.planner.predict import Setting
from tfcommx.recipes.recipe import Recipe
from tfcommx.simulator.assumptions import Assumptions
from tfcommx.simulator.selection_time import measured_time
from tfcommx.terms import NOMINAL, Link, Links, Profile, Scheme, Topology

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
    recipe: Recipe, profiles: list[Profile], topology: Topology, links: Links
) -> list[float]:
    """Predict the mean step of each epoch of a recipe.

    Args:
        recipe: of a method.
        profiles: of each phase, of one rank.
        topology: the cluster.
        links: what messages cost on it.

    **Raises:** PlanError for a scheme that the cluster cannot carry out.
    """
    numbers = [number for number, phase in enumerate(recipe.phases) for _ in range(phase.epochs)]
    known: dict[tuple[int, Scheme], float] = {}
    for phase, scheme in zip(numbers, recipe.scheme_of_epoch(), strict=True):
        if (phase, scheme) not in known:
            known[phase, scheme] = _mean_step(
                recipe.strategy.every, scheme, profiles[phase], topology, links
            )
    return [
        known[phase, scheme]
        for phase, scheme in zip(numbers, recipe.scheme_of_epoch(), strict=True)
    ]


def _mean_step(
    every: int, scheme: Scheme, profile: Profile, topology: Topology, links: Links
) -> float:
    assumptions = Assumptions(measured_time(profile))
    if every == 1:
        return Setting(profile, topology, links, assumptions).predict(scheme).step_s
    # What is averaged travels after the update, and nothing hides it
    at_once = Setting(scaled(profile, 0.0), topology, links, assumptions).predict(scheme)
    return profile.compute_s + at_once.step_s / every


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

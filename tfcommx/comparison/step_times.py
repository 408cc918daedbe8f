"""The seconds of a step: predicted at a bandwidth by the simulator, or measured on hosts.

Predictions begin with a profile of the model, which `tfcommx profile` measures in one process, once
for each phase. Each simulated node is therefore assumed to have cores as fast as this machine's.

    strategy synchronous          | forward | backward, with the exchange | update |
    weight averaging, every = 3   | step | step | step | exchange || step | ...   the mean counts
                     overlap = 2  | step | step | step || step | step ...
                                                       | exchange |

Step-ahead error feedback is priced as averaging with every = 1, plus its gathers in the node.

An epoch of 8 steps has 3 such exchanges: the last round ends with the epoch, and nothing hides it.

On hosts each method has a short dry run: a phase's steps on synthetic data. The part of a step that
is not spent waiting for gradients counts as computing. Predictions for these hosts begin with that
time, because the ratio of prediction to measurement should test the predicted exchange alone.
"""

import json
import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from tfcommx import engines, routes
from tfcommx.comparison.trainings import LOG, Setup, TrainingError, run_command
from tfcommx.core import ENTRY_BYTES, Link, Links, Profile, Scheme, Topology, reading
from tfcommx.planner.predict import Setting
from tfcommx.recipes.recipe import Recipe
from tfcommx.recipes.strategies import SynchronousRecipe
from tfcommx.routes.route import SparseRoute
from tfcommx.simulator.assumptions import Assumptions, measured_time

# Steps of a profile: many, because other work on the machine varies
PROFILED = 30
# Scheme whose selection time is profiled too
SELECTION: dict[str, Any] = {"route": "allgather", "selection": "mstopk", "density": 0.03}


def links_at(bandwidth: float, links: Links) -> Links:
    between = links.between
    return links._replace(between=Link(between.alpha_s, 8 / bandwidth, between.gamma_s_per_byte))


def profiles_of(setup: Setup, recipe: Recipe) -> list[Profile]:
    """Return a profile for each phase; measure those that do not exist yet."""
    profiles: list[Profile] = []
    for phase in recipe.phases:
        profiled = {"epochs": phase.epochs, "resolution": phase.resolution, "batch": phase.batch}
        phases = f"phases={json.dumps([{**profiled, 'scheme': SELECTION}])}"
        # Because a recipe refuses a warm-up of as many epochs as this phase may have
        settings = setup.settings([phases, "learning_rate.warm_up_epochs=0"])
        file = setup.folder / "profiles" / f"{setup.name('phase', settings)}.json"
        if not file.exists():
            words = ["profile", str(setup.recipe), "--steps", str(PROFILED)]
            words += [word for setting in settings for word in ("--set", setting)]
            # Renamed once it is complete, because an existing file is not measured again
            half = file.with_suffix(".part")
            run_command([*words, "--output", str(half)], file.with_suffix(".log"))
            half.rename(file)
        profiles.append(Profile.read(file))
    return profiles


def step_seconds(
    recipe: Recipe,
    profiles: list[Profile],
    topology: Topology,
    links: Links,
    steps: Sequence[int] = (),
) -> list[float]:
    """Predict the mean step of each epoch of a recipe.

    Args:
        profiles: one for each phase, of one rank.
        steps: the number of steps of each epoch; empty: unknown, and every round of weight
            averaging is assumed to be complete.

    **Raises:** ConfigurationError for a scheme that the cluster cannot carry out.
    """
    numbers = [number for number, phase in enumerate(recipe.phases) for _ in range(phase.epochs)]
    every, hiding = recipe.strategy.every, recipe.strategy.overlapped_steps
    # Per epoch: exchanges that later steps hide, exchanges that none hides, and steps
    rounds = [(math.ceil(count / every) - 1, 1, count) for count in steps]
    rounds = rounds or [(1, 0, every)] * len(numbers)
    in_steps = meets_in_steps(recipe)
    predicted: dict[tuple[int, Scheme], float] = {}
    seconds: list[float] = []
    for phase, scheme, (within, last, count) in zip(
        numbers, recipe.scheme_of_epoch(), rounds, strict=True
    ):
        profile = profiles[phase]
        if (phase, scheme) not in predicted:
            # Averaged weights are exchanged after the update: no backward pass hides them
            computing = profile if in_steps else profile.scaled(0, 0)
            setting = Setting(computing, topology, links, Assumptions(measured_time(profile)))
            in_node = recipe.strategy.gathers_in_node * gather_seconds(scheme, profile, setting)
            predicted[phase, scheme] = setting.predict(scheme).step_s + in_node
        exchange = predicted[phase, scheme]
        waits = within * max(0.0, exchange - hiding * profile.compute_s) + last * exchange
        seconds.append(exchange if in_steps else profile.compute_s + waits / count)
    return seconds


def gather_seconds(scheme: Scheme, profile: Profile, setting: Setting) -> float:
    """Price an all-gather of all gradients in a node; 0 for a scheme that selects by rank."""
    route = routes.get(scheme.route)
    if not isinstance(route, SparseRoute) or route.shards != "slots":
        return 0.0
    shard_bytes = ENTRY_BYTES["float32"] * profile.size / setting.topology.slots
    return engines.gather_seconds(shard_bytes, "node", setting.topology, setting.links)


def meets_in_steps(recipe: Recipe) -> bool:
    """Return True if gradients are exchanged in each step, during the backward pass."""
    return isinstance(recipe.strategy, SynchronousRecipe)


class MeasuredSteps(NamedTuple):
    """Step times of a method in a dry run, phase by phase."""

    # Seconds of a step
    steps: tuple[float, ...]
    # Seconds of a step without the wait for gradients
    computing: tuple[float, ...]


def measure(setup: Setup, method: str, settings: Sequence[str], hosts: str) -> MeasuredSteps:
    """Measure a method's steps on hosts, unless the folder has them already.

    Args:
        hosts: as for `tfcommx train -H`, such as node0:1,node1:1.

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
    """Return the compute time of a step of each phase, in seconds: the median over the methods.

    >>> computing([MeasuredSteps((3.0,), (1.0,)), MeasuredSteps((2.0,), (1.5,))])
    [1.25]
    """
    return [
        # All methods compute alike, and the median is less disturbed by other work than one of them
        statistics.median(phase)
        for phase in zip(*(steps.computing for steps in measured), strict=True)
    ]


def replaced(
    predicted: Mapping[str, Sequence[float]],
    measured: Mapping[str, MeasuredSteps],
    recipes: Mapping[str, Recipe],
) -> tuple[dict[str, list[float]], dict[str, float]]:
    """Replace predicted steps by measured ones.

    Returns:
        By method: seconds of a step in each epoch, and predicted over measured seconds of all
        measured epochs. A method without a measured epoch has no ratio.
    """
    seconds: dict[str, list[float]] = {}
    ratios: dict[str, float] = {}
    for name, recipe in recipes.items():
        numbers = [
            number for number, phase in enumerate(recipe.phases) for _ in range(phase.epochs)
        ]
        schemes = recipe.scheme_of_epoch()
        rows = zip(predicted[name], numbers, schemes, strict=True)
        seconds[name], sums = [], [0.0, 0.0]
        for step, number, scheme in rows:
            # Dry runs leave the epochs with a density of `warm_up` out
            is_measured = scheme == recipe.phases[number].scheme
            seconds[name].append(measured[name].steps[number] if is_measured else step)
            if is_measured:
                sums = [sums[0] + step, sums[1] + seconds[name][-1]]
        if sums[1]:
            ratios[name] = sums[0] / sums[1]
    return seconds, ratios

"""`tfcommx compare`: train a recipe by several methods; compare their costs and scores."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from tfcommx.cli.parameters import Changes, JsonFile, write_rows
from tfcommx.cli.plan import (
    BATCH_HELP,
    GPU_HELP,
    THROUGHPUT_HELP,
    check_is_measured,
    profile_of,
)
from tfcommx.comparison import figures, tables
from tfcommx.comparison.methods import check_names_a_route, fitting, read_methods
from tfcommx.comparison.rows import Comparison, Steps, rows_of, score_of
from tfcommx.comparison.step_times import (
    MeasuredSteps,
    computing,
    links_at,
    measure,
    meets_in_steps,
    profiles_of,
    replaced,
    step_seconds,
)
from tfcommx.comparison.trainings import Setup, train, trained
from tfcommx.core import NOMINAL, ConfigurationError, Links, Topology, check_number
from tfcommx.launch.hosts import parse_hosts, slots_of
from tfcommx.recipes.reader import RecipeError, RecipePart
from tfcommx.recipes.recipe import Recipe
from tfcommx.recipes.recipe import read as read_recipe


def compare(
    config: Annotated[Path, typer.Argument(help="Recipe, such as configs/fashion_mnist.yaml.")],
    methods: Annotated[
        str,
        typer.Option(
            help="Names and YAML files, separated by commas: dense,local_sgd,mine.yaml. Default: "
            "all built-in methods that fit the recipe."
        ),
    ] = "",
    bandwidths: Annotated[
        str, typer.Option(help="Bandwidths of a node's link, bit/s, separated by commas.")
    ] = "200e6,1e9,10e9",
    seeds: Annotated[int, typer.Option(min=1, help="Trainings of each method.")] = 3,
    nodes: Annotated[int, typer.Option(min=1, help="Nodes; all train on this machine.")] = 4,
    slots: Annotated[int, typer.Option(min=1, help="Ranks of each node.")] = 1,
    output: Annotated[
        Path | None, typer.Option(help="Folder; by default runs/compare_NAME of the recipe.")
    ] = None,
    settings: Changes = None,
    target: Annotated[
        float | None,
        typer.Option(
            help="Score whose time is compared, in % or BLEU. Default: .2 points, or .5 BLEU, less "
            "than dense at the end."
        ),
    ] = None,
    links: Annotated[
        Path | None,
        typer.Option(help="File that `tfcommx probe` wrote; bandwidths replace its rate."),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            help="Model whose step times apply in all phases: the file of a profile, or a name "
            "such as resnet50. Default: the recipe's model, profiled here."
        ),
    ] = None,
    gpu: Annotated[str | None, typer.Option(help=GPU_HELP)] = None,
    batch: Annotated[int | None, typer.Option(min=1, help=BATCH_HELP)] = None,
    throughput: Annotated[float | None, typer.Option(help=THROUGHPUT_HELP)] = None,
    hosts: Annotated[
        str | None,
        typer.Option("-H", "--hosts", help="Also measure steps on these: node0:1,node1:1,..."),
    ] = None,
    measured_at: Annotated[
        float | None, typer.Option(help="Bandwidth of the links of these hosts, bit/s.")
    ] = None,
    json_file: JsonFile = None,
) -> None:
    """Train a recipe by several methods, and compare scores at equal steps, bytes and time.

    Each method trains the recipe once per seed, on this machine. Time is steps times the time of a
    step, which is predicted for each bandwidth, or measured on --hosts. Finished trainings are kept
    in the folder, so that an interrupted comparison continues with the next one.
    """
    _check_hosts(hosts, measured_at, nodes * slots)
    # All ranks share this machine, so that importing TensorFlow in 8 of them can take longer than
    # the 30 s that Gloo waits for a rank by default
    os.environ.setdefault("HOROVOD_GLOO_TIMEOUT_SECONDS", "300")
    plain = read_recipe(config, settings or [])
    folder = output or Path("runs") / f"compare_{plain.name}"
    setup = Setup(config, tuple(settings or ()), nodes, slots, folder)
    rates = _numbers(bandwidths)
    # Before the first training, because all of them take hours
    changes, recipes = _checked(setup, plain, _words(methods))
    prices = NOMINAL if links is None else Links.read(links)
    given = None
    if model is not None:
        given = profile_of(model, gpu, throughput, batch)
    else:
        check_is_measured("the recipe's own model", gpu, throughput, batch)
    if plain.links is not None:
        Links.read(plain.links)
    trainings = _trainings(setup, changes, seeds)
    # The compute profile of a step in each phase
    profiles = [given] * len(plain.phases) if given else profiles_of(setup, plain)
    on_hosts: dict[str, MeasuredSteps] = {}
    if hosts is not None:
        on_hosts = {
            name: measure(setup, name, setup.settings(changes[name]), hosts) for name in changes
        }
        in_step = [measured for name, measured in on_hosts.items() if meets_in_steps(recipes[name])]
        computes = computing(in_step or list(on_hosts.values()))
        factors = [s / row.compute_s for row, s in zip(profiles, computes, strict=True)]
        profiles = [row.scaled(x, x) for row, x in zip(profiles, factors, strict=True)]
    steps_of_epochs = {
        name: [epoch["steps"] for epoch in rows[0]["epochs"]] for name, rows in trainings.items()
    }
    steps, topology = [], Topology(nodes, slots)
    # Each rate once, because --measured-at may be among the --bandwidths
    for rate in sorted({*rates, *([measured_at] if measured_at else [])}):
        at_rate = links_at(rate, prices)
        predicted = {
            name: step_seconds(recipe, profiles, topology, at_rate, steps_of_epochs[name])
            for name, recipe in recipes.items()
        }
        seconds: Mapping[str, Sequence[float]] = predicted
        ratios: Mapping[str, float] = {}
        if rate == measured_at:
            seconds, ratios = replaced(predicted, on_hosts, recipes)
        steps.append(Steps(rate, seconds, ratios))
    score = score_of(next(iter(trainings.values()))[0])
    comparison = Comparison(trainings, steps, score, target)
    tables.show(comparison)
    figures.draw(comparison, folder / figures.PICTURE)
    print(f"figure: {folder / figures.PICTURE}")
    write_rows(json_file, rows_of(comparison))


def _check_hosts(hosts: str | None, measured_at: float | None, ranks: int) -> None:
    if hosts is None and measured_at is None:
        return
    if hosts is None or measured_at is None:
        raise ConfigurationError(
            "--hosts and --measured-at, the bandwidth of their links, need each other. Received "
            f"{hosts} and {measured_at}."
        )
    check_number("--measured-at", measured_at, "> 0")
    slots = slots_of(parse_hosts(hosts))
    if slots != ranks:
        raise ConfigurationError(
            f"The hosts of -H must have --nodes x --slots = {ranks} slots. Received {slots}, in "
            f"{hosts!r}."
        )


def _words(text: str) -> list[str]:
    return [word.strip() for word in text.split(",") if word.strip()]


def _numbers(text: str) -> list[float]:
    try:
        rates = [float(word) for word in _words(text)]
    except ValueError:
        rates = []
    if not rates or not all(0 < rate < float("inf") for rate in rates):
        raise ConfigurationError(
            f"`--bandwidths` needs numbers > 0, as 200e6,1e9. Received {text!r}."
        )
    return rates


def _checked(
    setup: Setup, plain: Recipe, words: list[str]
) -> tuple[dict[str, list[str]], dict[str, Recipe]]:
    epochs = [phase.epochs for phase in plain.phases]
    as_settings = plain.strategy.model_dump() if isinstance(plain.strategy, RecipePart) else None
    changes, recipes = {}, {}
    for name, method in fitting(read_methods(words), plain, named=bool(words)).items():
        if method.strategy == as_settings:
            # Left out, because it would change the digest and so invalidate finished trainings
            method = method.model_copy(update={"strategy": None})
        settings = method.settings(epochs)
        try:
            recipe = read_recipe(setup.recipe, setup.settings(settings))
            check_names_a_route(recipe)
        except RecipeError as error:
            if words:
                raise RecipeError(f"Method {name!r}: {error}") from error
            # One of many, not asked for by name, such as a momentum in few bits where it is 0
            print(f"Left out: {name}. {error}", flush=True)
            continue
        changes[name], recipes[name] = settings, recipe
    return changes, recipes


def _trainings(
    setup: Setup, changes: Mapping[str, list[str]], seeds: int
) -> dict[str, list[dict[str, Any]]]:
    # All methods with the first seed come first, so that an interrupted comparison shows each
    trainings: dict[str, list[dict[str, Any]]] = {name: [] for name in changes}
    for seed in range(seeds):
        for position, (name, method_changes) in enumerate(changes.items(), 1):
            settings = setup.settings(method_changes, seed)
            training = trained(setup, name, settings)
            if training is None:
                number = seed * len(changes) + position
                print(f"{number} of {seeds * len(changes)}: {name}, seed {seed}", flush=True)
                training = train(setup, name, settings)
            trainings[name].append(training)
    return trainings

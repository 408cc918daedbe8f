"""`tfcommx train`: train a model as a recipe says."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tfcommx.cli.environment import load_tensorflow
from tfcommx.cli.launch import horovodrun
from tfcommx.recipes.recipe import Recipe
from tfcommx.recipes.recipe import read as read_recipe
from tfcommx.report.terminal import show_run

SET_HELP = "Change the recipe, e.g. --set phases.0.epochs=1. Repeatable."


def train(
    config: Annotated[
        Path, typer.Argument(help="Recipe, a YAML file such as configs/fashion_mnist.yaml.")
    ],
    output: Annotated[
        Path | None, typer.Option(help="Folder of the run; by default runs/NAME of the recipe.")
    ] = None,
    resume: Annotated[
        bool, typer.Option(help="Continue after the last checkpoint in the run's folder.")
    ] = False,
    settings: Annotated[
        list[str] | None, typer.Option("--set", metavar="PLACE=VALUE", help=SET_HELP)
    ] = None,
    processes: Annotated[
        int | None,
        typer.Option(min=1, help="Start that many processes on this machine, with horovodrun."),
    ] = None,
    terminal: Annotated[str | None, typer.Option(hidden=True)] = None,
    show_report: Annotated[bool, typer.Option("--report/--no-report", hidden=True)] = True,
) -> None:
    """Train a model as a recipe says.

    On one machine: `tfcommx train CONFIG --processes 4`. On several: `horovodrun -np 32 -H
    node1:8,node2:8,... tfcommx train CONFIG`.
    """
    recipe = read_recipe(config, settings or [])
    folder = output or Path("runs") / recipe.name
    if processes:
        words = ["train", str(config), "--output", str(folder), "--no-report"]
        words += [word for setting in settings or [] for word in ("--set", setting)]
        horovodrun(processes, [*words, *(["--resume"] if resume else [])])
        show_run(folder)
        return
    if train_here(recipe, folder, resume, terminal) and show_report:
        show_run(folder)


def train_here(recipe: Recipe, folder: Path, resume: bool, terminal: str | None) -> bool:
    """Train in this process, one of those that the launcher started; tell whether it is rank 0."""
    load_tensorflow()
    from tfcommx import is_chief
    from tfcommx.training.train import train as run

    run(recipe, folder, resume, terminal)
    return bool(is_chief())

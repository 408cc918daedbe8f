"""The command line: `tfcommx train`, `report`, `probe`, `cache`. TensorFlow is imported only where
a command needs it.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from tfcommx.cli.cache import app as cache_app
from tfcommx.data.cache.slab_files import SlabError
from tfcommx.data.sources.base import SampleError
from tfcommx.recipes.datasets.fashion_mnist import DataError
from tfcommx.recipes.reader import RecipeError
from tfcommx.recipes.recipe import read as read_recipe
from tfcommx.report.summary import ReportError
from tfcommx.terms import PlanError

SET_HELP = "Change the recipe, e.g. --set phases.0.epochs=1. Repeatable."
USER_ERRORS = (PlanError, RecipeError, DataError, ReportError, SampleError, SlabError)

app = typer.Typer(
    name="tfcommx",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Data-parallel training where machines are strong and the network between them is slow.",
)
app.add_typer(cache_app)


@app.callback()
def _group() -> None:
    """Keep the commands' names even when there is only one of them."""


@app.command()
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
) -> None:
    """Train a model as a recipe says. Start it with horovodrun: `horovodrun -np 4 tfcommx train
    CONFIG`.
    """
    recipe = read_recipe(config, settings or [])
    # TensorFlow greets once per process; errors still come through
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    from tfcommx import is_chief
    from tfcommx.report import terminal
    from tfcommx.training.train import train as run

    folder = output or Path("runs") / recipe.name
    # horovodrun puts a pipe between rank 0 and the terminal; `make demo` names the terminal for the
    # progress bar.
    summary = run(recipe, folder, resume, os.environ.get("TFCOMMX_TERMINAL"))
    if is_chief():
        terminal.show(summary)
        print(f"Report, figures, TensorBoard events and checkpoint: {folder}")


@app.command()
def report(
    run_folder: Annotated[
        Path, typer.Argument(help="Folder that `tfcommx train` wrote, such as runs/fashion_mnist.")
    ],
) -> None:
    """Print the report of a finished run."""
    from tfcommx.report import summary, terminal

    terminal.show(summary.read(run_folder))


@app.command()
def probe(
    output: Annotated[
        Path, typer.Option(help="File of the links; the figure goes beside it, as .png.")
    ] = Path("links.json"),
    largest: Annotated[
        int, typer.Option(min=4096, help="Bytes of the largest message; less for slow networks.")
    ] = 2**24,
    repeats: Annotated[int, typer.Option(min=1, help="Of each size; the fastest counts.")] = 5,
) -> None:
    """Measure the links of this cluster: `horovodrun -np 8 -H ... tfcommx probe`. Schemes are then
    planned by what they cost.
    """
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    from tfcommx import init, is_chief
    from tfcommx.measure import links
    from tfcommx.report import figures

    comm = init()
    # rank 0 writes; say it on all
    if not comm.gather_objects(output.parent.is_dir() and os.access(output.parent, os.W_OK))[0]:
        raise PlanError(
            f"`--output` must be in a folder that rank 0 can write to. Received {output}. Make "
            "the folder, or give another."
        )
    found = links.probe(comm, [size for size in links.SIZES if size <= largest], repeats)
    if is_chief():
        output.write_text(found.to_json())
        figures.draw_links(found, output.with_suffix(".png"))
        for kind, link in found.links._asdict().items():
            print(f"{kind}: {link}")
        print(
            f"{output}, {output.with_suffix('.png')}. Use it: DistributedOptimizer(..., "
            f"links={str(output)!r}), or links: in a recipe."
        )
    comm.gather_objects("done")


def main() -> None:
    """Run the command line; what the user can put right is told without a traceback, with exit code
    2.
    """
    try:
        app()
    except USER_ERRORS as error:
        print(f"tfcommx: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()

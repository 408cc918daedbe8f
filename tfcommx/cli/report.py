"""`tfcommx report`: print the report of runs."""

import os
from pathlib import Path
from typing import Annotated

import typer

from tfcommx.report.terminal import read_to_show, show_comparison, show_run


def report(
    run_folders: Annotated[
        list[Path],
        typer.Argument(
            metavar="RUN...", help="Folders that `tfcommx train` wrote, such as runs/fashion_mnist."
        ),
    ],
) -> None:
    """Print the report of one run, or a comparison of several."""
    if len(run_folders) == 1:
        show_run(run_folders[0])
    else:
        show_comparison(
            dict(zip(names_of(run_folders), map(read_to_show, run_folders), strict=True))
        )


def names_of(folders: list[Path]) -> list[str]:
    """Return distinct names of folders: their last parts, or their whole paths.

    >>> names_of([Path("runs/dense"), Path("runs/sparse")])
    ['dense', 'sparse']
    >>> names_of([Path("a/run"), Path("b/run")])
    ['a/run', 'b/run']
    """
    names = [os.path.basename(os.path.abspath(folder)) for folder in folders]
    if len(set(names)) == len(names):
        return names
    return [f"{folder}" for folder in folders]

"""`tfcommx report`: print the report of a finished run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tfcommx.report.terminal import show_run


def report(
    run_folder: Annotated[
        Path, typer.Argument(help="Folder that `tfcommx train` wrote, such as runs/fashion_mnist.")
    ],
) -> None:
    """Print the report of a finished run."""
    show_run(run_folder)

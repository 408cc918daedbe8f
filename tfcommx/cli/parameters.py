"""Parameters of several commands, and their replacement in a command that typer reads."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from tfcommx.core import write_text

Changes = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="PLACE=VALUE",
        help="Change the recipe, e.g. --set phases.0.epochs=1. Repeatable.",
    ),
]
JsonFile = Annotated[Path | None, typer.Option("--json", help="Write all rows, one object a line.")]


def write_rows(file: Path | None, rows: Iterable[Mapping[str, Any]]) -> None:
    """Write rows as `JsonFile` describes; no effect without a file."""
    if file is not None:
        write_text(file, "".join(json.dumps(row) + "\n" for row in rows))


def show_parameters(command: Callable[..., None], parameters: Sequence[inspect.Parameter]) -> None:
    """Set the parameters that typer, and `inspect.signature`, read from a function.

    >>> def say(**words: str) -> None: ...
    >>> name = inspect.Parameter("name", inspect.Parameter.KEYWORD_ONLY, annotation=str)
    >>> show_parameters(say, [name])
    >>> inspect.signature(say)
    <Signature (*, name: str)>
    """
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}

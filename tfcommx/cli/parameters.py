"""The parameters of a command that typer reads, where they are not those of its function."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence


def show_parameters(command: Callable[..., None], parameters: Sequence[inspect.Parameter]) -> None:
    """Let typer, and `inspect.signature`, read these parameters in place of the function's own.

    >>> def say(**given: str) -> None: ...
    >>> name = inspect.Parameter("name", inspect.Parameter.KEYWORD_ONLY, annotation=str)
    >>> show_parameters(say, [name])
    >>> inspect.signature(say)
    <Signature (*, name: str)>
    """
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {one.name: one.annotation for one in parameters}

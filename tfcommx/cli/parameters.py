"""Parameters of several commands, and their replacement in a command that typer reads."""

import inspect
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
import typer.core

from tfcommx.core import (
    ConfigurationError,
    Links,
    Profile,
    Topology,
    json_text,
    local_path,
    write_text,
)


class Command(typer.core.TyperCommand):
    """A command that names a refused value, refuses an empty path, and has a plain help."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Write the help as lines, because rich's table cuts names of options at 80 columns."""
        self.rich_markup_mode = None
        super().format_help(ctx, formatter)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the words of a command line into `ctx.params`; return those that are left.

        **Raises:** BadParameter with the value, which typer leaves out; ConfigurationError for an
        empty path, such as of a variable that is not set, which would be the current folder.
        """
        # A copy, because click removes the words from its list
        words = list(args)
        try:
            rest = super().parse_args(ctx, args)
        except typer.BadParameter as error:
            value = self._words_of(ctx, words).get(error.param.name) if error.param else None
            if value is not None and repr(value) not in error.message:
                error.message = f"{error.message.removesuffix('.')}. Received {value!r}."
            raise
        for name, value in self._words_of(ctx, words).items():
            parsed = ctx.params.get(name)
            for word, item in zip(*map(_as_list, (value, parsed)), strict=False):
                if word == "" and isinstance(item, Path):
                    local_path(name, word)
        return rest

    def _words_of(self, ctx: Any, words: list[str]) -> Mapping[str, Any]:
        """Return parameter -> its word, or words, in the command line."""
        found: Mapping[str, Any] = self.make_parser(ctx).parse_args(args=list(words))[0]
        return found


def _as_list(value: Any) -> Sequence[Any]:
    return value if isinstance(value, list | tuple) else [value]


Changes = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="PLACE=VALUE",
        help="Change the recipe, e.g. --set phases.0.epochs=1. Repeatable.",
    ),
]
# Endings of the pictures that are drawn
PICTURES = (".png", ".svg", ".pdf", ".jpg", ".jpeg", ".eps", ".webp")


def output_file(*names: str, text: str, picture: bool = False) -> Any:
    """Declare an option for a file that a command writes at its end.

    Args:
        names: names of the option; none: that of the parameter.
        picture: True if the ending must be one of PICTURES.
    """

    # Before the command begins, because that may take hours
    def check(path: Path | None) -> Path | None:
        return None if path is None else check_output(path, picture)

    return typer.Option(*names, help=text, callback=check)


def check_output(path: Path, picture: bool = False) -> Path:
    """Return a path to which this process can probably write; expand its `~`.

    **Raises:** ConfigurationError for a folder, a folder or file without the right to write, an
    address such as gs://bucket/rows.json, and with `picture` an ending of no picture.
    """
    path = local_path("output file", path)
    if picture and path.suffix.lower() not in PICTURES:
        raise ConfigurationError(
            f"The name of a picture must end with {', '.join(PICTURES)}. Received {str(path)!r}."
        )
    # The nearest folder that exists, because the others are made when the file is written
    existing = next(part for part in (path, *path.absolute().parents) if part.exists())
    if existing.is_dir() == (existing == path) or not os.access(existing, os.W_OK):
        raise ConfigurationError(
            f"A file that can be written is required. Received {str(path)!r}: {existing} is in the "
            "way, or cannot be written. Give another."
        )
    return path


JsonFile = Annotated[Path | None, output_file("--json", text="Write all rows, one object a line.")]


def write_rows(file: Path | None, rows: Iterable[Mapping[str, Any]]) -> None:
    """Write rows as `JsonFile` describes; no effect without a file."""
    if file is not None:
        write_text(file, "".join(json_text(row) + "\n" for row in rows))


def read_links(path: Path, topology: Topology) -> Links:
    """Read a file of links; print a note if it lacks measurements that this topology needs."""
    links = Links.read(path)
    for kind in Links.unmeasured(path):
        if (topology.slots if kind == "inside" else topology.nodes) > 1:
            link = getattr(links, kind)
            print(
                f"tfcommx: {path} was measured without links {kind} nodes. Assumed: "
                f"{8e-9 / link.beta_s_per_byte:.3g} Gbit/s, latency {1e6 * link.alpha_s:.3g} us.",
                file=sys.stderr,
            )
    return links


def read_timed_profile(path: str) -> Profile:
    """Read the file of a profile whose times a command simulates.

    **Raises:** ConfigurationError for one of sizes only, whose steps would take no time.
    """
    profile = Profile.read(path)
    if not profile.timed:
        raise ConfigurationError(
            f"A profile that says when gradients are ready is required. Received {path}, of "
            f"{profile.model!r}, with sizes only. Measure it by `tfcommx profile`."
        )
    return profile


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

"""`tfcommx schema`: write the JSON schema of recipes for an editor."""

import json
from pathlib import Path
from typing import Annotated

import typer

from tfcommx.cli.parameters import check_output
from tfcommx.core import write_text
from tfcommx.recipes.schema import recipe_schema


def schema(
    file: Annotated[
        Path, typer.Argument(help="File to write, such as recipe.schema.json beside a recipe.")
    ],
) -> None:
    """Write the JSON schema of recipes, by which editors complete and check them.

    An editor uses it for a recipe whose first line names the file:
    `# yaml-language-server: $schema=recipe.schema.json`.
    """
    write_text(check_output(file), json.dumps(recipe_schema(), indent=1) + "\n")

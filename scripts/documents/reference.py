"""Write the reference pages that follow from the code: docs/reference/.

    python scripts/documents/reference.py          # writes what has changed
    python scripts/documents/reference.py --check  # writes nothing; status 1 if one is not current

api.md from signatures and docstrings (griffe), recipe.md and recipe.schema.json from the models of
recipes (pydantic), command-line.md from the commands (typer). TensorFlow is not loaded.
"""

from __future__ import annotations

import html
import json
import sys
from pathlib import Path

import typer.main
from reference_api import api
from reference_recipe import fields, schema
from typer.cli import get_docs_for_click

import tfcommx
from tfcommx.cli.main import app

FOLDER = Path(__file__).resolve().parents[2] / "docs" / "reference"
# At the end: a page's title is its first line
GENERATED = "\n<!-- Written by scripts/documents/reference.py: change the code, and run it. -->\n"


def command_line() -> str:
    """Return the page of the commands, as typer writes it."""
    command = typer.main.get_command(app)
    text = get_docs_for_click(
        obj=command,
        ctx=command.make_context("tfcommx", ["--help"], resilient_parsing=True),
        name="tfcommx",
    )
    return html.unescape(text).replace("# `tfcommx`", "# Command line", 1).strip() + "\n"


def pages() -> dict[str, str]:
    """Return file name -> content of everything that is generated."""
    return {
        "api.md": api(tfcommx._PUBLIC, tfcommx._MODULES) + GENERATED,
        "recipe.md": fields() + GENERATED,
        "command-line.md": command_line() + GENERATED,
        "recipe.schema.json": json.dumps(schema(), indent=1) + "\n",
    }


def main() -> None:
    stale = []
    for name, text in pages().items():
        file = FOLDER / name
        if not file.exists() or file.read_text() != text:
            stale.append(name)
            if "--check" not in sys.argv:
                file.write_text(text)
    if stale and "--check" in sys.argv:
        sys.exit(f"Not current: {', '.join(stale)}. Run python scripts/documents/reference.py.")
    print(f"written: {', '.join(stale)}" if stale else "all pages are current")


if __name__ == "__main__":
    main()

"""A hook of MkDocs (mkdocs.yml): generates the reference pages that follow from the code.

In the repository these pages say only how to see the same in a terminal, so that links to them lead
somewhere on GitHub, too.
"""

from __future__ import annotations

import html
from typing import Any

import typer.main
from mkdocs.structure.pages import Page
from reference_api import api
from reference_recipe import fields
from typer.cli import get_docs_for_click

from tfcommx.cli.main import app


def command_line() -> str:
    """Return the page of the commands, as typer writes it."""
    command = typer.main.get_command(app)
    text = get_docs_for_click(
        obj=command,
        ctx=command.make_context("tfcommx", ["--help"], resilient_parsing=True),
        name="tfcommx",
    )
    return html.unescape(text).replace("# `tfcommx`", "# Command line", 1)


# Page, from docs/ -> the function that writes it
PAGES = {
    "reference/api.md": api,
    "reference/recipe.md": fields,
    "reference/command-line.md": command_line,
}


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """Return the text that the site shows in place of a page's file."""
    write = PAGES.get(page.file.src_uri)
    return write() if write else markdown

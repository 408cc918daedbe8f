"""The reference pages have every public name, command, field of a recipe and variable."""

from __future__ import annotations

import importlib
import json
import re
import subprocess
import sys

import pytest
import typer.main
from documents import DOCUMENTS
from launching import ROOT

import tfcommx
from tfcommx.cli.main import app
from tfcommx.recipes.recipe import Recipe
from tfcommx.strategies import STRATEGIES


@pytest.fixture(scope="module")
def pages() -> dict[str, str]:
    """Return page -> text, as a build of the site generates it, without TensorFlow."""
    code = (
        "import json, sys; sys.path.insert(0, 'scripts/documents'); import reference;"
        "print(json.dumps({name: write() for name, write in reference.PAGES.items()}));"
        "sys.exit('tensorflow' in sys.modules)"
    )
    ended = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    return json.loads(ended.stdout)


def headings(text: str) -> list[str]:
    return re.findall(r"^#+ (.*)$", text, re.M)


@pytest.mark.extended
def test_the_interface_has_every_public_name_with_its_documentation(pages: dict[str, str]) -> None:
    names = [*tfcommx._PUBLIC]
    for name in tfcommx._MODULES:
        module = importlib.import_module(tfcommx._MODULES[name])
        is_family = name == "strategies"  # Its other names are for authors of strategies
        names += [kind.__name__ for kind in STRATEGIES.values()] if is_family else module.__all__
    text = pages["reference/api.md"]
    assert set(names) <= set(headings(text))
    # Heading, signature, documentation
    for name in names:
        assert re.search(rf"^### {name}\n\n```python\n.*?\n```\n\n[A-Z`*]", text, re.M | re.S), name


def test_the_command_line_has_every_command(pages: dict[str, str]) -> None:
    commands = typer.main.get_command(app).commands
    found = headings(pages["reference/command-line.md"])
    assert not {name for name in commands if f"`tfcommx {name}`" not in found}


def test_the_recipe_has_every_field_with_its_meaning(pages: dict[str, str]) -> None:
    rows = re.findall(r"^\| `(\w+)` \| .* \| (.*) \|$", pages["reference/recipe.md"], re.M)
    meanings = dict(reversed(rows))
    assert all(meanings.get(name) for name in Recipe.model_fields)


def test_the_environment_page_has_every_variable() -> None:
    files = [
        *(ROOT / "tfcommx").rglob("*.py"),
        *(ROOT / "scripts").rglob("*.py"),
        ROOT / "setup.py",
    ]
    # TFCOMMX_TEST_... are for tests alone
    names = re.compile(r'"(TFCOMMX_(?!TEST_)\w+)"')
    read = {name for file in files for name in names.findall(file.read_text())}
    page = DOCUMENTS["docs/reference/environment.md"]
    assert {"TFCOMMX_NATIVE", "TFCOMMX_CACHE"} <= read
    assert not {name for name in read if f"`{name}`" not in page}

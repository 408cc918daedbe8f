"""The generated reference is current, and a recipe's JSON schema takes what the reader takes."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from documents import DOCUMENTS
from launching import ROOT
from pydantic import ValidationError

from tfcommx.recipes.reader import parse
from tfcommx.recipes.recipe import Recipe

EXAMPLES = ROOT / "scripts" / "examples"
RECIPES = (
    *(ROOT / "configs").glob("*.yaml"),
    EXAMPLES / "own_model.yaml",
    EXAMPLES / "glosses" / "glosses.yaml",
)


def test_the_reference_is_current_and_needs_no_tensorflow() -> None:
    code = (
        "import sys; sys.path.insert(0, 'scripts/documents'); sys.argv = ['', '--check'];"
        "import reference; reference.main(); sys.exit('tensorflow' in sys.modules)"
    )
    ended = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stdout + ended.stderr


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


@pytest.fixture(scope="module")
def schema() -> jsonschema.protocols.Validator:
    text = (ROOT / "docs" / "reference" / "recipe.schema.json").read_text()
    jsonschema.Draft202012Validator.check_schema(json.loads(text))
    return jsonschema.Draft202012Validator(json.loads(text))


@pytest.mark.parametrize("file", RECIPES, ids=lambda file: file.name)
def test_every_recipe_names_the_schema_and_fits_it(
    file: Path, schema: jsonschema.protocols.Validator
) -> None:
    named = re.match(r"# yaml-language-server: \$schema=(\S+)\n", file.read_text())
    assert named and (file.parent / named[1]).resolve().name == "recipe.schema.json"
    assert (file.parent / named[1]).exists()
    schema.validate(parse(file.read_text()))


@pytest.mark.parametrize(
    "wrong",
    [
        {"batch_per_rank": 0},
        {"batch": 64},
        {"optimizer": {"name": "sgdd"}},
        {"optimizer": {"name": "sgd", "momentum": 1}},
        {"model": {"name": "resnet", "depth": 17}},
        {"phases": []},
        {"phases": [{"epochs": 2, "resolution": 28, "scheme": {"route": "hitopkk"}}]},
        {"phases": [{"epochs": 2, "resolution": 28, "scheme": {"density": 0}}]},
        {"phases": [{"epochs": 2, "resolution": 28, "scheme": {"dense_route": "hitopk"}}]},
        {"phases": [{"epochs": 2, "resolution": 28, "scheme": {"peer_route": "asa"}}]},
        {"phases": [{"epochs": 2, "resolution": 28, "scheme": {"bucket_bytes": 0}}]},
        {"learning_rate": {"peak": 0.1, "decay": "cosin"}},
    ],
    ids=str,
)
def test_schema_and_reader_refuse_the_same(
    wrong: dict[str, Any], schema: jsonschema.protocols.Validator
) -> None:
    right = {
        "name": "x",
        "batch_per_rank": 8,
        "phases": [{"epochs": 2, "resolution": 28}],
        "learning_rate": {"peak": 0.1},
    }
    schema.validate(right)
    Recipe.model_validate(right)
    with pytest.raises(jsonschema.ValidationError):
        schema.validate(right | wrong)
    with pytest.raises(ValidationError):
        Recipe.model_validate(right | wrong)

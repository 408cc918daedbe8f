"""`tfcommx schema`: an editor accepts the same recipes as the reader, and refuses the same."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from launching import ROOT
from pydantic import ValidationError

from tfcommx.recipes.reader import parse
from tfcommx.recipes.recipe import Recipe

if TYPE_CHECKING:  # It takes more than a second to import, in each worker
    import jsonschema

EXAMPLES = ROOT / "scripts" / "examples"
RECIPES = (
    *(ROOT / "configs").glob("*.yaml"),
    EXAMPLES / "own_model.yaml",
    EXAMPLES / "glosses" / "glosses.yaml",
)


@pytest.fixture(scope="module")
def schema(tmp_path_factory: pytest.TempPathFactory) -> jsonschema.protocols.Validator:
    """Return the schema that the command writes, without TensorFlow."""
    import jsonschema

    file = tmp_path_factory.mktemp("schema") / "recipe.schema.json"
    code = (
        "import sys; from tfcommx.cli.main import app\n"
        "app(['schema', sys.argv[1]], standalone_mode=False)\n"
        "sys.exit('tensorflow' in sys.modules)"
    )
    command = [sys.executable, "-c", code, str(file)]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    written = json.loads(file.read_text())
    jsonschema.Draft202012Validator.check_schema(written)
    return jsonschema.Draft202012Validator(written)


@pytest.mark.parametrize("file", RECIPES, ids=lambda file: file.name)
def test_every_recipe_names_the_schema_and_fits_it(
    file: Path, schema: jsonschema.protocols.Validator
) -> None:
    named = re.match(r"# yaml-language-server: \$schema=(\S+)\n", file.read_text())
    # Where set-up writes it
    assert named and (file.parent / named[1]).resolve() == ROOT / "configs" / "recipe.schema.json"
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
        # An editor accepted it
        {"phases": [{"epochs": 2, "resolution": 28, "scheme": {"route": "auto", "budget": 2}}]},
        {"learning_rate": {"peak": 0.1, "decay": "cosin"}},
    ],
    ids=str,
)
def test_schema_and_reader_refuse_the_same(
    wrong: dict[str, Any], schema: jsonschema.protocols.Validator
) -> None:
    import jsonschema

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

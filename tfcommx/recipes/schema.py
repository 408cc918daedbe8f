"""The JSON schema of recipes, by which editors complete and check them.

It follows from the models that recipes are read into: pydantic knows types and ranges, and the
comment above a field is its description. No TensorFlow is loaded.
"""

import ast
import inspect
from collections.abc import Iterable
from typing import Any

from pydantic import BaseModel

from tfcommx.compression import COMPRESSIONS
from tfcommx.core import AUTO, NARROW, PLAIN, WIRES, Scheme
from tfcommx.planner.merging import MERGINGS
from tfcommx.recipes.datasets import DATASETS
from tfcommx.recipes.models import MODELS
from tfcommx.recipes.optimizers import OPTIMIZERS
from tfcommx.recipes.recipe import CheckpointSettings, LearningRate, Phase, Recipe, Target
from tfcommx.recipes.schedules import SCHEDULES
from tfcommx.recipes.strategies import STRATEGIES, OuterSgd
from tfcommx.recipes.tasks import TASKS
from tfcommx.recipes.user import FORM
from tfcommx.routes import DENSE, ROUTES
from tfcommx.routes.torus import PEER_ROUTES
from tfcommx.selection import RULES

# Place in a recipe -> the model of what stands there
PARTS: dict[str, type] = {
    "phases": Phase,
    "learning_rate": LearningRate,
    "checkpoint": CheckpointSettings,
    "target": Target,
    "scheme": Scheme,
    "strategy.outer": OuterSgd,
}
# Place in a recipe -> name -> the model of a member of this family
FAMILIES: dict[str, dict[str, type]] = {
    "data": DATASETS,
    "model": MODELS,
    "task": TASKS,
    "optimizer": OPTIMIZERS,
    "learning_rate.decay": SCHEDULES,
    "strategy": STRATEGIES,
}


def _open(names: Iterable[str], *patterns: str) -> dict[str, Any]:
    """Return the schema of a family: names of its table, or another package's "module:MEMBER"."""
    allowed = [
        {"type": "string", "pattern": pattern} for pattern in (*patterns, f"^{FORM.pattern}$")
    ]
    return {"anyOf": [{"enum": list(names)}, *allowed]}


# A Scheme checks its fields itself, partly against tables of names: the same as a JSON schema
SCHEME: dict[str, dict[str, Any]] = {
    "route": _open([*ROUTES, AUTO]),
    "dense_route": {"enum": list(DENSE)},
    "peer_route": {"enum": list(PEER_ROUTES)},
    "selection": _open(RULES),
    "compression": _open(["none", *COMPRESSIONS], f"^({'|'.join(COMPRESSIONS)})/"),
    "wire": _open(WIRES),
    "dense_wire": {"enum": [PLAIN, *NARROW]},
    "merging": {"enum": list(MERGINGS)},
    "density": {"exclusiveMinimum": 0, "maximum": 1},
    "dense_below": {"minimum": 0},
    "bucket_bytes": {"minimum": 1},
    "block_bytes": {"minimum": 8},
    "momentum": {"minimum": 0, "exclusiveMaximum": 1},
    "clip_norm": {"exclusiveMinimum": 0},
    "budget": {"exclusiveMinimum": 0, "maximum": 1},
}


def recipe_schema() -> dict[str, Any]:
    """Return the JSON schema of a recipe, with each field's documentation as its description."""
    schema = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **Recipe.model_json_schema(),
    }
    parts = schema["$defs"]
    for name, checks in SCHEME.items():
        field = parts["Scheme"]["properties"][name]
        # The first alternative of a field that may be null
        field.get("anyOf", [field])[0].update(checks)
    # A dataclass's schema allows other keys, which reading refuses
    parts["Scheme"]["additionalProperties"] = False
    for name in ("UserDataset", "UserModel", "UserOptimizer", "UserTask"):
        parts[name]["properties"]["name"]["pattern"] = f"^{FORM.pattern}$"
    members = [model for table in FAMILIES.values() for model in table.values()]
    for model in (Recipe, *PARTS.values(), *members):
        part = schema if model is Recipe else parts[model.__name__]
        part["description"] = " ".join((model.__doc__ or "").split("\n\n")[0].split())
        for name, comment in _comments(model).items():
            if name in part["properties"]:  # Class variables are no fields
                part["properties"][name]["description"] = comment
    for part in (schema, *parts.values()):
        for field in part["properties"].values():
            # pydantic's titles only repeat the names
            field.pop("title", None)
    return schema


def comment_above(lines: list[str], number: int) -> str:
    """Return the comment that ends above line `number`, counted from 0, in one line."""
    words: list[str] = []
    while number and lines[number - 1].lstrip().startswith("#"):
        number -= 1
        words.insert(0, lines[number].lstrip(" #"))
    return " ".join(words)


def _comments(model: type) -> dict[str, str]:
    """Return field -> the comment above it, of a model and its base classes."""
    comments: dict[str, str] = {}
    # Subclasses last, because their comments replace those of their bases
    for base in reversed(model.__mro__):
        if base in (object, BaseModel) or not base.__module__.startswith("tfcommx"):
            continue
        lines = inspect.getsource(base).splitlines()
        body = ast.parse("\n".join(lines)).body[0]
        assert isinstance(body, ast.ClassDef)
        for field in body.body:
            if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
                comment = comment_above(lines, field.lineno - 1)
                if comment and not field.target.id.startswith("_"):
                    comments[field.target.id] = comment
    return comments

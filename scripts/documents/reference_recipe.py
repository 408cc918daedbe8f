"""A recipe's fields as Markdown and as a JSON schema, from the models that recipes are read into.

No TensorFlow is loaded: reading a recipe needs none.
"""

from __future__ import annotations

import ast
import inspect
import json
from collections.abc import Iterable
from typing import Any

from pydantic import BaseModel
from reference_api import comment_above

from tfcommx.compression import COMPRESSIONS
from tfcommx.core import AUTO, NARROW, PLAIN, WIRES, Scheme
from tfcommx.planner.check import PEER_ROUTES
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
from tfcommx.selection import RULES

PARTS: dict[str, type] = {
    "phases": Phase,
    "learning_rate": LearningRate,
    "checkpoint": CheckpointSettings,
    "target": Target,
    "scheme": Scheme,
    "strategy.outer": OuterSgd,
}
FAMILIES = {
    "data": DATASETS,
    "model": MODELS,
    "task": TASKS,
    "optimizer": OPTIMIZERS,
    "learning_rate.decay": SCHEDULES,
    "strategy": STRATEGIES,
}
# Class -> the heading under which it stands
HEADINGS = {model.__name__: name for name, model in PARTS.items()} | {
    model.__name__: family for family, table in FAMILIES.items() for model in table.values()
}
# With nothing but what is required: shows which members are the usual ones
USUAL = Recipe.model_validate(
    {
        "name": "usual",
        "batch_per_rank": 1,
        "phases": [{"epochs": 2, "resolution": 8}],
        "learning_rate": {"peak": 1},
    }
)


def _open(names: Iterable[str], *patterns: str) -> dict[str, Any]:
    """Return the schema of a family: names of its table, or somebody else's "module:MEMBER"."""
    allowed = [{"type": "string", "pattern": one} for one in (*patterns, f"^{FORM.pattern}$")]
    return {"anyOf": [{"enum": list(names)}, *allowed]}


# Of a scheme, which checks itself, with tables of names: JSON schema's words for its checks
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
    "block_bytes": {"anyOf": [{"type": "integer", "minimum": 8}, {"type": "null"}]},
    "momentum": {"minimum": 0, "exclusiveMaximum": 1},
    "clip_norm": {"anyOf": [{"type": "number", "exclusiveMinimum": 0}, {"type": "null"}]},
}


def schema() -> dict[str, Any]:
    """Return the JSON schema of a recipe, with each field's documentation as its description."""
    found = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **Recipe.model_json_schema(),
    }
    parts = found["$defs"]
    for name, checks in SCHEME.items():
        parts["Scheme"]["properties"][name] |= checks
    parts["Scheme"]["additionalProperties"] = False
    for name in ("UserDataset", "UserModel", "UserOptimizer", "UserTask"):
        parts[name]["properties"]["name"]["pattern"] = f"^{FORM.pattern}$"
    models = [
        Recipe,
        *PARTS.values(),
        *(one for table in FAMILIES.values() for one in table.values()),
    ]
    for model in models:
        part = found if model is Recipe else parts[model.__name__]
        part["description"] = " ".join((model.__doc__ or "").split("\n\n")[0].split())
        for name, said in _comments(model).items():
            part["properties"][name]["description"] = said
    for part in (found, *parts.values()):
        for one in part["properties"].values():
            one.pop("title", None)
    return found


def fields() -> str:
    """Return the page of a recipe's fields."""
    whole = schema()
    parts = [
        "# A recipe's fields",
        "A recipe is a YAML file with the fields of the first table. Editors that know YAML "
        "schemas complete them from `docs/reference/recipe.schema.json`. [Train from a recipe]"
        "(../how-to/recipes.md) says how to use them.",
        "## Recipe",
        _table(Recipe, whole),
    ]
    for name, model in PARTS.items():
        parts += [f"## {name}", whole["$defs"][model.__name__]["description"]]
        parts.append(_table(model, whole["$defs"][model.__name__]))
    for family, table in FAMILIES.items():
        parts.append(f"## {family}")
        for name, model in table.items():
            part = whole["$defs"][model.__name__]
            parts += [f"### {family}: {name}", part["description"], _table(model, part)]
    return "\n\n".join(part for part in parts if part) + "\n"


def _table(model: type, part: dict[str, Any]) -> str:
    rows = ["| field | type | default | meaning |", "|---|---|---|---|"]
    for name, one in part["properties"].items():
        if one.get("const") == one.get("default") != None:  # noqa: E711  The member's own name
            continue
        needed = name in part.get("required", ())
        default = "*required*" if needed else f"`{_shown(name, one.get('default'))}`"
        said = one.get("description", "").replace("|", "\\|")
        rows.append(f"| `{name}` | {_kind(one)} | {default} | {said} |")
    return "\n".join(rows) if len(rows) > 2 else ""


def _kind(one: dict[str, Any]) -> str:
    """Return the type of a field and its range, such as `integer >= 1 or none`."""
    kinds = one.get("anyOf", [one])
    if found := [kind["$ref"].rpartition("/")[2] for kind in kinds if "$ref" in kind]:
        heading = HEADINGS[found[0]]
        return f"[{heading}](#{heading.replace('.', '')})"
    if "anyOf" in one:
        return " or ".join(dict.fromkeys(map(_kind, kinds)))
    if "enum" in one:
        return ", ".join(f"`{value}`" for value in one["enum"])
    if one["type"] == "array":
        least, most = one.get("minItems"), one.get("maxItems")
        of = _kind(one.get("items") or one["prefixItems"][0])
        count = f"{least} " if least and least == most else f"{least} or more " if least else ""
        return f"list of {count}{of}"
    text = {"null": "none", "string": "path" if one.get("format") == "path" else "text"}.get(
        one["type"], one["type"]
    )
    bounds = {"minimum": ">=", "exclusiveMinimum": ">", "maximum": "<=", "exclusiveMaximum": "<"}
    limits = [f"{sign} {one[key]:.12g}" for key, sign in bounds.items() if key in one]
    return " ".join([text, ", ".join(limits)]).strip()


def _shown(name: str, value: Any) -> str:
    if value == {}:
        return f"{{name: {getattr(USUAL, name).name}}}"
    if isinstance(value, dict):
        return "{}"  # A part with its own defaults
    return "none" if value is None else json.dumps(value).strip('"')


def _comments(model: type) -> dict[str, str]:
    """Return field -> the comment above it, of a model and what it derives from."""
    found: dict[str, str] = {}
    for base in reversed(model.__mro__):
        if base in (object, BaseModel) or not base.__module__.startswith("tfcommx"):
            continue
        lines = inspect.getsource(base).splitlines()
        body = ast.parse("\n".join(lines)).body[0]
        assert isinstance(body, ast.ClassDef)
        for one in body.body:
            if isinstance(one, ast.AnnAssign) and isinstance(one.target, ast.Name):
                said = comment_above(lines, one.lineno - 1)
                if said and not one.target.id.startswith("_"):
                    found[one.target.id] = said
    return found

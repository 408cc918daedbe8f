"""A recipe's fields as Markdown, from the JSON schema of recipes. No TensorFlow is loaded."""

from __future__ import annotations

import json
from typing import Any

from tfcommx.recipes.recipe import Recipe
from tfcommx.recipes.schema import FAMILIES, PARTS, recipe_schema

# Class -> the heading under which it stands
HEADINGS = {model.__name__: name for name, model in PARTS.items()} | {
    model.__name__: family for family, table in FAMILIES.items() for model in table.values()
}
# Has only the required fields, so the defaults show the usual members
USUAL = Recipe.model_validate(
    {
        "name": "usual",
        "batch_per_rank": 1,
        "phases": [{"epochs": 2, "resolution": 8}],
        "learning_rate": {"peak": 1},
    }
)


def fields() -> str:
    """Return the page of a recipe's fields."""
    whole = recipe_schema()
    parts = [
        "# A recipe's fields",
        "A recipe is a YAML file with the fields of the first table. [Train from a recipe]"
        "(../how-to/recipes.md) says how to use them, and how an editor completes them.",
        "## Recipe",
        _table(whole),
    ]
    for name, model in PARTS.items():
        part = whole["$defs"][model.__name__]
        parts += [f"## {name}", part["description"], _table(part)]
    for family, table in FAMILIES.items():
        parts.append(f"## {family}")
        for name, model in table.items():
            part = whole["$defs"][model.__name__]
            parts += [f"### {family}: {name}", part["description"], _table(part)]
    return "\n\n".join(part for part in parts if part) + "\n"


def _table(part: dict[str, Any]) -> str:
    rows = ["| field | type | default | meaning |", "|---|---|---|---|"]
    for name, field in part["properties"].items():
        if field.get("const") == field.get("default") != None:  # noqa: E711  The member's own name
            continue
        needed = name in part.get("required", ())
        default = "*required*" if needed else f"`{_shown(name, field.get('default'))}`"
        meaning = field.get("description", "").replace("|", "\\|")
        rows.append(f"| `{name}` | {_kind(field)} | {default} | {meaning} |")
    return "\n".join(rows) if len(rows) > 2 else ""


def _kind(field: dict[str, Any]) -> str:
    """Return the type of a field and its range, such as `integer >= 1 or none`."""
    kinds = field.get("anyOf", [field])
    if models := [kind["$ref"].rpartition("/")[2] for kind in kinds if "$ref" in kind]:
        heading = HEADINGS[models[0]]
        return f"[{heading}](#{heading.replace('.', '')})"
    if "anyOf" in field:
        return " or ".join(dict.fromkeys(map(_kind, kinds)))
    if "enum" in field:
        return ", ".join(f"`{value}`" for value in field["enum"])
    if field["type"] == "array":
        least, most = field.get("minItems"), field.get("maxItems")
        of = _kind(field.get("items") or field["prefixItems"][0])
        count = f"{least} " if least and least == most else f"{least} or more " if least else ""
        return f"list of {count}{of}"
    text = {"null": "none", "string": "path" if field.get("format") == "path" else "text"}.get(
        field["type"], field["type"]
    )
    bounds = {"minimum": ">=", "exclusiveMinimum": ">", "maximum": "<=", "exclusiveMaximum": "<"}
    limits = [f"{sign} {field[key]:.12g}" for key, sign in bounds.items() if key in field]
    return " ".join([text, ", ".join(limits)]).strip()


def _shown(name: str, value: Any) -> str:
    if value == {}:
        return f"{{name: {getattr(USUAL, name).name}}}"
    if isinstance(value, dict):
        return "{}"  # A part with its own defaults
    return "none" if value is None else json.dumps(value).strip('"')

"""Reads YAML into checked settings; an error names its place in the file and the nearest key."""

from __future__ import annotations

import difflib
import functools
import operator
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, get_args

from pydantic import (
    BaseModel,
    ConfigDict,
    PlainValidator,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)

from tfcommx.recipes.yaml_text import YamlError, parse
from tfcommx.terms import local_path


class RecipeError(ValueError):
    """A recipe that cannot be run; the message names the place in the file."""


def refuse_unknown(given: Iterable[str], known: Sequence[str], what: str = "key") -> None:
    """Check that all words are known. **Raises:** ValueError with the nearest known word."""
    for word in given:
        if word not in known:
            near = difflib.get_close_matches(str(word), known, n=1, cutoff=0.5)
            hint = f"Did you mean {near[0]!r}? " if near else ""
            raise ValueError(f"Unknown {what} {word!r}. {hint}Known: {', '.join(known)}.")


class Part(BaseModel):
    """Base of all parts of a recipe: frozen, validated, without unknown keys."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _known_keys(cls, given: Any) -> Any:
        if isinstance(given, Mapping):
            refuse_unknown(given, list(cls.model_fields))
        return given

    @field_validator("*", mode="before")
    @classmethod
    def _no_truth_value_for_a_number(cls, value: Any, info: ValidationInfo) -> Any:
        """Refuse what pydantic would read as 0 or 1."""
        types = _types(cls.model_fields[info.field_name or ""].annotation)
        values = value if isinstance(value, list | tuple) else [value]
        if (
            types & {int, float}
            and bool not in types
            and any(x is True or x is False for x in values)
        ):
            raise ValueError(f"A number is required. Received {value!r}.")
        return value

    @field_validator("*", mode="after")
    @classmethod
    def _paths_are_local(cls, value: Any, field: ValidationInfo) -> Any:
        return local_path(field.field_name or "", value) if isinstance(value, Path) else value


def _types(annotation: Any) -> set[Any]:
    """Return all types that an annotation names."""
    return {annotation}.union(*map(_types, get_args(annotation)))


def member_of(
    table: Mapping[str, type[Any]],
    default: str,
    own: type[BaseModel] | None = None,
    by_name: bool = False,
) -> PlainValidator:
    """Return the annotation of a field that holds one member of a family.

    In YAML it is a mapping with the member's `name` and its settings: `{name: sgd, momentum: 0}`.

    Args:
        table: the members, `Part`s, by name.
        default: name of the member if the mapping has none.
        own: class for a user's own name, `module:function`; None: such names are refused.
        by_name: whether to accept a bare name, for the member with default settings.
    """

    def read(value: Any) -> Any:
        if isinstance(value, (*table.values(), *([own] if own else []))):
            return value
        if by_name and isinstance(value, str):
            value = {"name": value}
        if not isinstance(value, Mapping):
            raise ValueError(
                f"A mapping such as {{name: {default}}} is required. Received {value!r}."
            )
        name = str(value.get("name", default))  # A list, for one, has no place in a table
        kind = own if own and ":" in name else table.get(name)
        if kind is None:
            refuse_unknown([name], list(table), "name")
        try:
            return kind.model_validate(value)
        except ValidationError as error:
            # `error_lines` describes each error with its place
            raise ValueError(str(error)) from error

    # For the JSON schema: what `read` accepts
    accepted: list[Any] = [*table.values(), *([own] if own else [])]
    if by_name:
        accepted.append(Literal[tuple(table)])
    return PlainValidator(read, json_schema_input_type=functools.reduce(operator.or_, accepted))


def change(tree: dict[str, Any], setting: str) -> None:
    """Apply a setting such as `a.0.b=value` to the tree.

    Args:
        tree: contents of the YAML file.
        setting: keys and positions joined by dots, `=`, and the new value as YAML.

    **Raises:** RecipeError if the tree has no such place, or the value is not YAML.
    """
    place, equals, text = setting.partition("=")
    keys = [int(key) if key.isdecimal() else key for key in place.split(".")]
    if not equals or not all(str(key) for key in keys):
        raise RecipeError(
            "A setting needs the form place=value, such as phases.0.epochs=1. Received "
            f"{setting!r}."
        )
    inner: Any = tree
    try:
        value = parse(text)
        for key in keys[:-1]:
            inner = inner.setdefault(key, {}) if isinstance(inner, dict) else inner[key]
        inner[keys[-1]] = value
    except (IndexError, TypeError, AttributeError) as error:
        raise RecipeError(f"The recipe has no place {place!r} for {setting!r}: {error}.") from error
    except (YamlError, ValueError, RecursionError) as error:
        raise RecipeError(
            f"The value in {setting!r} is not YAML: {' '.join(str(error).split())}."
        ) from error


def error_lines(error: ValidationError, place: str = "") -> list[str]:
    """Return a line `place: what was required. Received ...` for each wrong setting.

    Args:
        error: what pydantic raised.
        place: of the part that it was raised for; empty: the whole recipe.
    """
    lines: list[str] = []
    for detail in error.errors():
        keys = (f"[{key}]" if isinstance(key, int) else f".{key}" for key in detail["loc"])
        inner = (place + "".join(keys)).lstrip(".")
        ours = detail.get("ctx", {}).get("error")
        if isinstance(ours, Exception) and isinstance(ours.__cause__, ValidationError):
            lines += error_lines(ours.__cause__, inner)
        else:
            lines.append(f"{inner or 'recipe'}: {_what_is_wrong(detail)}")
    return lines


def _what_is_wrong(detail: Mapping[str, Any]) -> str:
    if detail["type"] == "value_error":  # Our own messages, complete as they are
        return str(detail["ctx"]["error"])
    if detail["type"] == "missing":
        return "required, and missing."
    return f"{detail['msg']}. Received {detail['input']!r}."

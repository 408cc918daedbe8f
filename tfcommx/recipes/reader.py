"""Reading YAML: settings, unknown keys, error messages with their place."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import yaml
from pydantic import BaseModel, ConfigDict, model_validator


class RecipeError(ValueError):
    """A recipe that cannot be carried out; the message names the place in the file."""


class YamlLoader(yaml.SafeLoader):
    """YAML in which 1e-3 is a number, as YAML 1.2 has it (PyYAML: text), and no key comes twice
    (PyYAML: the last one counts).
    """

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict:
        seen: set[str] = set()
        for key in (key for key, _ in node.value if isinstance(key, yaml.ScalarNode)):
            if key.value in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key {key.value!r} comes twice", key.start_mark
                )
            seen.add(key.value)
        return super().construct_mapping(node, deep)


def refuse_unknown(keys: Iterable[str], known: Sequence[str]) -> None:
    for key in keys:
        if key not in known:
            near = difflib.get_close_matches(str(key), known, n=1, cutoff=0.5)
            hint = f"Did you mean {near[0]!r}? " if near else ""
            raise ValueError(f"Unknown key {key!r}. {hint}Known: {', '.join(known)}.")


class Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    @model_validator(mode="before")
    @classmethod
    def _known_keys(cls, given: Any) -> Any:
        if isinstance(given, Mapping):
            refuse_unknown(given, list(cls.model_fields))
        return given


def change(tree: dict[str, Any], setting: str) -> None:
    """Carry out `a.0.b=value` in place."""
    place, equals, text = setting.partition("=")
    keys = [int(key) if key.isdecimal() else key for key in place.split(".")]
    if not equals or not all(str(key) for key in keys):
        raise RecipeError(
            "A setting needs the form place=value, such as phases.0.epochs=1. Received "
            f"{setting!r}."
        )
    try:
        value, inner = yaml.load(text, YamlLoader), tree
        for key in keys[:-1]:
            inner = inner.setdefault(key, {}) if isinstance(inner, dict) else inner[key]
        inner[keys[-1]] = value
    except yaml.YAMLError as error:
        raise RecipeError(
            f"The value in {setting!r} is not YAML: {' '.join(str(error).split())}."
        ) from error
    except (IndexError, TypeError, AttributeError) as error:
        raise RecipeError(f"The recipe has no place {place!r} for {setting!r}: {error}.") from error


def error_line(detail: Mapping[str, Any]) -> str:
    """Say one of pydantic's errors as `place: what was required. Received ...`."""
    place = (
        "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in detail["loc"]).lstrip(
            "."
        )
        or "recipe"
    )
    if detail["type"] == "value_error":  # our own messages, complete as they are
        return f"{place}: {detail['ctx']['error']}"
    if detail["type"] == "missing":
        return f"{place}: required, and missing."
    return f"{place}: {detail['msg']}. Received {detail['input']!r}."

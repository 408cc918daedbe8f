"""Read YAML into checked settings; an error names the field in the file and the nearest key.

The YAML is 1.2. This is the only `import yaml`, because PyYAML reads YAML 1.1, where `10:00` is 600
and `010` is 8.

    plain text                        value
    null, ~, nothing                  None
    true, false                       a truth value
    12, 0x1F, 0o17, 1.5, 1e-3, .inf   a number
    yes, on, 010, 1_000, 10:00        refused: YAML 1.1 and 1.2, and people, read them differently
    anything else                     text

Repeated keys, aliases, and tags other than those of these values are refused. A merge key (`<<`) is
plain text.
"""

import functools
import math
import operator
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import yaml
from pydantic import (
    BaseModel,
    ConfigDict,
    PlainValidator,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)

from tfcommx.core import ConfigurationError, check_name, local_path

NULL = re.compile(r"(?:null|Null|NULL|~)?")
BOOL = re.compile(r"true|True|TRUE|false|False|FALSE")
INT = re.compile(r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+")
FLOAT = re.compile(
    r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF)"
    r"|\.(?:nan|NaN|NAN)"
)
FORMS = {"null": NULL, "bool": BOOL, "int": INT, "float": FLOAT}
# Truth values, octal and binary numbers, and numbers to the base 60 of YAML 1.1
AMBIGUOUS = re.compile(
    r"(?:yes|no|on|off)|[-+]?0[0-9]+|[-+]?0b[01]+|[-+]?[0-9]+(?::[0-9]+)+(?:\.[0-9]*)?",
    re.IGNORECASE,
)
TAG = "tag:yaml.org,2002:"


class YamlError(ValueError):
    """Text that is not YAML, or uses refused features of YAML; the message names the line."""


def parse(text: str) -> Any:
    """Return the value of a YAML text: None, a truth value, number, string, list or mapping.

    >>> parse("{rate: 1e-3, seeds: [1, 0x10], name: 2026-01-31, last: yesterday}")
    {'rate': 0.001, 'seeds': [1, 16], 'name': '2026-01-31', 'last': 'yesterday'}

    **Raises:** YamlError.
    """
    try:
        return yaml.load(text, _Loader)
    # Lists in each other may be deeper than Python's stack
    except (yaml.YAMLError, RecursionError) as error:
        # In one line, because PyYAML's messages span several
        raise YamlError(" ".join(str(error).split())) from error


class _Loader(yaml.SafeLoader):
    """PyYAML's loader, with the values of YAML 1.2."""

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        # Nine lines of aliases can stand for a billion values
        if self.check_event(yaml.AliasEvent):
            event = self.peek_event()  # type: ignore[no-untyped-call]
            raise _error(event, f"write *{event.anchor} out: aliases are refused")
        return super().compose_node(parent, index)

    def compose_scalar_node(self, anchor: Any) -> yaml.ScalarNode:
        event = self.peek_event()  # type: ignore[no-untyped-call]
        node = super().compose_scalar_node(anchor)
        # Only plain text has a kind by its form; quoted text is a string
        if event.tag is None and event.style is None:
            node.tag = TAG + _kind(node)
        return node

    def construct_mapping(self, node: yaml.Node, deep: bool = False) -> dict[Any, Any]:
        if not isinstance(node, yaml.MappingNode):
            raise _error(node, "a mapping is required")
        mapping: dict[Any, Any] = {}
        for key_node, value_node in node.value:
            if not isinstance(key_node, yaml.ScalarNode):
                raise _error(key_node, "a key must be a word; found unhashable key")
            key = self.construct_object(key_node)
            # PyYAML would take the last of two equal keys without an error
            if key in mapping:
                raise _error(key_node, f"the key {key!r} comes twice")
            mapping[key] = self.construct_object(value_node)
        return mapping


def _error(at: Any, message: str) -> yaml.MarkedYAMLError:
    return yaml.MarkedYAMLError(None, None, message, at.start_mark)  # `at`: a node or an event


def _kind(node: yaml.ScalarNode) -> str:
    text = node.value
    for kind, form in FORMS.items():
        if form.fullmatch(text) and not AMBIGUOUS.fullmatch(text):
            return kind
    digits = text.replace("_", "")
    separated = digits != text and re.match(r"[-+]?\.?[0-9]", text)
    is_number = INT.fullmatch(digits) or FLOAT.fullmatch(digits)
    if AMBIGUOUS.fullmatch(text) or (separated and is_number):
        raise _error(
            node,
            f"{text} means another value in YAML 1.1 than in 1.2: write true or false, a number "
            "without `_`, `:` and zeros before it, or quote it if it is text",
        )
    return "str"


def _construct(kind: str, loader: _Loader, node: yaml.Node) -> Any:
    text = loader.construct_scalar(node) if isinstance(node, yaml.ScalarNode) else None
    form = FORMS.get(kind)
    if text is None or (form and not form.fullmatch(text)):
        raise _error(node, f"{text!r} is no value of the kind {kind}")
    if kind == "null":
        return None
    if kind == "bool":
        return text.lower() == "true"
    if kind == "float":
        number = float(text.lower().replace(".inf", "inf").replace(".nan", "nan"))
        # Python turns a number that is too large into infinity
        if math.isinf(number) and "inf" not in text.lower():
            raise _error(node, f"{text} is too large for a number")
        return number
    if kind == "int":
        base = {"0x": 16, "0o": 8}.get(text[:2], 10)
        if len(text) > 400:  # A float has 308 digits at most; Python raises for 4,300
            raise _error(node, "a number of more than 400 digits")
        return int(text, base)
    return text


# Empty, because SafeLoader's are those of YAML 1.1
_Loader.yaml_implicit_resolvers, _Loader.yaml_constructors = {}, {}
for _name in ("null", "bool", "int", "float", "str"):
    _Loader.add_constructor(TAG + _name, functools.partial(_construct, _name))
# SafeLoader fills containers by generators, which only recursive aliases need
_Loader.add_constructor(TAG + "seq", _Loader.construct_sequence)  # type: ignore[type-var]
_Loader.add_constructor(TAG + "map", _Loader.construct_mapping)
# Refuses all other tags, such as those by which PyYAML makes Python objects
_Loader.add_constructor(None, _Loader.construct_undefined)  # type: ignore[type-var]


class RecipeError(ConfigurationError):
    """A recipe that cannot be run; the message names the field in the file."""


def read_mapping(path: Path, kind: str) -> dict[Any, Any]:
    """Return the mapping in a YAML file.

    **Raises:** RecipeError that names the file if it cannot be read, or holds anything else.
    """
    try:
        tree = parse(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise RecipeError(f"{kind} {path} cannot be read: {error.strerror}.") from error
    except ValueError as error:
        raise RecipeError(f"{path} is not YAML: {' '.join(str(error).split())}.") from error
    if not isinstance(tree, dict):
        raise RecipeError(
            f"{path}: a mapping of keys to values is required. Received {type(tree).__name__}."
        )
    return tree


class RecipePart(BaseModel):
    """Base of all parts of a recipe: frozen, validated, without unknown keys."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _known_keys(cls, settings: Any) -> Any:
        if isinstance(settings, Mapping):
            # Checked before pydantic forbids them, because its message lacks the nearest key
            for key in settings:
                check_name("key", key, cls.model_fields)
        return settings

    @field_validator("*", mode="before")
    @classmethod
    def _no_truth_value_for_a_number(cls, value: Any, info: ValidationInfo) -> Any:
        """Refuse truth values, and text such as "010", which pydantic would read as numbers."""
        types = _types(cls.model_fields[info.field_name or ""].annotation)
        if not types & {int, float}:
            return value
        values = value if isinstance(value, list | tuple) else [value]
        if bool not in types and any(isinstance(x, bool) for x in values):
            raise ValueError(f"A number is required. Received {value!r}.")
        takes_text = any(kind in (str, Path, Any) or isinstance(kind, str) for kind in types)
        # A text in the place of a list is refused as such
        misses_list = isinstance(value, str) and any(get_origin(kind) is tuple for kind in types)
        if not takes_text and not misses_list and not all(map(_is_plain_number, values)):
            raise ValueError(
                "A number is required, without unit, `%`, `,`, `_` and zeros before it. Received "
                f"{value!r}."
            )
        return value

    @field_validator("*", mode="before")
    @classmethod
    def _paths_are_local(cls, value: Any, info: ValidationInfo) -> Any:
        """Refuse addresses, and an empty text, which pydantic would read as the current folder."""
        is_path = Path in _types(cls.model_fields[info.field_name or ""].annotation)
        if is_path and isinstance(value, str | Path):
            return local_path(info.field_name or "", value)
        return value


def _is_plain_number(value: Any) -> bool:
    """Return False for text other than a number of YAML 1.2 that is not ambiguous."""
    if not isinstance(value, str):
        return True
    is_number = INT.fullmatch(value) or FLOAT.fullmatch(value)
    return bool(is_number) and not AMBIGUOUS.fullmatch(value)


def _types(annotation: Any) -> set[Any]:
    """Return an annotation and all types in it."""
    return {annotation}.union(*map(_types, get_args(annotation)))


def member_of(
    table: Mapping[str, type[Any]],
    default: str,
    user_class: type[BaseModel] | None = None,
    by_name: bool = False,
) -> PlainValidator:
    """Return the annotation of a field that holds one member of a family.

    In YAML it is a mapping with the member's `name` and its settings: `{name: sgd, momentum: 0}`.

    Args:
        table: name -> member, a `RecipePart`.
        default: name of the member for a mapping without `name`.
        user_class: class for a user's `module:function`; None: such names are refused.
        by_name: whether to accept a bare name, for the member with default settings.
    """
    classes: tuple[Any, ...] = (*table.values(), *([user_class] if user_class else []))

    def read(value: Any) -> Any:
        if isinstance(value, classes):
            return value
        if by_name and isinstance(value, str):
            value = {"name": value}
        if not isinstance(value, Mapping):
            raise ValueError(
                f"A mapping such as {{name: {default}}} is required. Received {value!r}."
            )
        name = str(value.get("name", default))  # str, because a list cannot be looked up in a table
        if user_class is not None and ":" in name:
            kind: type[BaseModel] = user_class
        else:
            kind = table[check_name("name", name, table)]
        try:
            return kind.model_validate(value)
        except ValidationError as error:
            # `error_lines` finds the cause, and describes each error in it with its field
            raise ValueError(str(error)) from error

    # Types that `read` accepts, for the JSON schema
    accepted = (*classes, Literal[tuple(table)]) if by_name else classes
    return PlainValidator(read, json_schema_input_type=functools.reduce(operator.or_, accepted))


def change(tree: dict[str, Any], setting: str) -> None:
    """Apply a setting such as `a.0.b=value`, whose value is YAML, to the tree.

    **Raises:** RecipeError if the tree has no such field, or the value is not YAML.
    """
    path, equals, text = setting.partition("=")
    keys = [int(key) if key.isdecimal() else key for key in path.split(".")]
    if not equals or not all(str(key) for key in keys):
        raise RecipeError(
            "A setting needs the form place=value, such as phases.0.epochs=1. Received "
            f"{setting!r}."
        )
    # YAML reads nothing as null, by which the user's choice would become the default
    if not text.strip():
        raise RecipeError(
            f"A setting needs a value. Received {setting!r}. Was it taken from a variable that is "
            f"not set? The default is {path}=null, an empty text {path}=''."
        )
    inner: Any = tree
    try:
        value = parse(text)
        for key in keys[:-1]:
            # A part that the file leaves out is made, so that a setting of it can be changed
            inner = inner.setdefault(key, {}) if isinstance(inner, dict) else inner[key]
        inner[keys[-1]] = value
    except (IndexError, TypeError, AttributeError) as error:
        raise RecipeError(f"The recipe has no place {path!r} for {setting!r}: {error}.") from error
    except ValueError as error:
        raise RecipeError(
            f"The value in {setting!r} is not YAML: {' '.join(str(error).split())}."
        ) from error


def error_lines(error: ValidationError, prefix: str = "") -> list[str]:
    """Return a line `field: requirement. Received ...` for each wrong setting below `prefix`."""
    lines: list[str] = []
    for detail in error.errors():
        # A list is also too short after the loss of its wrong entries
        if detail["type"] == "too_short" and detail["ctx"]["actual_length"] < len(detail["input"]):
            continue
        keys = (f"[{key}]" if isinstance(key, int) else f".{key}" for key in detail["loc"])
        inner = (prefix + "".join(keys)).lstrip(".")
        raised = detail.get("ctx", {}).get("error")
        if isinstance(raised, Exception) and isinstance(raised.__cause__, ValidationError):
            lines += error_lines(raised.__cause__, inner)
        else:
            lines.append(f"{inner or 'recipe'}: {_problem(detail)}")
    return lines


def _problem(detail: Mapping[str, Any]) -> str:
    if detail["type"] == "value_error":  # Messages of this package, which are complete
        return str(detail["ctx"]["error"])
    if detail["type"] == "missing":
        return "required, and missing."
    if detail["type"] == "tuple_type":  # In YAML it is a list
        return f"A list such as [1, 2] is required. Received {detail['input']!r}."
    if detail["type"] in ("model_type", "model_attributes_type", "dict_type"):
        return f"A mapping of keys to values is required. Received {detail['input']!r}."
    if detail["type"] in ("path_type", "string_type"):
        return f"Text is required. Received {detail['input']!r}. Write a number in quotes."
    return f"{detail['msg']}. Received {detail['input']!r}."

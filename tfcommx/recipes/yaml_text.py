"""Read YAML 1.2. The only `import yaml`: PyYAML reads YAML 1.1, where `10:00` is 600, `010` is 8.

    plain text                        value
    null, ~, nothing                  None
    true, false                       a truth value
    12, 0x1F, 0o17, 1.5, 1e-3, .inf   a number
    yes, on, 010, 1_000, 10:00        refused: YAML 1.1 and 1.2, and people, read them differently
    anything else                     text

Repeated keys, aliases, and tags other than those of these values are refused: nine lines of aliases
can stand for a billion values. A merge key (`<<`) is plain text.
"""

from __future__ import annotations

import math
import re
from typing import Any, ClassVar

import yaml

NULL = re.compile(r"(?:null|Null|NULL|~)?")
BOOL = re.compile(r"true|True|TRUE|false|False|FALSE")
INT = re.compile(r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+", re.ASCII)
FLOAT = re.compile(
    r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF)"
    r"|\.(?:nan|NaN|NAN)"
)
# Truth values, octal and binary numbers, and numbers to the base 60 of YAML 1.1
AMBIGUOUS = re.compile(
    r"(?:yes|no|on|off)|[-+]?0[0-9]+|[-+]?0b[01]+|[-+]?[0-9]+(?::[0-9]+)+(?:\.[0-9]*)?",
    re.IGNORECASE,
)
TAG = "tag:yaml.org,2002:"
# Of lists and mappings in each other: more than any recipe has, less than Python's stack can hold
DEEPEST = 50


class YamlError(ValueError):
    """Text that is no YAML, or more than a file of settings needs; the message names the line."""


def parse(text: str) -> Any:
    """Return what a YAML text means: None, a truth value, number, string, list or mapping.

    >>> parse("{rate: 1e-3, seeds: [1, 0x10], name: 2026-01-31, last: yesterday}")
    {'rate': 0.001, 'seeds': [1, 16], 'name': '2026-01-31', 'last': 'yesterday'}

    **Raises:** YamlError.
    """
    try:
        return yaml.load(text, _Loader)
    except yaml.YAMLError as error:
        raise YamlError(" ".join(str(error).split())) from error


class _Loader(yaml.SafeLoader):
    """PyYAML's, with the values of YAML 1.2."""

    yaml_implicit_resolvers: ClassVar[dict[str, Any]] = {}
    yaml_constructors: ClassVar[dict[str, Any]] = {}
    depth = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        event = self.peek_event()
        if isinstance(event, yaml.AliasEvent):
            raise yaml.composer.ComposerError(
                None, None, f"write *{event.anchor} out: aliases are refused", event.start_mark
            )
        self.depth += 1
        if self.depth > DEEPEST:
            raise yaml.composer.ComposerError(
                None, None, f"more than {DEEPEST} lists or mappings in each other", event.start_mark
            )
        node = super().compose_node(parent, index)
        self.depth -= 1
        return node

    def compose_scalar_node(self, anchor: Any) -> yaml.ScalarNode:
        event = self.peek_event()
        node = super().compose_scalar_node(anchor)
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
            if key in mapping:
                raise _error(key_node, f"the key {key!r} comes twice")
            mapping[key] = self.construct_object(value_node, deep=True)
        return mapping


def _error(node: yaml.Node, message: str) -> yaml.constructor.ConstructorError:
    return yaml.constructor.ConstructorError(None, None, message, node.start_mark)


def _kind(node: yaml.ScalarNode) -> str:
    """Return the kind of value that plain text is."""
    text = node.value
    for kind, form in (("null", NULL), ("bool", BOOL), ("float", FLOAT), ("int", INT)):
        if form.fullmatch(text) and not AMBIGUOUS.fullmatch(text):
            return "int" if INT.fullmatch(text) else kind
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
    form = {"null": NULL, "bool": BOOL, "int": INT, "float": FLOAT}.get(kind)
    if text is None or (form and not form.fullmatch(text)):
        raise _error(node, f"{text!r} is no value of the kind {kind}")
    if kind == "null":
        return None
    if kind == "bool":
        return text.lower() == "true"
    if kind == "float":
        number = float(text.lower().replace(".inf", "inf").replace(".nan", "nan"))
        if math.isinf(number) and "inf" not in text.lower():
            raise _error(node, f"{text} is too large for a number")
        return number
    if kind == "int":
        base = {"0x": 16, "0o": 8}.get(text[:2], 10)
        if len(text) > 400:  # Of a float, 308 digits; Python refuses some more with an error
            raise _error(node, "a number of more than 400 digits")
        return int(text, base)
    return text


for _name in ("null", "bool", "int", "float", "str"):
    _Loader.add_constructor(
        TAG + _name, lambda loader, node, kind=_name: _construct(kind, loader, node)
    )
_Loader.add_constructor(
    TAG + "seq", lambda loader, node: loader.construct_sequence(node, deep=True)
)
_Loader.add_constructor(TAG + "map", lambda loader, node: loader.construct_mapping(node, deep=True))
_Loader.add_constructor(None, yaml.constructor.SafeConstructor.construct_undefined)

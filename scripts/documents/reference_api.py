"""The Python interface as Markdown, from signatures and docstrings.

griffe reads the sources, so that nothing is imported but the table of public names. This module
handles the docstrings' additions to Google's style: `>>>` examples become blocks, `**Ranks:**` and
the like paragraphs, and the comment above a field is its documentation.
"""

from __future__ import annotations

import builtins
import logging
import re
from collections.abc import Iterator
from pathlib import Path

import griffe

import tfcommx
from tfcommx.recipes.schema import comment_above

ROOT = Path(__file__).resolve().parents[2]
# Other members that a user calls: the owner in user code -> name -> dotted path
ALSO = {
    "optimizer.exchanger": dict.fromkeys(["traffic", "plans"], "tfcommx.optim.exchanger.Exchanger"),
    "tfcommx.data.options": {"Options": "tfcommx.data.options"},
}
# Classes with methods for users; methods of the others are hooks of Keras, or internal
HAVE_METHODS = ("Scheme", "DataCache", "BatchSpec", "Topology", "Plan")
WIDTH = 100


def api() -> str:
    """Return the page: a section for `cx` and for each of its modules."""
    # It warns of arguments that are in docstrings and in no signature, as `**options`
    logging.getLogger("griffe").setLevel(logging.ERROR)
    package = griffe.load("tfcommx", search_paths=[ROOT], docstring_parser="google")
    sections = {"cx": tfcommx._PUBLIC}
    for name, module in tfcommx._MODULES.items():
        sections[f"cx.{name}"] = dict.fromkeys(_names(package, module), module)
    parts = ["# Python interface", "`import tfcommx as cx`"]
    for section, places in (sections | ALSO).items():
        parts.append(f"## {section}")
        for name, place in places.items():
            parts += _entry(_find(package, f"{place}.{name}"), f"{section}.{name}")
    return "\n\n".join(parts) + "\n"


def _names(package: griffe.Module, module: str) -> list[str]:
    """Return the public names of a module."""
    if module == "tfcommx.strategies":  # Its other names are for authors of strategies
        return list(map(str, package["strategies.table.STRATEGIES"].value.values))
    return _find(package, module).exports


def _find(package: griffe.Module, path: str) -> griffe.Object:
    found = package[path.removeprefix("tfcommx.")]
    return found.final_target if found.is_alias else found


def _entry(item: griffe.Object, written: str) -> Iterator[str]:
    """Yield heading, signature, documentation, fields and methods."""
    yield f"### {item.name}"
    yield _block(_signature(item, written))
    yield from _documentation(item)
    if "dataclass" in item.labels and (fields := list(_fields(item))):
        yield "\n".join(["Fields:", "", *fields])
    for name, method in item.members.items() if item.name in HAVE_METHODS else ():
        if method.is_function and method.docstring and not name.startswith("_"):
            yield f"#### {item.name}.{name}"
            yield _block(_signature(method, f"{item.name[0].lower()}{item.name[1:]}.{name}"))
            yield from _documentation(method)


def _signature(item: griffe.Object, written: str) -> str:
    """Return a call as it is written, in one line, or with a line for each argument."""
    arguments = []
    bare_star = False
    for parameter in item.parameters:
        if parameter.name in ("self", "cls"):
            continue
        stars = {"variadic positional": "*", "variadic keyword": "**"}.get(parameter.kind.value, "")
        bare_star |= stars == "*"
        if parameter.kind.value == "keyword-only" and not bare_star:
            arguments.append("*")
            bare_star = True
        annotation = f": {parameter.annotation}" if parameter.annotation else ""
        has_default = parameter.default is not None and not stars
        default = f" = {_value(item, parameter.default)}" if has_default else ""
        arguments.append(f"{stars}{parameter.name}{annotation}{default}")
    returns = getattr(item, "returns", None)
    end = f" -> {returns}" if returns and not item.is_class else ""
    line = f"{written}({', '.join(arguments)}){end}"
    if len(line) <= WIDTH:
        return line
    return "\n".join([f"{written}(", *(f"    {argument}," for argument in arguments), f"){end}"])


def _value(item: griffe.Object, value: griffe.Expr | str) -> str:
    """Return a default as it is written; of a constant's name, the constant."""
    first, *others = str(value).split(".")
    if not re.fullmatch(r"[A-Za-z_]\w*(\.[A-Z_]+)?", str(value)) or hasattr(builtins, first):
        return str(value)
    return str(_find(item.package, ".".join([item.module.resolve(first), *others])).value)


def _documentation(item: griffe.Object) -> Iterator[str]:
    for section in item.docstring.parsed if item.docstring else ():
        kind, content = section.kind.value, section.value
        if kind == "text":
            yield _text(content)
        elif kind == "parameters":
            yield "\n".join(["Arguments:", "", *map(_line, content)])
        elif kind == "attributes":
            yield "\n".join(map(_line, content))
        elif kind in ("returns", "yields"):
            yield f"Returns: {' '.join(_words(returned) for returned in content)}"
        else:
            raise ValueError(f"{item.path}: a section `{kind}` is not expected in its docstring.")


def _line(described: griffe.DocstringElement) -> str:
    return f"- `{described.name}`: {_words(described)}"


def _words(described: griffe.DocstringElement) -> str:
    return " ".join(described.description.split())


def _text(text: str) -> str:
    """Set examples as blocks, and `**Ranks:**` and the like as paragraphs."""
    return "\n\n".join(
        _block(part) if part.startswith(">>>") else re.sub(r"\n(?=\*\*[A-Z]\w+:\*\*)", "\n\n", part)
        for part in text.split("\n\n")
    )


def _fields(item: griffe.Class) -> Iterator[str]:
    """Yield the fields of a dataclass, with the comments above them."""
    lines = item.filepath.read_text().splitlines()
    for name, field in item.members.items():
        if not field.is_attribute or name.startswith("_") or field.annotation is None:
            continue
        value = "" if field.value is None else f" = {_value(item, field.value)}"
        comment = comment_above(lines, field.lineno - 1)
        yield f"- `{name}: {field.annotation}{value}`" + (f": {comment}" if comment else "")


def _block(code: str) -> str:
    return f"```python\n{code}\n```"

"""The Python interface as Markdown, from signatures and docstrings; nothing is imported.

griffe reads the sources. What this project's docstrings have beyond Google's style is done here:
`>>>` examples become blocks, `**Ranks:**` and the like paragraphs, and the comment above a field
is its documentation.
"""

from __future__ import annotations

import builtins
import logging
import re
from collections.abc import Iterator
from pathlib import Path

import griffe

ROOT = Path(__file__).resolve().parents[2]
# Section -> what is in it: module or class, and names in it
SECTIONS = {
    "Start": ("tfcommx", ("init", "rank", "size", "local_rank", "local_size", "is_chief")),
    "Train": (
        "tfcommx",
        (
            "DistributedOptimizer",
            "Scheme",
            "broadcast_variables",
            "consolidate",
            "metrics_over_ranks",
            "begin_step",
            "take_centre",
            "parallel_operator",
            "profile",
            "allow_plain_optimizers",
        ),
    ),
    "What the exchange has sent": ("tfcommx.optim.exchanger.Exchanger", ("traffic", "plans")),
    "Callbacks": ("tfcommx.callbacks", None),
    "Layers": ("tfcommx.optim.layers", None),
    "Checkpoints": ("tfcommx.checkpoint", None),
    "Optimizers": ("tfcommx.optimizers", None),
    "Strategies": (
        "tfcommx.strategies",
        (
            "Synchronous",
            "Root",
            "Rebroadcast",
            "Sharded",
            "WeightAveraging",
            "ElasticAveraging",
            "StepAhead",
        ),
    ),
    "Data": ("tfcommx", ("DataCache", "BatchSpec")),
    "Options of DataCache": ("tfcommx.data.options", ("Options",)),
    "Laws for members of your own": ("tfcommx.testing", None),
    "Terms": ("tfcommx", ("Topology", "Plan")),
    "Errors": (
        "tfcommx",
        (
            "TfcommxError",
            "ConfigurationError",
            "PlanError",
            "LaunchError",
            "RankLostError",
            "DataError",
            "CheckpointError",
        ),
    ),
}
# How a user writes what is in a module
WRITTEN = {
    "tfcommx": "cx.",
    "tfcommx.optim.exchanger.Exchanger": "optimizer.exchanger.",
    "tfcommx.callbacks": "cx.callbacks.",
    "tfcommx.optim.layers": "cx.layers.",
    "tfcommx.checkpoint": "cx.checkpoint.",
    "tfcommx.optimizers": "cx.optimizers.",
    "tfcommx.strategies": "cx.strategies.",
    "tfcommx.testing": "cx.testing.",
}
# Whose methods a user calls; those of the others are hooks of Keras, or for the rooms above
HAVE_METHODS = ("Scheme", "DataCache", "BatchSpec", "Topology", "Plan")
WIDTH = 100


def api(public: dict[str, str], modules: dict[str, str]) -> str:
    """Return the page.

    Args:
        public: name in `tfcommx` -> the module that it lives in.
        modules: name in `tfcommx` of a module -> the module.
    """
    # It warns of arguments that are in docstrings and in no signature, as `**options`
    logging.getLogger("griffe").setLevel(logging.ERROR)
    package = griffe.load("tfcommx", search_paths=[ROOT], docstring_parser="google")
    parts = ["# Python interface", "`import tfcommx as cx`"]
    listed: set[str] = set()
    for title, (place, names) in SECTIONS.items():
        home = package[place.removeprefix("tfcommx.")] if place != "tfcommx" else package
        parts.append(f"## {title}")
        for name in names or map(str, home.exports):
            where = package[public[name].removeprefix("tfcommx.")] if home is package else home
            found = where[name].final_target if where[name].is_alias else where[name]
            parts += _entry(found, WRITTEN.get(place, "") + name)
            listed.add(name)
    places = {place for place, _ in SECTIONS.values()}
    if missing := sorted({*public, *modules.values()} - listed - places):
        raise SystemExit(f"Give {', '.join(missing)} a place in SECTIONS of {__file__}.")
    return "\n\n".join(parts) + "\n"


def _entry(found: griffe.Object, written: str) -> Iterator[str]:
    """Yield heading, signature, documentation, fields and methods."""
    yield f"### {found.name}"
    yield _block(_signature(found, written))
    yield from _documentation(found)
    if not found.is_class:
        return
    if "dataclass" in found.labels and (fields := list(_fields(found))):
        yield "\n".join(["Fields:", "", *fields])
    if found.name not in HAVE_METHODS:
        return
    for name, method in found.members.items():
        if method.is_function and method.docstring and not name.startswith("_"):
            yield f"#### {found.name}.{name}"
            yield _block(_signature(method, f"{found.name[0].lower()}{found.name[1:]}.{name}"))
            yield from _documentation(method)


def _signature(found: griffe.Object, written: str) -> str:
    arguments = []
    bare_star = False
    for one in found.parameters:
        if one.name in ("self", "cls"):
            continue
        stars = {"variadic positional": "*", "variadic keyword": "**"}.get(one.kind.value, "")
        bare_star |= stars == "*"
        if one.kind.value == "keyword-only" and not bare_star:
            arguments.append("*")
            bare_star = True
        text = f"{stars}{one.name}" + (f": {one.annotation}" if one.annotation else "")
        default = "" if one.default is None or stars else f" = {_value(found, one.default)}"
        arguments.append(text + default)
    returns = getattr(found, "returns", None)
    end = f" -> {returns}" if returns and not found.is_class else ""
    line = f"{written}({', '.join(arguments)}){end}"
    if len(line) <= WIDTH:
        return line
    return "\n".join([f"{written}(", *(f"    {one}," for one in arguments), f"){end}"])


def _value(found: griffe.Object, value: griffe.Expr | str) -> str:
    """Return a default as it is written; of a constant's name, the constant."""
    first, *others = str(value).split(".")
    if not re.fullmatch(r"[A-Za-z_]\w*(\.[A-Z_]+)?", str(value)) or hasattr(builtins, first):
        return str(value)
    path = ".".join([found.module.resolve(first), *others]).removeprefix("tfcommx.")
    constant = found.package[path]
    return str(constant.final_target.value if constant.is_alias else constant.value)


def _documentation(found: griffe.Object) -> Iterator[str]:
    if not found.docstring:
        return
    for section in found.docstring.parsed:
        if section.kind.value == "text":
            yield _text(section.value)
        elif section.kind.value == "parameters":
            yield "\n".join(
                ["Arguments:", "", *(f"- `{one.name}`: {_line(one)}" for one in section.value)]
            )
        elif section.kind.value in ("returns", "yields"):
            yield f"Returns: {' '.join(_line(one) for one in section.value)}"
        elif section.kind.value == "attributes":
            yield "\n".join(f"- `{one.name}`: {_line(one)}" for one in section.value)
        else:
            raise SystemExit(f"{found.path}: a section {section.kind.value} is not expected.")


def _line(one: griffe.DocstringElement) -> str:
    return " ".join(one.description.split())


def _text(text: str) -> str:
    """Set examples and drawings as blocks, and `**Ranks:**` and the like as paragraphs."""
    parts = []
    for part in text.split("\n\n"):
        if part.startswith(">>>"):
            parts.append(_block(part))
        else:
            parts.append(re.sub(r"\n(?=\*\*[A-Z]\w+:\*\*)", "\n\n", part))
    return "\n\n".join(parts)


def _fields(found: griffe.Class) -> Iterator[str]:
    """Yield the fields of a dataclass, with the comments above them."""
    lines = found.filepath.read_text().splitlines()
    for name, field in found.members.items():
        if not field.is_attribute or name.startswith("_") or field.annotation is None:
            continue
        value = "" if field.value is None else f" = {_value(found, field.value)}"
        said = comment_above(lines, field.lineno - 1)
        yield f"- `{name}: {field.annotation}{value}`" + (f": {said}" if said else "")


def comment_above(lines: list[str], number: int) -> str:
    """Return the comment that ends above line `number`, in one line."""
    words: list[str] = []
    while number and lines[number - 1].lstrip().startswith("#"):
        number -= 1
        words.insert(0, lines[number].lstrip(" #"))
    return " ".join(words)


def _block(code: str) -> str:
    return f"```python\n{code}\n```"

"""The errors and warnings of the package, found in its source."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from launching import ROOT

LOGGING = ("warning", "warn", "error", "critical")
# What is not there, and what cannot be
PYTHONS_OWN = ("AttributeError", "AssertionError")
HOLE = "..."  # In the place of what is known only when it happens


class Messages:
    """All messages of the package, as they are written in its files."""

    def __init__(self, package: Path = ROOT / "tfcommx") -> None:
        self.trees = {file: ast.parse(file.read_text()) for file in sorted(package.rglob("*.py"))}
        # What messages are made of elsewhere: constants and functions, by name
        self.constants: dict[str, ast.expr] = {}
        self.functions: dict[str, ast.FunctionDef] = {}
        for tree in self.trees.values():
            self.constants |= constants_of(tree)
            for node in ast.walk(tree):
                if isinstance(node, ast.FunctionDef):
                    self.functions[node.name] = node

    def found(self) -> Iterator[tuple[str, str]]:
        """Yield (place, first sentence) of each; what is put into it is HOLE."""
        everywhere = self.constants
        for file, tree in self.trees.items():
            self.constants = everywhere | constants_of(tree)
            for node in ast.walk(tree):
                if (argument := _message(node)) is not None:
                    place = f"{file.relative_to(ROOT)}:{node.lineno}"
                    for text in self._texts(argument):
                        yield place, first_sentence(text)

    def _texts(self, node: ast.expr) -> list[str]:
        """Return what an expression may say."""
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            return [re.sub(r"%[-.\d]*[a-z]|\{\w+\}", HOLE, node.value)]
        if isinstance(node, ast.JoinedStr):
            return ["".join(self._part(one) for one in node.values)]
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
            return [a + b for a in self._texts(node.left) for b in self._texts(node.right)]
        if isinstance(node, ast.IfExp):
            return self._texts(node.body) + self._texts(node.orelse)
        if isinstance(node, ast.Name) and node.id in self.constants:
            return self._texts(self.constants[node.id])
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            return self._texts(node.func.value) if node.func.attr == "format" else [HOLE]
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            function = self.functions.get(node.func.id)
            inside = ast.walk(function) if function else ()
            returned = [one.value for one in inside if isinstance(one, ast.Return)]
            return [text for one in returned if one for text in self._texts(one)] or [HOLE]
        return [HOLE]

    def _part(self, node: ast.expr) -> str:
        if isinstance(node, ast.Constant):
            return str(node.value)
        # A short constant is part of the words; everything else is a hole
        value = node.value if isinstance(node, ast.FormattedValue) else node
        if isinstance(value, ast.Name) and isinstance(self.constants.get(value.id), ast.Constant):
            return str(self.constants[value.id].value)
        return HOLE


def constants_of(tree: ast.Module) -> dict[str, ast.expr]:
    return {
        node.targets[0].id: node.value
        for node in tree.body
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)
    }


def _message(node: ast.AST) -> ast.expr | None:
    """Return the text of an error or a warning; None if the node makes none."""
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name | ast.Attribute):
        return None
    name = node.func.id if isinstance(node.func, ast.Name) else node.func.attr
    is_error = name.endswith("Error") and name not in PYTHONS_OWN
    is_log = isinstance(node.func, ast.Attribute) and name in LOGGING
    if is_error or is_log or ast.unparse(node.func).endswith("stderr.write"):
        # The first words of YAML's own errors are None
        words = [one for one in node.args if not isinstance(one, ast.Constant) or one.value]
        return words[0] if words else None
    return None


def first_sentence(text: str) -> str:
    """Return what says what is wrong, without what came and what to do.

    >>> first_sentence("`k` must be >= 1. Received k=0. Raise it.")
    '`k` must be >= 1.'
    """
    text = re.sub(r"(\.\.\.)+", HOLE, " ".join(text.split())).removeprefix("tfcommx: ")
    ends = (
        r"(?<=[^.]\.) (?=[A-Z{.`])",
        r"(?<=\.{4}) (?=[A-Z])",
        r"(?<=:) (?=\.\.\.|`?(?:horovodrun|tfcommx run))",
    )
    return re.split("|".join([*ends, " Received"]), text)[0].strip()


def fragments(text: str) -> list[str]:
    """Return what is fixed in a message, without marks, in order; [] if that says nothing."""
    parts = [part.strip(" .:,()'") for part in text.replace("`", "").split(HOLE)]
    return [part for part in parts if len(part) > 2] if len("".join(parts)) > 7 else []

"""Phrases that a native engineer would not write: each tree has a budget, which may only fall."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections import Counter
from collections.abc import Iterator

import pytest
from launching import ROOT

# Name -> pattern. CONTRIBUTING.md says what to write instead
PHRASES = {
    "goes on": r"\b(?:go|goes|went) on\b",
    "of its own": r"\bof (?:its|their|your|our) own\b",
    "tell whether": r"\b[Tt]ells? whether\b",
    "take note": r"\b[Tt]akes? note\b",
    "nobody": r"\b(?:nobody|somebody|anybody|none else)\b",
    "what is, as a noun": r"(?<![.?!] )\bwhat (?:is|was|are|were|has|have|it|they|a|the)\b",
    "What, not in a question": r"(?<!# )\bWhat \w[^.?!|]*\.",
}
# Occurrences today. Lower one when you have rewritten some; never raise one
BUDGETS = {
    "tfcommx": {},
    "scripts": {},
    "tests": {},
    "pages": {},
}


def prose_of_python(text: str) -> Iterator[str]:
    """Yield docstrings, messages and comments."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value:
            yield node.value
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            yield token.string


def prose(tree: str) -> Iterator[str]:
    """Yield the prose of a folder, or of all pages."""
    if tree == "pages":
        for page in [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")]:
            yield re.sub(r"(?s)```.*?```|`[^`]*`", "", page.read_text())
        return
    for file in (ROOT / tree).rglob("*.py"):
        if file.name != "test_english.py":
            yield from prose_of_python(file.read_text())


@pytest.mark.parametrize("tree", ["tfcommx", "scripts", "tests", "pages"])
def test_phrases_stay_within_their_budget(tree: str) -> None:
    counts = Counter[str]()
    for text in prose(tree):
        for name, pattern in PHRASES.items():
            counts[name] += len(re.findall(pattern, text))
    found = {name: counts[name] for name in PHRASES if counts[name]}
    over = {name: count for name, count in found.items() if count > BUDGETS[tree].get(name, 0)}
    assert not over, f"Rewrite these in {tree}; the budget is {BUDGETS[tree]}: {over}"
    assert found == BUDGETS[tree], "Fewer than the budget: lower it, so that it can only fall"


def test_phrases_are_found() -> None:
    text = '"""It goes on with what is left. What is left waits."""\n'
    text += 'raise ValueError("of its own")  # nobody\n'
    found = {
        name
        for name, pattern in PHRASES.items()
        if any(re.search(pattern, part) for part in prose_of_python(text))
    }
    assert found == {
        "goes on",
        "of its own",
        "nobody",
        "what is, as a noun",
        "What, not in a question",
    }

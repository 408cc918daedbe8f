"""Finds the lines that start ranks: in documents, headers of recipes, docstrings and messages.

A line is a launcher and the program that it starts, such as `horovodrun -np 2 python train.py`, or
`tfcommx train` with a recipe. A launcher alone (`horovodrun --mpi`) is a mention. A line that
cannot be run has `not run: REASON` in a comment before its block, or behind it.
"""

from __future__ import annotations

import ast
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

LAUNCHER = r"(?:horovodrun|mpirun|srun|torchrun|tfcommx run|tfcommx train)"
# Words that may precede it and do not change how ranks are started
BEFORE = r"(?:\w+=\S+ )*(?:scripts/cluster run -- |\.venv/bin/|time )?"
LINE = re.compile(rf"^(?:cd \S+; |\$ )?({BEFORE}{LAUNCHER} .*)$")
# In a docstring or a comment a line may follow a word and a colon
IN_PROSE = re.compile(rf"(?:^|: |#\s+)({BEFORE}{LAUNCHER} .*)$")
# A Python file without these words, which may be parts of a string, need not be parsed
SPOKEN = re.compile(r"horovodrun|mpirun|srun|torchrun|\btfcommx(?: (?:run|train)\b| ?[\"'])")
PROGRAMS = ("python", "tfcommx")
NOT_RUN = "not run: "


class Found(NamedTuple):
    """A launch line, and where it stands."""

    where: str
    words: tuple[str, ...]


class Split(NamedTuple):
    """A launch line's parts."""

    environment: tuple[str, ...]
    launcher: tuple[str, ...]
    program: tuple[str, ...]


def lines_of_markdown(text: str) -> Iterator[str]:
    """Return the lines of code blocks, and the spans between backquotes."""
    excused, fenced, prose = False, False, []
    text = re.sub(r"<!--.*?-->", lambda comment: " ".join(comment[0].split()), text, flags=re.S)
    for line in text.splitlines():
        if line.lstrip().startswith("```"):
            fenced = not fenced
        elif fenced or line.startswith("    "):
            if not excused:
                yield line.strip()
        elif line.startswith("<!--"):
            excused = NOT_RUN in line
        else:
            # A comment holds until the block after it has ended
            excused = excused and not line.strip()
            prose.append(line)
            yield ""
    yield ""
    # A cell of a table, or a paragraph
    for span in re.findall(r"(?<!`)`([^`]+)`(?!`)", "\n".join(prose)):
        yield " ".join(span.split())


def lines_of_yaml(text: str) -> Iterator[str]:
    """Return the comments at the head of a recipe, without the words that introduce a command."""
    for line in text.splitlines():
        if line.startswith("#"):
            # A remark behind the command stands in parentheses
            yield line.lstrip("# ").removeprefix("Command:").partition("   (")[0].strip()


def lines_of_python(text: str) -> Iterator[str]:
    """Return the lines and the backquoted spans of all strings; `X` for a value in them."""
    if not SPOKEN.search(text):
        return
    nodes = list(ast.walk(ast.parse(text)))
    parts = {id(part) for node in nodes if isinstance(node, ast.JoinedStr) for part in node.values}
    for node in nodes:
        if isinstance(node, ast.JoinedStr):
            words = [
                str(part.value) if isinstance(part, ast.Constant) else "X" for part in node.values
            ]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            words = [] if id(node) in parts else [node.value]
        else:
            continue
        whole = "".join(words)
        spans = re.findall(r"(?<!`)`([^`]+)`(?!`)", whole)
        yield from (" ".join(span.split()) for span in spans)
        rest = re.sub(r"(?<!`)`[^`]+`(?!`)", "", whole)
        for line in rest.splitlines():
            found = IN_PROSE.search(line.strip())
            yield found[1].removesuffix(".") if found else ""
        yield ""


READERS = {".md": lines_of_markdown, ".yaml": lines_of_yaml, ".py": lines_of_python}


def sources(root: Path) -> list[Path]:
    """Return all files in which launch lines may stand."""
    patterns = (
        "README.md", "docs/**/*.md", "configs/*.yaml", "tfcommx/**/*.py",
        "scripts/examples/*.md", "scripts/examples/*.py", "scripts/examples/*.yaml",
    )  # fmt: skip
    return sorted(path for pattern in patterns for path in root.glob(pattern))


def launch_lines(path: Path, root: Path) -> list[Found]:
    """Return the launch lines of a file."""
    found, begun = [], ""
    for line in READERS[path.suffix](path.read_text()):
        text = f"{begun} {line}".strip()
        begun = ""
        if not LINE.match(text) or NOT_RUN in text:
            continue
        if text.endswith("\\"):
            begun = text.removesuffix("\\").rstrip()
            continue
        try:
            words = shlex.split(re.sub(r"^(cd \S+; |\$ )", "", text), comments=True)
        except ValueError:  # The quotation ends on another line
            begun = text
            continue
        for command in commands(words):
            if is_launch(command):
                found.append(Found(f"{path.relative_to(root)}: {shlex.join(command)}", command))
    return found


def commands(words: list[str]) -> Iterator[tuple[str, ...]]:
    """Split at `&&` and `;`."""
    begun: list[str] = []
    for word in [*words, ";"]:
        if word in ("&&", ";"):
            yield tuple(begun)
            begun = []
        else:
            begun.append(word.removesuffix(";"))


def is_launch(words: tuple[str, ...]) -> bool:
    """Return True if the words have a launcher and the program that it starts."""
    parts = split(words)
    if parts.launcher[:2] == ("tfcommx", "train"):
        return any(word.endswith(".yaml") or word == "CONFIG" for word in parts.launcher[2:])
    return bool(parts.launcher and parts.program)


def split(words: tuple[str, ...]) -> Split:
    """Split a line into environment variables, launcher with its options, and program."""
    number = 0
    while number < len(words) and re.match(r"\w+=", words[number]):
        number += 1
    environment, rest = words[:number], words[number:]
    if rest[:3] == ("scripts/cluster", "run", "--"):
        rest = rest[3:]
    if not rest:
        return Split(environment, (), ())
    rest = (rest[0].removeprefix(".venv/bin/"), *rest[1:])
    if rest[:2] == ("tfcommx", "train"):
        return Split(environment, rest, ())
    own = 2 if rest[0] == "tfcommx" else 1
    for number, word in enumerate(rest[own:], own):
        if word in PROGRAMS:
            return Split(environment, rest[:number], rest[number:])
    return Split(environment, rest, ())

"""Every line that calls tfcommx in a document is one that its command takes."""

from __future__ import annotations

import re
import shlex

import pytest
import typer
from documents import DOCUMENTS

from tfcommx.cli.main import app


def calls(text: str) -> list[str]:
    """Return the words behind `tfcommx` of each call in a block of commands."""
    joined = re.sub(r"\\\n *", "", re.sub(r"```(?:python|diff)\n.*?```", "", text, flags=re.S))
    fenced = "\n".join(re.findall(r"```\w*\n(.*?)```", joined, re.S))
    lines = [*re.findall(r"^ {4,}(.*)$", joined, re.M), *fenced.splitlines()]
    commands = (re.sub(r"\s#.*|\s&$", "", line) for line in lines)
    found = (re.search(r"(?:^|[ /])tfcommx ([a-z-].*)$", line) for line in commands)
    return [one[1].removeprefix("tfcommx ") for one in found if one and " | " not in one[1]]


CALLS = [
    (document, call) for document, text in DOCUMENTS.items() for call in dict.fromkeys(calls(text))
]


@pytest.mark.parametrize(("document", "call"), CALLS)
def test_a_printed_call_is_taken(document: str, call: str) -> None:
    """Options, arguments and their types; nothing is carried out."""
    command, words = typer.main.get_command(app), shlex.split(call)
    if words[0] == "--version":
        return
    while hasattr(command, "commands"):
        assert words[0] in command.commands, f"{document}: tfcommx {call}"
        command = command.commands[words.pop(0)]
    command.make_context(command.name, words)


def test_there_are_calls_and_wrong_ones_are_refused() -> None:
    assert len(CALLS) > 30
    command = typer.main.get_command(app).commands["plan"]
    for wrong, named in (
        ("", "model"),
        ("resnet50 --linkz l.json", "--linkz"),
        ("resnet50 --links l.json --nodes many", "integer"),
    ):
        with pytest.raises(Exception, match=named):
            command.make_context("plan", shlex.split(wrong))

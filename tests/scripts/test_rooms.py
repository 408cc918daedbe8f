"""Each script has its room, and each benchmark is registered."""

from __future__ import annotations

import ast
import sys

import pytest
from launching import ROOT

sys.path.insert(0, str(ROOT / "scripts"))
from bench.registry import BENCHMARKS, FOLDER, claim

SCRIPTS = ROOT / "scripts"
# Commands that users type are the only files outside of rooms
COMMANDS = {"cluster", "check_cuda"}
README = (SCRIPTS / "README.md").read_text()
FILES = {path.stem for path in FOLDER.glob("*.py")}


def test_only_commands_stand_outside_of_rooms() -> None:
    assert {path.name for path in SCRIPTS.iterdir() if path.is_file()} == {*COMMANDS, "README.md"}
    rooms = {path.name for path in SCRIPTS.iterdir() if path.is_dir()} - {"__pycache__"}
    for name in {f"{room}/" for room in rooms} | COMMANDS:
        assert f"`{name}`" in README, name


def test_each_file_is_a_benchmark_or_part_of_one() -> None:
    assert set(BENCHMARKS) <= FILES
    for name in FILES - set(BENCHMARKS):
        assert any(name.startswith(f"{one}_") for one in BENCHMARKS), name


@pytest.mark.parametrize("name", BENCHMARKS)
def test_a_benchmark_says_its_claim_and_its_peers(name: str) -> None:
    tree = ast.parse((FOLDER / f"{name}.py").read_text())
    text = ast.get_docstring(tree) or ""
    assert claim(name) and "\nPeer" in text and f"scripts/bench {name}" in text
    functions = {one.name for one in tree.body if isinstance(one, ast.FunctionDef)}
    assert {"parser", "measure"} <= functions


def test_what_is_shared_knows_no_benchmark() -> None:
    """Options, rounds, ranks and records serve all benchmarks: none of them names one."""
    for path in FOLDER.parent.glob("*.py"):
        if path.stem not in ("registry", "results", "__init__"):
            tree = ast.parse(path.read_text())
            named = {one.value for one in ast.walk(tree) if isinstance(one, ast.Constant)}
            assert not named & set(BENCHMARKS), path.name

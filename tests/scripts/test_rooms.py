"""Each script has its room, and each benchmark is registered."""

from __future__ import annotations

import ast
import graphlib
import sys
from pathlib import Path

import pytest
from launching import ROOT

sys.path.insert(0, str(ROOT / "scripts"))
from bench.registry import BENCHMARKS, FOLDER, claim

SCRIPTS = ROOT / "scripts"
# Commands that users type are the only files outside of rooms
COMMANDS = {"cluster", "check_cuda", "gpu_day"}
README = (SCRIPTS / "README.md").read_text()
FILES = {path.stem for path in FOLDER.glob("*.py")}


def test_only_commands_stand_outside_of_rooms() -> None:
    assert {path.name for path in SCRIPTS.iterdir() if path.is_file()} == {*COMMANDS, "README.md"}
    rooms = {path.name for path in SCRIPTS.iterdir() if path.is_dir()} - {"__pycache__"}
    for name in {f"{room}/" for room in rooms} | COMMANDS:
        assert f"`{name}`" in README, name


@pytest.mark.parametrize("room", sorted({path.parent for path in SCRIPTS.rglob("*.py")}), ids=str)
def test_no_two_files_of_a_room_import_each_other(room: Path) -> None:
    files = {path.stem: path for path in room.glob("*.py")}
    imports: dict[str, set[str]] = {name: set() for name in files}
    for name, path in files.items():
        for node in ast.walk(ast.parse(path.read_text())):
            words = [one.name for one in node.names] if isinstance(node, ast.Import) else []
            words += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            imports[name] |= {word.rpartition(".")[2] for word in words} & files.keys() - {name}
    assert len(list(graphlib.TopologicalSorter(imports).static_order())) == len(files)


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

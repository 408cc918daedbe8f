"""The floors of the house: a module imports only from floors below, and foreign libraries have one
door each.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parent.parent / "tfcommx"

FLOORS = {
    "terms": 0,
    "cost": 0,
    "reference": 0,
    "reference_augment": 0,
    "sources": 0,
    "watcher": 0,
    "native": 1,
    "comm": 1,
    "links": 1,
    "watch": 1,
    "launch": 2,
    "threads": 2,
    "selection": 2,
    "wire": 2,
    "residual": 2,
    "data": 2,
    "exchange": 3,
    "schedule": 4,
    "optim": 5,
    "models": 6,
    "recipe": 6,
    "train": 6,
    "report": 6,
    "cli": 6,
    "cache_command": 6,
}
# The nouns stand on floor 0 with the prices and the specification, which are made of them.
GROUND = {"terms"}
# Floor 6 is one room: the command line calls training, training reads recipes and writes reports.
ONE_ROOM = {6}
NO_TENSORFLOW = {
    "terms",
    "cost",
    "sources",
    "watch",
    "watcher",
    "schedule.merge",
    "schedule.planner",
    "exchange",
    "selection",
}
DOORS = {"horovod": {"comm"}, "mpi4py": {"links"}}
MAY_READ_ENVIRONMENT = {"cli", "native", "comm", "links"}


def modules() -> dict[str, Path]:
    names = {
        ".".join(path.relative_to(PACKAGE).with_suffix("").parts): path
        for path in PACKAGE.rglob("*.py")
    }
    return {
        name.removesuffix(".__init__"): path for name, path in names.items() if name != "__init__"
    }


def imports(path: Path) -> set[str]:
    """Every dotted name that a file imports, at any depth of it."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            found |= {f"{node.module}.{alias.name}" for alias in node.names} | {node.module or ""}
    return found


def test_every_module_has_a_floor() -> None:
    assert {name.split(".")[0] for name in modules()} <= set(FLOORS)


@pytest.mark.parametrize("name", modules())
def test_imports_only_from_floors_below(name: str) -> None:
    room = name.split(".")[0]
    for imported in imports(modules()[name]):
        if not imported.startswith("tfcommx."):
            continue
        other = imported.split(".")[1]
        if (
            other == room
            or other not in FLOORS
            or other in GROUND
            or (FLOORS[room] in ONE_ROOM and FLOORS[other] in ONE_ROOM)
        ):
            continue
        assert FLOORS[other] < FLOORS[room], (
            f"{name} (floor {FLOORS[room]}) imports {other} (floor {FLOORS[other]})"
        )


@pytest.mark.parametrize("name", modules())
def test_foreign_libraries_have_one_door(name: str) -> None:
    names = {imported.split(".")[0] for imported in imports(modules()[name])}
    for library, doors in DOORS.items():
        assert library not in names or name in doors, (
            f"{name} imports {library}; its door is {doors}"
        )
    if name in NO_TENSORFLOW:
        assert not names & {"tensorflow", "keras"}, f"{name} must not need TensorFlow"


def test_native_library_has_one_door() -> None:
    assert [name for name, path in modules().items() if "load_op_library" in path.read_text()] == [
        "native"
    ]


@pytest.mark.parametrize("name", modules())
def test_environment_is_read_at_the_doors_only(name: str) -> None:
    reads = [
        node.attr
        for node in ast.walk(ast.parse(modules()[name].read_text()))
        if isinstance(node, ast.Attribute) and node.attr in ("environ", "getenv")
    ]
    assert not reads or name in MAY_READ_ENVIRONMENT


def test_kernels_know_no_framework() -> None:
    kernels = list((PACKAGE.parent / "ops" / "kernels").iterdir())
    assert kernels
    for path in kernels:
        code = re.sub(r"//.*", "", path.read_text())
        assert "tensorflow" not in code.lower(), f"{path.name} needs a framework"


def test_planning_loads_no_tensorflow() -> None:
    import subprocess
    import sys

    code = (
        "import sys, tfcommx; from tfcommx.schedule import planner; tfcommx.Scheme(); "
        "sys.exit('tensorflow' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=PACKAGE.parent).returncode == 0

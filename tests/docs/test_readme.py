"""The commands and the code of the README and of docs/ run and have the results shown."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tomllib
from documents import DOCUMENTS, TUTORIAL, python_blocks
from drawing import case, extended
from launching import ROOT, horovodrun

README = DOCUMENTS["README.md"]


def blocks(name: str, *, run: bool) -> list[tuple[str, str]]:
    """Return (name, code) of a document's Python blocks that are to be run, or that are not."""
    return [
        (f"{name} block {number}", code)
        for number, (comment, code) in enumerate(python_blocks(name), start=1)
        if comment.startswith("not run: ") != run
    ]


def save_photos(folder: Path) -> None:
    """Write 160 pictures in two class folders."""
    random = np.random.default_rng(0)
    for number in range(160):
        path = folder / f"class{number % 2}" / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        keras.utils.save_img(path, random.integers(0, 256, (12, 16, 3)), scale=False)


@pytest.mark.long_wait
@pytest.mark.parametrize("how", [extended("eagerly"), case("traced", kept=False)])
def test_the_code_of_all_documents_trains_on_two_ranks(how: str, tmp_path: Path) -> None:
    """One launch for all blocks; each has a model and data put in its place."""
    todo = [
        (name, code.replace("loss=...", "loss='mse'"))
        for document in DOCUMENTS
        # test_tutorial.py runs the tutorial, and the test below the README's block
        if document not in (TUTORIAL, "README.md")
        for name, code in blocks(document, run=True)
    ]
    assert len(todo) >= 7
    save_photos(tmp_path / "photos" / "train")
    file = tmp_path / "blocks.json"
    file.write_text(json.dumps(todo))
    worker = str(ROOT / "tests" / "workers" / "run_blocks.py")
    ended = horovodrun(2, [worker, str(file), how], seconds=300)
    assert ended.status == 0, ended.output[-6000:]
    for name, _ in todo:
        assert ended.output.count(f"{name}: sent True") == 2, (name, ended.output[-6000:])


@pytest.mark.long_wait
def test_the_ten_lines_are_a_whole_script(tmp_path: Path) -> None:
    """README's block alone, in the order of a user's script: model and data come after init()."""
    ((_, block),) = blocks("README.md", run=True)
    before, after = block.split("model.compile")
    code = (
        before
        + "import sys; sys.path.insert(0, 'tests/workers'); from run_blocks import namespace\n"
        "model, data = (namespace(False)[name] for name in ('model', 'data'))\n"
        "model.compile"
        + after.replace("loss=...", "loss='mse'")
        + "\nprint('sent', cx.collectives.current().traffic().inside > 0)\n"
    )
    script = tmp_path / "train.py"
    script.write_text(code)
    ended = horovodrun(2, [str(script)], seconds=120)
    assert ended.status == 0 and ended.output.count("sent True") == 2, ended.output[-4000:]


@pytest.mark.parametrize("document", DOCUMENTS)
def test_blocks_that_are_not_run_are_python(document: str) -> None:
    for _, code in blocks(document, run=False):
        ast.parse(code)


@pytest.mark.parametrize("document", ["README.md", "docs/how-to/choose-a-scheme.md"])
def test_every_scheme_in_the_table_can_be_made(document: str) -> None:
    from tfcommx import Scheme

    schemes = re.findall(r"^\| `(Scheme\([^`]*\))`", DOCUMENTS[document], re.M)
    assert len(schemes) >= 4
    for text in schemes:
        eval(text, {"Scheme": Scheme})


@pytest.mark.parametrize("target", ["demo", "test", "setup", "docs"])
def test_make_targets_exist(target: str) -> None:
    assert (
        f"make {target}"
        in README + DOCUMENTS["docs/how-to/test.md"] + DOCUMENTS["docs/how-to/install.md"]
    )
    assert subprocess.run(["make", "-n", target], cwd=ROOT, capture_output=True).returncode == 0


@pytest.mark.parametrize("document", DOCUMENTS)
def test_the_files_that_it_names_exist(document: str) -> None:
    for name in re.findall(r"`((?:configs|scripts|tests|ops|docs)/[\w./]*)`", DOCUMENTS[document]):
        path = ROOT / name
        assert path.parent.is_dir() if "NAME" in name else path.exists(), name


def test_the_readme_is_short() -> None:
    assert README.count("\n") <= 90


def test_the_layers_that_are_explained_are_those_that_are_checked() -> None:
    """A package that is missing from the table, or in another layer there, is an error."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    layers = project["tool"]["importlinter"]["contracts"][0]["layers"]
    page = (ROOT / "docs" / "explanation" / "how-it-works.md").read_text()
    rows = re.findall(r"^\| (\d+) \| `(\w+)(?:/|\.py)?`", page, re.M)
    checked = {(level, name) for level, row in enumerate(layers[::-1]) for name in row.split(" | ")}
    assert checked == {(int(level), name) for level, name in rows}


def test_the_functions_that_the_page_for_readers_names_exist() -> None:
    page = (ROOT / "docs" / "explanation" / "read-the-code.md").read_text()
    rows = re.findall(r"^\| \d \| `([\w/.]+)` \| `([\w.]+)`", page, re.M)
    assert len(rows) == 8
    for file, function in rows:
        names: Any = ast.parse((ROOT / file).read_text())
        for name in function.split("."):
            names = next(part for part in names.body if getattr(part, "name", "") == name)


def test_the_command_line_answers_without_tensorflow() -> None:
    code = "import sys, tfcommx.cli.main; sys.exit('tensorflow' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0


def test_the_set_up_does_nothing_the_second_time() -> None:
    """`python3 scripts/setup` in an environment that is ready says so within seconds."""
    ended = subprocess.run(
        [sys.executable, "scripts/setup"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "ready in" in ended.stdout and " ..." not in ended.stdout

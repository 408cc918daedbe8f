"""The README's commands and code do what it says."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from launching import ROOT, horovodrun

README = (ROOT / "README.md").read_text()


def test_the_ten_lines_train(tmp_path: Path) -> None:
    """The Python block, with a model, data and loss put in its place, on two ranks."""
    (block,) = re.findall(r"```python\n(.*?)```", README, re.S)
    before, after = block.split("model.compile")
    code = (
        before + "import numpy as np\n"
        "model = keras.Sequential([keras.layers.Input((8,)), keras.layers.Dense(300), "
        "keras.layers.Dense(300), keras.layers.Dense(1)])\n"
        "x = np.random.default_rng(cx.rank()).normal(size=(64, 8)); data = "
        "__import__('tensorflow').data.Dataset.from_tensor_slices("
        "(x, x.sum(1))).batch(16)\n"
        "model.compile"
        + after.replace("loss=...", "loss='mse'")
        + "\nprint('sent', cx.comm.current().traffic().inside > 0)\n"
    )
    script = tmp_path / "train.py"
    script.write_text(code)
    ended = horovodrun(2, [str(script)], seconds=120)
    assert ended.status == 0 and ended.output.count("sent True") == 2, ended.output[-4000:]


def test_every_scheme_in_the_table_can_be_made() -> None:
    from tfcommx import Scheme

    schemes = re.findall(r"^\| `(Scheme\([^`]*\))`", README, re.M)
    assert len(schemes) >= 4
    for text in schemes:
        eval(text, {"Scheme": Scheme})


@pytest.mark.parametrize("target", ["demo", "test", "setup"])
def test_make_targets_exist(target: str) -> None:
    assert f"make {target}" in README
    assert subprocess.run(["make", "-n", target], cwd=ROOT, capture_output=True).returncode == 0


def test_the_files_that_it_names_exist() -> None:
    for name in re.findall(r"`((?:configs|scripts|tests|ops|docs)/[\w./]*)`", README):
        assert (ROOT / name).exists(), name


def test_the_command_line_answers_without_tensorflow() -> None:
    code = "import sys, tfcommx.cli; sys.exit('tensorflow' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0


def test_the_set_up_does_nothing_the_second_time(tmp_path: Path) -> None:
    """`python3 scripts/bootstrap.py` in an environment that is ready says so within seconds."""
    ended = subprocess.run(
        [sys.executable, "scripts/bootstrap.py"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "ready in" in ended.stdout and " ..." not in ended.stdout

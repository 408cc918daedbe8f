"""The tutorial as its reader meets it: alone, on several ranks, killed and resumed."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import warm_ranks
from documents import TUTORIAL, python_blocks
from launching import QUICK, WORKERS

BLOCKS = python_blocks(TUTORIAL)
ALONE, TRAIN = (
    next(code for comment, code in BLOCKS if comment == f"file: {name}")
    for name in ("alone.py", "train.py")
)
# The blocks behind train.py continue where it ends
ALL = "\n".join(code for comment, code in BLOCKS if comment != "file: alone.py")


def start(folder: Path, code: str, ranks: int) -> subprocess.Popen[str]:
    script = folder / "train.py"
    script.write_text(code)
    launch = [str(WORKERS / "launcher.py"), "-np", str(ranks), "-H", f"localhost:{ranks}", "--gloo"]
    return subprocess.Popen(
        [sys.executable, *(launch if ranks > 1 else []), *[sys.executable] * (ranks > 1), script],
        cwd=folder,
        env={
            **os.environ,
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "PYTHONPATH": QUICK,
            **warm_ranks.environment(alone=ranks == 1),
        },
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )


def shorter(code: str, epochs: int) -> str:
    """Train on half of the tutorial's pictures, and for fewer than its six epochs."""
    for theirs, ours in (
        ("EPOCHS, BATCH = 6,", f"EPOCHS, BATCH = {epochs},"),
        ("24_000", "12_000"),
        ("20_000", "10_000"),
    ):
        assert theirs in code, theirs
        code = code.replace(theirs, ours)
    return code


def accuracy(output: str) -> float:
    return float(re.findall(r"'accuracy': ([\d.]+)", output)[-1])


@pytest.mark.extended
@pytest.mark.long_wait
def test_the_script_that_trains_alone(tmp_path: Path) -> None:
    """Two of its six epochs, of half as many steps."""
    process = start(tmp_path, shorter(ALONE, 2), 1)
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 0, output
    assert output.count("157/157") == 2 and accuracy(output) > 0.9, output


@pytest.mark.long_wait
def test_the_script_on_two_ranks_is_killed_and_resumes(tmp_path: Path) -> None:
    """Two launches, as in the tutorial; the second runs the other blocks as well.

    It trains for three epochs in place of six.
    """
    killed = start(tmp_path, shorter(TRAIN, 3), 2)
    seen = []
    for line in killed.stdout:
        seen.append(line)
        if "Epoch 2/3" in line:
            os.killpg(killed.pid, signal.SIGINT)
    # Not by its status: on a busy machine horovodrun ends with 0 after it has stopped the ranks
    killed.wait(timeout=60)
    assert any("Epoch 2/3" in line for line in seen)
    assert not any("Epoch 3/3" in line for line in seen), "".join(seen)
    resumed = start(tmp_path, shorter(ALL, 3), 2)
    output, _ = resumed.communicate(timeout=240)
    assert resumed.returncode == 0, output
    epochs = re.findall(r"Epoch (\d)/3", output)
    assert epochs in (["2", "3"], ["3"]), output
    assert accuracy(output) > 0.9, output
    # 2 (p - 1) / p of the gradients a step, from one process to the other
    assert re.search(r"'bytes_between_nodes': [1-9]", output), output

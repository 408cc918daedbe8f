"""Trainings that save into files only, under the supervisor, continue when a rank is killed."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import warm_ranks
from launching import QUICK, ROOT, WORKERS

pytestmark = pytest.mark.long_wait
TFCOMMX = (sys.executable, "-m", "tfcommx.cli.main")


def start(*words: str, **environment: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*TFCOMMX, *words],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": QUICK, **warm_ranks.environment(), **environment},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


# test_supervised_recipes.py continues from a file, and test_supervised_training.py two ranks
@pytest.mark.exhaustive
def test_a_script_goes_on_from_its_last_file(tmp_path: Path) -> None:
    script = str(WORKERS / "elastic_train.py")
    options = ("-np", "2", "--min-np", "2", "--reset-limit", "1")
    process = start("run", *options, "--", "python", script, str(tmp_path / "run"), "kill")
    out, errors = process.communicate(timeout=180)
    assert process.returncode == 0, errors
    assert "rank 0 begins with epoch 3" in out, out
    assert "tfcommx: Rank 1 on localhost was killed by SIGKILL" in errors
    assert "tfcommx: Generation 1 starts on 2 ranks: localhost:2." in errors
    ended = re.findall(r"rank \d ends after epoch (\d+) with weights (\w+)", out)
    assert len(ended) == 2 and len(set(ended)) == 1 and ended[0][0] == "6", out


@pytest.mark.exhaustive
def test_a_recipe_goes_on_and_stops_on_a_signal(tmp_path: Path) -> None:
    """A rank of `tfcommx train` is killed; later SIGINT makes all ranks save and end."""
    table = tmp_path / "generations.json"
    words = ("tests/workers/paced.yaml", "--output", str(tmp_path / "run"), "-np", "2")
    elastic = ("--min-np", "2", "--generations", str(table))
    process = start(
        "train", *words, *elastic, PYTHONPATH=f"{QUICK}:{WORKERS}", PACED_SECONDS="0.05"
    )

    def ranks() -> list[psutil.Process]:
        below = psutil.Process(process.pid).children(recursive=True)
        return [one for one in below if "HOROVOD_RANK" in one.environ() and is_rank(one)]

    def is_rank(one: psutil.Process) -> bool:
        return one.cmdline()[1:4] == ["-m", "tfcommx", "train"]

    def wait_for(path: Path, since: float) -> None:
        end = time.monotonic() + 120
        while not (path.exists() and path.stat().st_mtime > since):
            assert time.monotonic() < end and process.poll() is None
            time.sleep(0.2)

    saved = tmp_path / "run" / "checkpoint" / "checkpoint.json"
    wait_for(saved, 0.0)
    ranks()[1].kill()
    killed = time.time()
    wait_for(saved, killed + 3)
    process.send_signal(signal.SIGINT)
    out, errors = process.communicate(timeout=120)
    assert process.returncode == 128 + signal.SIGINT, errors
    assert "Stopped by the file" in out and "was killed by SIGKILL" in errors
    before, after = json.loads(table.read_text())["generations"]
    assert (before["resumed"]["source"], after["resumed"]["source"]) == ("start", "file")

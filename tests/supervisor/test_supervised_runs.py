"""`tfcommx run` with a supervisor on real processes, which need no TensorFlow."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import psutil
import pytest
from drawing import case, extended
from launching import QUICK, ROOT, WORKERS
from typer.testing import CliRunner

from tfcommx.cli.main import app
from tfcommx.core import ConfigurationError
from tfcommx.supervisor.sweep import MEMORY

RANK = str(WORKERS / "elastic_rank.py")

# Leaves a process behind, and one that shall outlive the generation; the second time it looks
LEAVES_BEHIND = """\
import os, pathlib, subprocess, sys

def alive(pid):  # Not if it waits for init to look at its exit status
    stat = pathlib.Path(f"/proc/{pid}/stat")
    return stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z"

folder, own = pathlib.Path(sys.argv[1]), dict(os.environ)
keeper = {name: own[name] for name in own if name != "TFCOMMX_GENERATION"}
memory = pathlib.Path(f"/dev/shm/tfcommx-{os.getuid()}-{own['TFCOMMX_RUN']}-test")
if own["TFCOMMX_GENERATION"] == "0":
    memory.mkdir()
    (memory / "snapshot").write_text("x")
    quiet = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.DEVNULL)
    for env in (own, keeper):
        left = subprocess.Popen(["sleep", "600"], env=env, start_new_session=True, **quiet)
        with (folder / "pids").open("a") as file:
            print(left.pid, file=file)
    os._exit(3)
pids = map(int, (folder / "pids").read_text().split())
print([alive(pid) for pid in pids], memory.exists())
"""


class Run(NamedTuple):
    """A supervised run of elastic_rank.py in a separate folder."""

    folder: Path

    def start(self, *words: str, steps: int = 30, faults: tuple[str, ...] = ()):
        options = [*words, "--generations", str(self.file)]
        command = ["python", RANK, str(self.folder), str(steps), *faults]
        return subprocess.Popen(
            [sys.executable, "-m", "tfcommx.cli.main", "run", *options, "--", *command],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": QUICK},
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )

    def ended(self, *words: str, **how) -> tuple[int, str, str]:
        process = self.start(*words, **how)
        out, errors = process.communicate(timeout=240)
        return process.returncode, out, errors

    @property
    def file(self) -> Path:
        return self.folder / "generations.json"

    def generations(self) -> list[dict]:
        return json.loads(self.file.read_text())["generations"]

    def wait_for_ranks(self, process: subprocess.Popen[str], ranks: int) -> None:
        """Wait until so many ranks have been started, in all generations together."""
        pids = self.folder / "pids"
        while process.poll() is None and not (
            pids.exists() and pids.read_text().count("\n") >= ranks
        ):
            time.sleep(0.1)

    def left(self) -> list[int]:
        """Return the ranks that live after some seconds: none, if all is well."""
        pids = [int(line) for line in (self.folder / "pids").read_text().splitlines()]
        deadline = time.monotonic() + 60
        while (left := list(filter(lives, pids))) and time.monotonic() < deadline:
            time.sleep(0.1)
        return left


def lives(pid: int) -> bool:
    """Return True if a process exists, and not only its exit status, which init may read late."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    return False


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    run = Run(tmp_path)
    yield run
    if (tmp_path / "pids").exists():
        assert not run.left()


@pytest.mark.parametrize(
    "launcher", ["--gloo", pytest.param("--mpi", marks=pytest.mark.exhaustive)]
)
def test_a_killed_rank_starts_the_next_generation(run: Run, launcher: str) -> None:
    """From the file that the ranks have saved; the table is printed at the end."""
    options = ("-np", "2", launcher, "--reset-limit", "3")
    status, out, errors = run.ended(*options, faults=("0:1:15:SIGKILL",))
    assert status == 0, errors
    assert "rank 0 has taken 30 steps" in out
    first, second = run.generations()
    assert first["how"] == "Rank 1 on localhost was killed by SIGKILL"
    assert second["resumed"]["source"] == "file" and second["resumed"]["total"] == 10
    assert second["steps"] == 30 and second["how"] == "finished"
    lost, started, resumed, header, *_, goodput = errors.splitlines()
    assert lost.startswith("tfcommx: Rank 1 on localhost was killed by SIGKILL, at step 15.")
    assert started == "tfcommx: Generation 1 starts on 2 ranks: localhost:2."
    assert resumed.startswith("tfcommx: Generation 1 continues from the file of step 10; 5 st")
    assert "steps are repeated. Its first step came " in resumed
    assert header.startswith("generation  ranks") and "steps count" in goodput


@pytest.mark.parametrize("link, where", [("", "at step 12"), extended("nolink", "within 60 s")])
def test_a_program_that_fails_by_itself_is_given_up(run: Run, link: str, where: str) -> None:
    faults = ("*:1:12:exit3", *[link] * bool(link))
    status, _, errors = run.ended("-np", "2", "--min-np", "1", faults=faults)
    assert status == 3 and len(run.generations()) == 3, errors
    assert "Rank 1 on localhost ended with status 3; all others were ended. 3 gener" in errors
    assert f"3 generations have ended {where}" in errors


def test_the_reset_limit_ends_a_run(run: Run) -> None:
    status, _, errors = run.ended("-np", "2", "--reset-limit", "0", faults=("0:1:5:SIGKILL",))
    assert status == 137 and "--reset-limit 0 is reached." in errors


def test_an_error_that_the_user_can_fix_ends_a_run_at_once(run: Run) -> None:
    status, _, errors = run.ended("-np", "2", "--min-np", "1", faults=("0:1:5:exit2",))
    assert status == 2 and len(run.generations()) == 1, errors


@pytest.mark.extended
def test_hosts_that_discovery_adds_join_when_it_pays(run: Run) -> None:
    """The second name of this host appears while the first generation runs."""
    hosts = run.folder / "hosts"
    hosts.write_text("localhost\n")
    script = ("--host-discovery-script", f"cat {hosts}", "--slots", "1", "--min-np", "1")
    process = run.start(*script, steps=200)
    run.wait_for_ranks(process, 1)
    hosts.write_text("localhost\n127.0.0.1\n")
    _, errors = process.communicate(timeout=240)
    assert process.returncode == 0, errors
    one, two = run.generations()
    assert (one["ranks"], two["ranks"]) == (1, 2) and two["steps"] == 200
    assert "2 ranks can run in place of 1, on localhost:1,127.0.0.1:1. A restart" in errors
    assert "tfcommx: All ranks have saved and paused, at step " in errors


@pytest.mark.extended
def test_a_host_that_leaves_is_left_out(run: Run) -> None:
    status, _, errors = run.ended(
        *("-H", "localhost:1,127.0.0.1:1", "--min-np", "1"),
        faults=("0:0:10:leaving 127.0.0.1",),
    )
    assert status == 0, errors
    assert [one["ranks"] for one in run.generations()] == [2, 1]
    assert "tfcommx: 127.0.0.1 leaves (SIGTERM), at step " in errors


@pytest.mark.parametrize("number", [case(signal.SIGINT, kept=False), signal.SIGTERM])
def test_a_signal_ends_all_ranks(run: Run, number: signal.Signals) -> None:
    process = run.start("-np", "2", "--min-np", "1", steps=1000)
    run.wait_for_ranks(process, 2)
    process.send_signal(number)
    _, errors = process.communicate(timeout=240)
    assert process.returncode == 128 + number and "Traceback" not in errors


@pytest.mark.extended
def test_too_few_hosts_end_a_run_with_the_first_failure_s_status(run: Run) -> None:
    hosts = run.folder / "hosts"
    hosts.write_text("localhost:2\n")
    process = run.start(
        *("--host-discovery-script", f"cat {hosts}", "--min-np", "2", "--elastic-timeout", "2"),
        faults=("0:1:30:SIGKILL",),
        steps=60,
    )
    run.wait_for_ranks(process, 2)
    hosts.write_text("localhost:1\n")
    _, errors = process.communicate(timeout=240)
    assert process.returncode == 137, errors
    assert "2 ranks are required. The hosts have 1 slot (localhost:1). Waiting" in errors
    assert "2 ranks are required. cat " in errors and "within 2 s." in errors


@pytest.mark.extended
def test_processes_and_memory_files_of_the_run_are_gone_at_the_end(run: Run) -> None:
    """Also a process that a rank has started and left behind, and a keeper of its memory."""
    script = run.folder / "leave.py"
    script.write_text(LEAVES_BEHIND)
    command = ("-np", "1", "--min-np", "1", "--", "python", str(script), str(run.folder))
    done = subprocess.run(
        [sys.executable, "-m", "tfcommx.cli.main", "run", *command],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": QUICK},
        text=True,
        capture_output=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "[False, True] True\n"
    assert not run.left()
    assert not list(MEMORY.glob(f"tfcommx-{os.getuid()}-*-test"))


def test_what_cannot_be_is_refused_before_anything_starts() -> None:
    cases = {
        ("--slots", "2", "-np", "2"): "--slots.*--host-discovery-script",
        ("--host-discovery-script", "cat x", "-H", "a:1"): "--host-discovery-script.*-H",
        ("--min-np", "4", "--max-np", "2", "-H", "a:4"): "--max-np 2.*--min-np 4",
        ("--min-np", "4", "-H", "a:2"): "-np 4.*2",
        ("--host-discovery-script", "exit 3"): "`exit 3`",
    }
    for words, received in cases.items():
        refused = CliRunner().invoke(app, ["run", *words, "--", "true"]).exception
        assert isinstance(refused, ConfigurationError), refused
        assert re.search(received, str(refused)), refused

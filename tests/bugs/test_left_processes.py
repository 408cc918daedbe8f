"""Past bugs with processes that outlive their parent, and with the output of ranks."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from drawing import case
from launching import QUICK, ROOT

from tfcommx.cli import doctor, doctor_host
from tfcommx.core import ConfigurationError
from tfcommx.kernels import build
from tfcommx.launch import commands
from tfcommx.launch.commands import run_to_end
from tfcommx.launch.horovodrun import RANK_OUTPUT, on_end_signals
from tfcommx.launch.hosts import Host
from tfcommx.launch.rank_output import KILLED
from tfcommx.recipes.datasets import debian
from tfcommx.supervisor import hosts

TFCOMMX = (sys.executable, "-m", "tfcommx.cli.main")
# Such as a server of TensorBoard: it holds the output open, and writes its number to a file
LEAVES = "import subprocess; print(subprocess.Popen(['sleep', '300']).pid, file=open({!r}, 'a'))"
# Longer than anything here takes, and shorter than `sleep 300`
SECONDS = 60.0


@pytest.fixture
def pids(tmp_path: Path) -> Iterator[Path]:
    """A file for the numbers of the processes that are left; they are killed after the test."""
    file = tmp_path / "pids"
    yield file
    for pid in file.read_text().split() if file.exists() else ():
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(pid), signal.SIGKILL)


def alive(pid: str) -> bool:
    try:
        return psutil.Process(int(pid)).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def wait_for_end(numbers: str) -> None:
    deadline = time.monotonic() + 20
    while any(map(alive, numbers.split())):
        assert time.monotonic() < deadline, f"{numbers} live"
        time.sleep(0.05)


# --- ranks ----------------------------------------------------------------------------------------


def run(
    folder: Path, program: str, *options: str, **environment: str
) -> subprocess.CompletedProcess[bytes]:
    script = folder / "script.py"
    script.write_text(program, encoding="utf-8")
    return subprocess.run(
        [*TFCOMMX, "run", "-np", "2", *options, "--", "python", str(script)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": QUICK, **environment},
        capture_output=True,
        timeout=SECONDS,
    )


@pytest.mark.parametrize(
    ("launcher", "status"),
    [
        case(launcher, status, kept=(launcher == "--mpi") == (status == 0))
        for launcher in ("--gloo", "--mpi")
        for status in (0, 3)
    ],
)
def test_a_process_that_a_rank_leaves_is_not_waited_for(
    launcher: str, status: int, tmp_path: Path, pids: Path
) -> None:
    """A rank had started a server, and `tfcommx run` never ended.

    horovodrun and mpirun wait for the end of a rank's pipe, which the server had open. A rank that
    failed so was not noticed at all.
    """
    program = f"{LEAVES.format(str(pids))}\nprint('trained')\nraise SystemExit({status})"
    ended = run(tmp_path, program, launcher)
    assert ended.returncode == status, ended.stderr
    assert status or ended.stdout.count(b"trained") == 2
    assert all(map(alive, pids.read_text().split()))  # It is the user's own


ANY_BYTES = """
import os
os.write(1, "zwölf\\n".encode())
os.write(1, b"\\xff\\n" * 40_000)
os.write(2, "größer\\n".encode())
os.write(1, b"end\\n")
"""


@pytest.mark.parametrize(
    ("encoding", "shown"),
    [("ascii", rb"zw\xf6lf"), case("utf-8", "zwölf".encode(), kept=False)],
)
def test_output_goes_on_after_a_character_that_cannot_be_written(
    encoding: str, shown: bytes, tmp_path: Path
) -> None:
    """A line with an umlaut in an ASCII locale ended all later output, with status 0.

    horovodrun's thread ended as well, at the first byte that is no UTF-8; the rank then waited for
    a place in its pipe.
    """
    locale = {"PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "PYTHONIOENCODING": encoding}
    ended = run(tmp_path, ANY_BYTES, **locale)
    assert ended.returncode == 0 and ended.stdout.count(b"end\n") == 2, ended.stderr[-2000:]
    assert ended.stdout.count(shown) == 2 and ended.stdout.count(b"\n") == 2 * 40_002
    assert ended.stderr.count(b"gr") == 1


def test_ranks_end_when_no_process_reads_their_output(tmp_path: Path) -> None:
    """`tfcommx run ... | head` ended with a traceback of horovodrun's."""
    script = tmp_path / "script.py"
    script.write_text("while True: print('y' * 100, flush=True)")
    process = subprocess.Popen(
        [*TFCOMMX, "run", "-np", "2", "--", "python", str(script)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": QUICK, "PYTHONUNBUFFERED": ""},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdout and process.stderr and process.stdout.readline()
    process.stdout.close()
    errors = process.stderr.read().decode()
    assert process.wait(SECONDS) == 128 + signal.SIGPIPE
    assert errors.startswith("tfcommx: The output must be read") and errors.count("\n") == 1


def relayed(*command: str, **options: object) -> subprocess.Popen[bytes]:
    words = [sys.executable, "-I", "-S", RANK_OUTPUT, *command]
    return subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **options)


def test_a_rank_ends_with_the_process_before_it_and_that_ends_as_the_rank_does() -> None:
    for number in (signal.SIGKILL, signal.SIGSEGV):
        relay = relayed("sh", "-c", f"kill -{int(number)} $$")
        # For `RankLines`, which does not show it
        killed = KILLED.fullmatch(relay.communicate(timeout=20)[1].decode())
        assert killed and int(killed[1]) == number and relay.returncode == -number
    for command, status in (("/no/such/program", 127), ("/etc/passwd", 126)):
        relay = relayed(command)
        said = relay.communicate(timeout=20)[1]
        assert relay.returncode == status and said.startswith(b"tfcommx: A command that can be run")
    relay = relayed("sh", "-c", "echo $$; exec sleep 300")
    assert relay.stdout
    rank = relay.stdout.readline().decode()
    relay.kill()
    relay.communicate(timeout=20)
    wait_for_end(rank)


def test_a_rank_gets_each_signal_once() -> None:
    """A training that gets SIGTERM saves; a second one ends it at once."""
    # Not by print: a handler must not print while its process does
    rank = "import os, signal, time; signal.signal(15, lambda *_: os.write(1, b'asked\\n'))\n"
    rank += "os.write(1, b'ready\\n')\nwhile True: time.sleep(0.1)"
    relay = relayed(sys.executable, "-c", rank, start_new_session=True)
    assert relay.stdout and relay.stdout.readline() == b"ready\n"
    os.killpg(relay.pid, signal.SIGTERM)
    assert relay.stdout.readline() == b"asked\n"
    time.sleep(0.5)
    relay.kill()
    assert relay.communicate(timeout=20)[0] == b""


@pytest.mark.parametrize("command", ["printf last", "printf last; sleep 300 & echo $! > FILE"])
def test_the_last_line_of_a_rank_is_ended(command: str, pids: Path) -> None:
    """The launcher put the mark of the next rank into it: `last[1]<stdout>:first`."""
    relay = relayed("sh", "-c", command.replace("FILE", str(pids)))
    assert relay.communicate(timeout=20) == (b"last\n", b"") and relay.returncode == 0


def test_a_process_that_writes_without_end_is_not_waited_for(pids: Path) -> None:
    relay = relayed("sh", "-c", f"yes & echo $! > {pids}")
    relay.communicate(timeout=20)
    assert relay.returncode == 0


# --- short commands -------------------------------------------------------------------------------


def test_a_discovery_script_that_leaves_a_process_has_ended(pids: Path) -> None:
    """It was refused after 60 s, because its child kept the pipe of the hosts open."""
    script = f"sleep 300 & echo $! > {pids}; echo node1:4"
    assert hosts.hosts_of_script(script) == [Host("node1", 4)]


def test_a_script_that_takes_too_long_is_killed_with_its_children(
    pids: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the shell was killed. Its children survived, one more at each look for hosts."""
    monkeypatch.setattr(hosts, "SCRIPT_SECONDS", 1.0)
    script = f"sleep 300 & echo $! > {pids}; wait"
    with pytest.raises(ConfigurationError, match=r"\b1 s\b"):
        hosts.hosts_of_script(script)
    wait_for_end(pids.read_text())


def test_a_command_on_another_host_may_leave_a_process(pids: Path) -> None:
    """ssh leaves one itself, if its configuration keeps a connection for later commands."""
    command = ["sh", "-c", f"sleep 300 & echo $! > {pids}; echo well"]
    assert commands._output(command) == "well\n"


def test_trial_launches_queries_and_downloads_end(
    pids: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    leave = f"sleep 300 & echo $! >> {pids}; echo well"
    ended = doctor._run(["sh", "-c", leave], dict(os.environ))
    assert ended == commands.Ended(0, "well\n")
    assert debian.run(["sh", "-c", leave], tmp_path) == "well\n"
    query = tmp_path / "nvidia-smi"
    query.write_text(f"#!/bin/sh\n{leave.replace('well', '8.0, A100')}\n")
    query.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert doctor_host.present_gpus() == [("A100", 80)]
    query.write_text(f"#!/bin/sh\necho $$ >> {pids}; exec sleep 300\n")
    monkeypatch.setattr(build, "QUERY_SECONDS", 0.5)
    assert doctor_host.present_gpus() == []
    wait_for_end(pids.read_text().split()[-1])


def test_a_command_is_given_time_to_end_its_own(pids: Path) -> None:
    ended = run_to_end(
        "trap 'echo ended; exit 5' TERM; sleep 300 & echo $! > " + f"{pids}; wait", 1.0, grace=20.0
    )
    assert ended.late and ended.status == 5 and ended.output == "ended\n"
    wait_for_end(pids.read_text())


def test_a_warning_of_the_scheduler_does_not_kill_the_launcher() -> None:
    """SIGUSR1, as of `sbatch --signal`, ended it at once, and the ranks could not save."""
    seen: list[int] = []
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
    before = {number: signal.getsignal(number) for number in numbers}
    try:
        on_end_signals(lambda number, frame: seen.append(number))
        os.kill(os.getpid(), signal.SIGUSR1)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    assert seen == [signal.SIGUSR1]

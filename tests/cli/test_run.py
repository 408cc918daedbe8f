"""`tfcommx run` on real ranks: how they end, who is named, and that no process is left."""

from __future__ import annotations

import errno
import io
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from drawing import drawn
from launching import QUICK, ROOT
from typer.testing import CliRunner
from virtual_cluster import needs_cluster

import tfcommx.cli.run as run_module
from tfcommx.cli.main import app
from tfcommx.core import ConfigurationError, LaunchError
from tfcommx.launch import horovodrun
from tfcommx.launch.commands import reads_script_from_input
from tfcommx.launch.horovodrun import (
    RANK_OUTPUT,
    Launch,
    Running,
    environment,
    require_semaphores,
    require_small_environment,
)
from tfcommx.launch.hosts import Host
from tfcommx.launch.launcher import STARTED_VARIABLE
from tfcommx.launch.rank_output import RankLines
from tfcommx.watch.protocol import KILLED

TFCOMMX = (sys.executable, "-m", "tfcommx.cli.main")
# Every rank says its number and its process; rank 1 ends as the argument says
SCRIPT = """\
import os, sys, time
rank = os.environ.get("HOROVOD_RANK") or os.environ["OMPI_COMM_WORLD_RANK"]
print(f"rank {rank} is process {os.getpid()} on {os.uname().nodename}", flush=True)
how = sys.argv[1]
if how == "well":
    sys.exit(0)
if rank == "1" and how != "never":
    time.sleep(0.5)
    os.kill(os.getpid(), 9) if how == "killed" else sys.exit(int(how))
time.sleep(600)
"""


def start(*words: str, **environment: str) -> subprocess.Popen[str]:
    """Call tfcommx as a user does, but for `QUICK`."""
    return subprocess.Popen(
        [*TFCOMMX, *words],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": QUICK, **environment},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )


def run(*words: str, **environment: str) -> tuple[int, str, str]:
    process = start(*words, **environment)
    out, errors = process.communicate(timeout=120)
    return process.returncode, out, errors


def pids(out: str) -> list[int]:
    return [int(line.split("process ")[1].split()[0]) for line in out.splitlines()]


def wait_until_gone(numbers: list[int]) -> list[int]:
    """Return the processes that live after some seconds: none, if all is well."""
    deadline = time.monotonic() + 60
    while left := [number for number in numbers if psutil.pid_exists(number)]:
        if time.monotonic() > deadline:
            return left
        time.sleep(0.1)
    return []


@pytest.fixture
def script(tmp_path: Path) -> str:
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    return str(path)


@pytest.mark.parametrize(("how", "launcher"), drawn(["3", "killed"], ["--gloo", "--mpi"]))
def test_the_first_rank_that_fails_is_named_and_gives_the_status(
    script: str, launcher: str, how: str
) -> None:
    status, said = {
        "3": (3, "ended with status 3"),
        "killed": (137, "was killed by SIGKILL"),
    }[how]
    # The interface is not needed here; a supervised run may come down to this host
    options = (launcher, "--network-interfaces", "no0")
    found, out, errors = run("run", "-np", "2", *options, "python", script, how)
    assert found == status, errors
    assert errors == f"tfcommx: Rank 1 on localhost {said}; all others were ended.\n"
    assert not wait_until_gone(pids(out))


@pytest.mark.parametrize(
    "launcher, whole_group",
    [
        ("--gloo", True),
        ("--mpi", False),
        pytest.param("--gloo", False, marks=pytest.mark.exhaustive),
        pytest.param("--mpi", True, marks=pytest.mark.exhaustive),
    ],
)
def test_ctrl_c_ends_all_ranks(script: str, launcher: str, whole_group: bool) -> None:
    secret = {"WANDB_API_KEY": "hidden"}  # Every user can read command lines
    process = start("run", "-np", "2", launcher, "--", "python", script, "never", **secret)
    assert process.stdout and process.stderr
    lines = process.stdout.readline() + process.stdout.readline()
    children = psutil.Process(process.pid).children(recursive=True)
    assert not any("hidden" in word for child in children for word in child.cmdline())
    assert secret.items() <= psutil.Process(pids(lines)[0]).environ().items()
    below = [child.pid for child in children]
    assert len(pids(lines)) == 2
    if whole_group:
        os.killpg(process.pid, signal.SIGINT)
    else:
        process.send_signal(signal.SIGINT)
    assert process.wait(timeout=120) == 128 + signal.SIGINT
    assert not wait_until_gone([*pids(lines), *below])
    assert "Traceback" not in process.stderr.read()
    process.stdout.close(), process.stderr.close()


@pytest.mark.parametrize(
    "launcher", ["--gloo", pytest.param("--mpi", marks=pytest.mark.exhaustive)]
)
def test_a_script_that_does_not_exist_is_named(launcher: str) -> None:
    status, _, errors = run("run", "-np", "2", launcher, "--", "python", "no_such.py")
    assert status == 2 and errors.count("no_such.py") == 1, errors
    assert "on localhost ended with status 2" in errors


def test_what_can_be_refused_is_refused_before_anything_starts(tmp_path: Path) -> None:
    cases = {
        ("-np", "2", "--", "no_such_command"): (127, "no_such_command"),
        ("--", "python", "x.py"): (2, "-np"),
        ("-np", "5", "-H", "node1:2,node2:2", "--", "python"): (2, "-H node1:3,node2:3"),
        ("-H", "node1:0", "--", "python"): (2, "NAME:SLOTS"),
        ("--hostfile", str(tmp_path / "none"), "--", "python"): (2, str(tmp_path / "none")),
        ("--gloo", "--mpi", "-np", "2", "python"): (2, "--gloo"),
    }
    for words, (status, said) in cases.items():
        found, _, errors = run("run", *words)
        assert found == status and said in errors and "Traceback" not in errors, errors


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["python"], "standard input.*`python`"),
        (["python3", "-u", "-"], "standard input"),
        (["bash", "-es"], "standard input"),
        (["bash", "-euo", "pipefail"], "standard input"),
        (["bash", "--init-file", "setup.sh"], "standard input"),
        (["train.py"], "'train.py'. Write `python train.py`"),
    ],
)
def test_a_script_that_no_rank_would_read_is_refused(
    words: list[str], said: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """`tfcommx run -np 2 -- python - < train.py` ended with status 0, and had run nothing."""
    monkeypatch.chdir(tmp_path)
    Path("train.py").touch()
    ended = CliRunner().invoke(app, ["run", "-np", "2", "--", *words])
    assert re.search(said, str(ended.exception)), ended


def test_a_launch_in_each_task_of_a_step_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """`srun -n 4 tfcommx run -- python train.py` trained four times, into the same files."""
    for name, value in {"PROCID": "1", "STEP_NUM_TASKS": "4"}.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    monkeypatch.delenv(STARTED_VARIABLE, raising=False)
    ended = CliRunner().invoke(app, ["run", "-np", "2", "--", "true"])
    assert re.search("task 1 of the 4 of srun.*-H", str(ended.exception)), ended
    started = []
    monkeypatch.setattr(run_module, "carry_out", lambda *launch: started.append(launch))
    CliRunner().invoke(app, ["run", "-H", "localhost:2", "--", "true"])  # A training for each task
    monkeypatch.setenv(STARTED_VARIABLE, "x 1")  # In the program of a rank
    CliRunner().invoke(app, ["run", "-np", "2", "--", "true"])
    monkeypatch.delenv(STARTED_VARIABLE)
    monkeypatch.setenv("SLURM_PROCID", "0")  # `srun -n 4 --pty bash`
    CliRunner().invoke(app, ["run", "-np", "2", "--", "true"])
    assert len(started) == 3


def test_an_interface_that_this_host_lacks_is_refused_by_name() -> None:
    """It was a KeyError of horovodrun."""
    words = ["-H", "localhost:1,no-such-host.invalid:1", "--network-interfaces", "lo,no0", "true"]
    ended = CliRunner().invoke(app, ["run", *words])
    assert re.search("--network-interfaces.*'no0'.* lo", str(ended.exception)), ended


@pytest.mark.parametrize(
    "words",
    [
        "python x.py",
        "python -m x -",
        "python -c 1",
        "python -X dev x.py",
        "python -uW ignore x.py",
        "python -O x.py",  # Refused: of bash, -O has a value
        "bash -O extglob x.sh",
        "bash -euo pipefail x.sh",
        "bash --rcfile /dev/null x.sh",
        "sh -c ls",
    ],
)
def test_a_command_that_names_its_script_reads_no_input(words: str) -> None:
    assert not reads_script_from_input(words.split())


def test_an_environment_that_horovodrun_cannot_hand_on_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Linux refused the shell's command, and the rank ended with status 1 and no reason."""
    monkeypatch.setenv("BASH_MODULES", "x" * 70_000)
    monkeypatch.setenv("SERVICES", "'" * 20_000)  # Each becomes five bytes
    with pytest.raises(LaunchError, match=r"SERVICES \(1000\d\d\), BASH_MODULES \(700\d\d\)"):
        Running(Launch((Host("localhost", 2),), ("true",)))
    monkeypatch.delenv("SERVICES")
    require_small_environment(environment())


def test_a_host_without_shared_memory_is_refused_by_its_folder(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The error was "Read-only file system", without a word about which."""

    def refuse() -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    require_semaphores()
    monkeypatch.setattr(multiprocessing, "Lock", refuse)
    with pytest.raises(LaunchError, match=r"/dev/shm.*Read-only"):
        Running(Launch((Host("localhost", 1),), ("true",)))


def test_open_mpi_has_a_home(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without HOME, as in a system's service, it did not start: the error missed an MPI."""
    command = [sys.executable, "-c", "import os; os.environ['HOME']"]
    monkeypatch.setattr(Launch, "words", lambda self: command)
    monkeypatch.delenv("HOME", raising=False)
    assert Running(Launch((Host("localhost", 1),), ("true",), "mpi")).wait(RankLines()) == 0


def test_a_working_folder_that_was_deleted_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    with pytest.raises(LaunchError, match="deleted"):
        Launch((Host("localhost", 2),), ("true",)).words()


@pytest.mark.extended
def test_a_host_that_does_not_resolve_is_named_in_bounded_time() -> None:
    begun = time.monotonic()
    status, out, errors = run("run", "-H", "no-such-host:2", "--", "python", "x.py")
    assert status == 1 and out == "" and "Traceback" not in errors
    assert "No answer from no-such-host" in errors and "`ssh no-such-host true` must" in errors
    assert time.monotonic() - begun < 60


@pytest.mark.extended
@pytest.mark.parametrize(
    "launcher", ["--gloo", pytest.param("--mpi", marks=pytest.mark.exhaustive)]
)
def test_hosts_come_from_the_allocation_and_np_limits_them(
    script: str, tmp_path: Path, launcher: str
) -> None:
    """A job of LSF, in which Horovod looks for no network interface."""
    hostfile = tmp_path / "hosts"
    hostfile.write_text("localhost\nlocalhost\nlocalhost\n")
    job = {"LSB_JOBID": "7", "LSB_DJOB_HOSTFILE": str(hostfile)}
    status, out, errors = run("run", launcher, "-np", "2", "python", script, "well", **job)
    assert (status, len(pids(out))) == (0, 2), errors
    assert sorted(line.split(" is ")[0] for line in out.splitlines()) == [
        "rank 0",
        "rank 1: rank 1",
    ]


@pytest.mark.parametrize(
    "words", [["run", "-H", "", "true"], ["train", "configs/fashion_mnist.yaml", "-H", ""]]
)
def test_an_empty_list_of_hosts_is_refused(words: list[str], monkeypatch: Any) -> None:
    """`-H "$HOSTS"` without the variable trained in one process, or on the allocation's hosts."""
    monkeypatch.chdir(ROOT)
    ended = CliRunner().invoke(app, words)
    assert isinstance(ended.exception, ConfigurationError) and "Received ''" in str(ended.exception)


def test_it_loads_neither_tensorflow_nor_other_commands() -> None:
    """All commands were loaded, with pydantic, which tripled the time until ranks start."""
    code = (
        "import sys; from tfcommx.cli.main import application; application('run')\n"
        "sys.exit(bool({'tensorflow', 'pydantic', 'tfcommx.cli.train'} & {*sys.modules}))"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0


CLUSTER = (sys.executable, str(ROOT / "scripts" / "cluster"), "--name", f"r{os.getpid()}")


@pytest.mark.extended
@needs_cluster
def test_a_rank_on_another_host_is_named_with_it(script: str) -> None:
    """Over both launchers, and a host whose cable is cut."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    env = {**os.environ, "PATH": path, "PYTHONPATH": QUICK}

    def cluster(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*CLUSTER, *words], cwd=ROOT, env=env, text=True, capture_output=True, timeout=120
        )

    cluster("down")  # A process of this number may have been killed before
    made = cluster("up", "--nodes", "2", "--slots", "1")
    assert made.returncode == 0, made.stderr
    try:
        for launcher in ("--gloo", "--mpi"):
            words = ("tfcommx", "run", "-np", "2", launcher, "--", "python", script)
            ended = cluster("run", "--", *words, "3")
            said = "tfcommx: Rank 1 on node1 ended with status 3; all others were ended.\n"
            assert (ended.returncode, ended.stderr) == (3, said)
            assert " on node1\n" in ended.stdout and not wait_until_gone(pids(ended.stdout))
        cluster("cut", "1")
        ended = cluster("run", "--", *words, "well")
        assert ended.returncode == 1 and "No answer from node1" in ended.stderr, ended.stderr
    finally:
        cluster("down")


def test_a_launcher_that_was_killed_is_named() -> None:
    """The error said that the command did not start, although its ranks had run for hours."""
    running = object.__new__(Running)
    running.launch = Launch((Host("localhost", 2),), ("true",))
    error = running.failed(-signal.SIGKILL, RankLines())
    assert error.status == 137 and "horovodrun" in str(error) and "SIGKILL" in str(error)


def test_ranks_that_the_launcher_does_not_name_have_started() -> None:
    """With mpirun's --enable-recovery a script's status was an error of its start."""
    running, lines = object.__new__(Running), RankLines()
    running.launch = Launch((Host("localhost", 2),), ("true",))
    assert "did not start" in str(running.failed(3, lines))
    missing = "rank 0 on node1 (its process has ended)"
    report = f"[1]<stderr>:tfcommx: rank 1 ends, because ranks are missing: {missing}\n"
    lines.relay(io.StringIO(report))
    error = running.failed(3, lines)
    assert error.status == 3 and str(error) == f"`true` ended with status 3. {missing}"


# mpirun with --enable-recovery: its status is 0, whichever ranks a signal has ended
RECOVERY = """
import subprocess, sys
for rank, command in enumerate(sys.argv[2:]):
    words = [sys.executable, "-I", "-S", sys.argv[1], "sh", "-c", command]
    ended = subprocess.run(words, stderr=subprocess.PIPE, text=True)
    for line in ended.stderr.splitlines():
        print(f"[1,{rank}]<stderr>: {line}", file=sys.stderr)
"""


@pytest.mark.parametrize("last, status", [("kill -9 $$", 137), ("true", 0)])
def test_a_run_of_which_no_rank_is_left_has_failed(
    last: str, status: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """If memory ran out on all ranks of an elastic averaging, the run's status was 0."""
    command = [sys.executable, "-c", RECOVERY, RANK_OUTPUT, "kill -9 $$", last]
    monkeypatch.setattr(Launch, "words", lambda self: command)
    running = Running(Launch((Host("localhost", 2),), ("true",)))
    assert running.wait(RankLines()) == status
    assert capsys.readouterr().err == ""


def test_of_ranks_that_all_failed_none_was_killed() -> None:
    """Each was told of the other, and killed because it ended slowly: memory was blamed."""
    lines = RankLines()
    for rank, other in ((0, 1), (1, 0)):
        missing = f"rank {other} on node{other} (failed: RuntimeError: planned)"
        report = f"tfcommx: rank {rank} ends, because ranks are missing: {missing}"
        lines.relay(io.StringIO(f"[{rank}]<stderr>:{report}\n"))
    lines.relay(io.StringIO("Process name: 0\nExit code: 137\n"))
    assert lines.failure() == (0, 1)


def test_a_rank_that_failed_and_was_killed_by_its_watcher_has_failed(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """If all ranks raise, none reports another; mpirun names the signal of the slowest end."""
    report = "prterun noticed that process rank 1 with PID 7 on node one exited on\nsignal 9.\n"
    lines = RankLines()
    lines.relay(io.StringIO(report))
    assert lines.failure() == (1, 128 + signal.SIGKILL)
    lines.relay(io.StringIO(f"[7,1]<stderr>: {KILLED.format(rank=1)}"))
    assert lines.failure() == (1, 1) and capsys.readouterr() == ("", "")


def test_a_rank_that_has_called_mpi_abort_is_named_with_its_status() -> None:
    """The error quoted mpirun's frame of dashes, and named no host."""
    running, lines = object.__new__(Running), RankLines()
    running.launch = Launch((Host("one", 1), Host("two", 1)), ("true",))
    report = 'process rank 1 with PID 0 on node two calling\n"abort". This may have caused others\n'
    lines.relay(io.StringIO(f"prterun has exited due to {report}"))
    error = running.failed(5, lines)
    assert error.status == 5 and str(error).startswith("Rank 1 on two ended with status 5;")


def test_tracebacks_are_shown_although_another_arrives(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A background process of a rank may write later than the ranks' end."""
    lines = RankLines()
    lines.tracebacks = {"0": "of 0\n", "1": "of 1\n"}
    show = lines.show

    def show_late(rank: str, text: str) -> None:
        show(rank, text)
        lines.tracebacks[f"late {rank}"] = "of a thread\n"

    monkeypatch.setattr(lines, "show", show_late)
    lines.finish()
    assert capsys.readouterr().err == "of 0\nrank 1: of 1\n"


def test_lines_with_the_time_are_those_of_their_ranks(capsys: pytest.CaptureFixture[str]) -> None:
    """`--prefix-output-with-timestamp` has hidden all output of the ranks."""
    lines = RankLines()
    stamp = "Mon Nov  3 17:17:50 2026"
    lines.relay([f"{stamp}[1]<stdout>:loss\n", f"[{stamp}][1,0]<stderr>: Mind this\n"])
    shown = capsys.readouterr()
    assert (shown.out, shown.err) == (f"{stamp} rank 1: loss\n", f"{stamp} Mind this\n")
    assert lines.has_ranks and not lines.own


def test_a_full_disk_under_the_log_ends_no_rank(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """All ranks were ended, with the advice to write the output to a file."""
    script = "import sys\nfor n in range(9): print(f'[0]<stdout>:line {n}', flush=True)\n"
    script += "open(sys.argv[1], 'w').close()"
    command = [sys.executable, "-c", script, str(tmp_path / "trained")]
    monkeypatch.setattr(Launch, "words", lambda self: command)
    with open("/dev/full", "w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        running = Running(Launch((Host("localhost", 1),), ("true",)))
        assert running.wait(RankLines()) == 0
    assert (tmp_path / "trained").exists()
    assert "9 lines" in capsys.readouterr().err


def test_output_is_complete_though_its_reader_pauses(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In `tfcommx run ... | less` the last lines were lost if they were not read at once."""

    class Paused(io.StringIO):
        def write(self, text: str) -> int:
            time.sleep(0.2 if "line 0" in text else 0)
            return super().write(text)

    command = ["printf", r"[0]<stdout>:line %d\n", "0", "1", "2"]
    monkeypatch.setattr(Launch, "words", lambda self: command)
    monkeypatch.setattr(horovodrun, "OUTPUT_SECONDS", 0.1)
    monkeypatch.setattr(sys, "stdout", output := Paused())
    assert Running(Launch((Host("localhost", 1),), ("true",))).wait(RankLines()) == 0
    assert output.getvalue() == "line 0\nline 1\nline 2\n"


@pytest.mark.parametrize("closed", [None, 1, 2])
def test_output_that_cannot_be_written_does_not_change_the_status(closed: int | None) -> None:
    """Python has None in place of a closed stream, and ends with 120 if it cannot flush another."""
    code = (
        "import sys; from tfcommx.launch.horovodrun import discard_unread_output; "
        "print('lost'); discard_unread_output(); print('discarded', flush=True)"
    )
    # Unset, because `print` itself would raise the error
    variables = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    with open("/dev/full", "w") as full:
        ended = subprocess.run(
            [sys.executable, "-c", code],
            env=variables,
            stdout=full,
            preexec_fn=None if closed is None else lambda: os.close(closed),
        )
    assert ended.returncode == 0

"""The output of horovodrun as it is shown: an error once, with its rank."""

from __future__ import annotations

import io
import json
import math
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import warm_ranks
import yaml
from drawing import case
from launching import QUICK, ROOT
from typer.testing import CliRunner

from tfcommx.cli import train as cli_train
from tfcommx.cli.main import app
from tfcommx.cli.train import LaunchStopper, show_report_of, train_here
from tfcommx.core import DataError
from tfcommx.launch.horovodrun import Launch, Running
from tfcommx.launch.hosts import Host
from tfcommx.launch.rank_output import RankLines
from tfcommx.recipes.recipe import read
from tfcommx.report.summary import REQUIRED

TRACE = """\
Traceback (most recent call last):
  File "train.py", line 3, in <module>
    raise RuntimeError("no memory")
RuntimeError: no memory
"""
MISSING = (
    "tfcommx: rank {} ends, because ranks are missing: rank 1 on node1 ({}). Noticed by rank 1. "
    "Start again from the last checkpoint.\n"
)
HOROVODRUN = """\
Process {rank} exit with status code {status}.
Terminating remaining workers after failure of Process {rank}.
Traceback (most recent call last):
  File "launch.py", line 837, in run_commandline
RuntimeError: Horovod detected that one or more processes exited with non-zero status, thus causing
Process name: {rank}
Exit code: {status}

"""
TRACEBACK_OF_HOROVODRUN = """\
Traceback (most recent call last):
  File "launch.py", line 655, in _run_static
    raise RuntimeError('no interface')
RuntimeError: no interface
"""


def written_by(rank: int, text: str, stream: str = "stderr") -> str:
    """Mark every line as horovodrun does."""
    return "".join(f"[{rank}]<{stream}>:{line}" for line in text.splitlines(keepends=True))


class Started(Running):
    """Four ranks on two hosts, as if they had been started."""

    def __init__(self) -> None:
        self.launch = Launch((Host("node0", 1), Host("node1", 3)), ("tfcommx", "train"))


def shown(text: str, capsys: pytest.CaptureFixture[str], status: int = 1) -> tuple[str, str, str]:
    """Return the text on stdout and stderr, and the error of a failed launch."""
    output = RankLines()
    output.relay(io.StringIO(text))
    output.finish()
    said = ""
    if status:
        said = str(Started().failed(status, output))
    return (*capsys.readouterr(), said)


def test_rank_0_speaks_for_itself_and_others_are_marked(capsys):
    text = written_by(0, "epoch 1\n", "stdout") + written_by(2, "look\n", "stdout")
    text += written_by(0, "be warned\n") + written_by(3, "be warned\n") + "of horovodrun\n"
    assert shown(text, capsys, 0) == ("epoch 1\nrank 2: look\n", "be warned\n", "")


def test_lines_that_mpirun_marks_are_shown_as_those_of_horovodrun(capsys):
    text = "[1,0]<stdout>: epoch 1\n[1,2]<stdout>:   look\n[1,1]<stderr>: be warned\n"
    assert shown(text, capsys, 0) == ("epoch 1\nrank 2:   look\n", "rank 1: be warned\n", "")


def test_mpirun_says_which_rank_ended_first(capsys):
    text = (
        "first process to do so was:\n\n   Process name: [prterun-vm-1@1,2]\n   Exit code:    3\n"
    )
    assert "Rank 2 on node1 ended with status 3" in shown(text, capsys)[2]
    text = (
        "prterun noticed that process rank 1 with PID 7 on node vm exited on\nsignal 9 (Killed).\n"
    )
    assert "Rank 1 on node1 was killed by SIGKILL" in shown(text, capsys)[2]


def test_an_error_of_one_rank_is_shown_once(capsys):
    reason = "failed: RuntimeError: no memory"
    text = written_by(1, TRACE) + "".join(
        written_by(rank, MISSING.format(rank, reason)) for rank in (0, 2)
    )
    text += written_by(2, "Terminated\n") + HOROVODRUN.format(rank=1, status=1)
    printed, errors, failure = shown(text, capsys)
    assert (printed, errors) == ("", f"rank 1: {TRACE}")
    assert (
        failure.startswith("Rank 1 on node1 ended with status 1; all others were ended.")
        and "no memory" not in failure
    )


def test_the_rank_that_failed_is_named_if_another_ended_first(capsys):
    """Of six launches on a busy machine four named a rank that the failed one had ended."""
    reason = "failed: KeyboardInterrupt:"
    text = written_by(1, TRACE) + written_by(0, MISSING.format(0, reason))
    for status in (1, 134):
        failure = shown(text + HOROVODRUN.format(rank=0, status=status), capsys)[2]
        assert failure.startswith("Rank 1 on node1 ended with status 1; all others were ended.")


def test_an_error_of_all_ranks_is_shown_once_also_if_they_write_together(capsys):
    lines = [written_by(rank, TRACE).splitlines(keepends=True) for rank in (2, 0, 1)]
    text = "".join(line for together in zip(*lines, strict=True) for line in together)
    assert shown(text + HOROVODRUN.format(rank=2, status=1), capsys)[1] == f"rank 2: {TRACE}"


def test_an_error_that_the_user_can_fix_is_shown_once_also_with_a_rank_s_number(capsys):
    text = written_by(0, "tfcommx: no data\n") + written_by(1, "tfcommx: rank 1: no data\n")
    text += written_by(2, "tfcommx: rank 2: no room\n") + HOROVODRUN.format(rank=0, status=2)
    assert shown(text, capsys)[1] == "tfcommx: no data\ntfcommx: rank 2: no room\n"


def test_a_rank_that_was_killed_is_named(capsys):
    text = written_by(1, "Killed\n") + HOROVODRUN.format(rank=1, status=137)
    text += written_by(0, MISSING.format(0, "its process has ended"))
    printed, errors, failure = shown(text, capsys)
    assert (
        printed == errors == ""
        and "Rank 1 on node1 was killed by SIGKILL" in failure
        and "has ended" not in failure
    )


def test_a_rank_that_was_stopped_is_named_by_the_others(capsys):
    reason = "no response for 20 s"
    text = "".join(written_by(rank, MISSING.format(rank, reason)) for rank in (0, 2))
    failure = shown(text + HOROVODRUN.format(rank=0, status=1), capsys)[2]
    assert failure.count("rank 1 on node1 (no response for 20 s)") == 1


def test_an_error_of_horovodrun_itself_is_shown_as_it_is(capsys):
    text = "I0000 00:00:17.45  25 port.cc:153] oneDNN is on.\nRequested too many\n"
    text += TRACEBACK_OF_HOROVODRUN
    errors, failure = shown(text, capsys)[1:]
    assert errors == "" and failure == (
        "`tfcommx train` did not start on all ranks, status 1. Requested too many\n"
        "RuntimeError: no interface"
    )
    # The list of all options filled the screen
    text = "usage: horovodrun [-h]\n  ...\nhorovodrun: error: unrecognized arguments: --x\n"
    output = RankLines()
    output.relay(io.StringIO(text))
    error = Started().failed(2, output)
    assert str(error).endswith("status 2. horovodrun: error: unrecognized arguments: --x")
    assert error.status == 2


@pytest.mark.extended
def test_a_keras_that_cannot_be_imported_is_named(capsys, monkeypatch):
    """horovodrun's message asked to build Horovod again, with Gloo."""
    monkeypatch.setenv("KERAS_BACKEND", "jax")
    text = TRACEBACK_OF_HOROVODRUN + "ValueError: Gloo support has not been built.\n"
    failure = shown(text, capsys)[2]
    assert "jax" in failure and "Set KERAS_BACKEND=tensorflow" in failure


def test_a_host_without_an_answer_is_named_with_what_to_do(capsys):
    text = "ssh not successful for host node7:\nconnect: timed out\n\n" + TRACEBACK_OF_HOROVODRUN
    failure = shown(text, capsys)[2]
    assert "No answer from node7 (connect: timed out). `ssh node7 true` must" in failure


def test_links_are_read_before_ranks_start(tmp_path: Path) -> None:
    """Only the ranks found that the file was missing, after they had opened the data."""
    words = ["train", str(ROOT / "configs" / "fashion_mnist.yaml"), "--output", str(tmp_path)]
    words += ["--processes", "2", "--set", f"links={tmp_path}/none.json"]
    ended = CliRunner().invoke(app, words)
    assert isinstance(ended.exception, DataError) and "none.json" in str(ended.exception)


def test_only_rank_0_needs_the_folder_of_the_baseline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every rank read it, so that a launch on hosts without it ended."""
    trained = []
    monkeypatch.setattr(cli_train, "train_here", lambda *given: trained.append(given) or False)
    words = ["train", str(ROOT / "configs" / "fashion_mnist.yaml"), "--output", str(tmp_path)]
    words += ["--baseline", str(tmp_path / "elsewhere")]
    for rank in "01":
        env = {"HOROVOD_RANK": rank, "HOROVOD_SIZE": "2", "HOROVOD_LOCAL_RANK": "0"}
        ended = CliRunner().invoke(app, words, env=env)
        assert isinstance(ended.exception, DataError if rank == "0" else type(None)), ended
    assert len(trained) == 1


MINIATURE = ROOT / "configs" / "dawnbench_miniature.yaml"
# A step an epoch, and two in the last phase, whose batch is half of the others'; a stage of three
SHORT = {
    "model.blocks": "[1]",
    "data.limit": "128",
    "data.test_limit": "1000",
    "learning_rate.warm_up_epochs": "1",
}


def phases(*numbers: int) -> str:
    """Return these phases of the miniature, each of an epoch."""
    every = yaml.safe_load(MINIATURE.read_text())["phases"]
    return json.dumps([{**every[number], "epochs": 1} for number in numbers])


def train(
    folder, ranks: int, *, warm: bool = False, **settings: str | int
) -> subprocess.CompletedProcess:
    """Train DAWNBench's recipe in miniature, cut short, as a user does.

    `warm`: ranks begin with TensorFlow loaded (warm_ranks.py), without the output of loading it.
    """
    command = [
        sys.executable,
        "-m",
        "tfcommx.cli.main",
        "train",
        str(MINIATURE.relative_to(ROOT)),
    ]
    command += ["--processes", str(ranks), "--output", str(folder)]
    for key, value in {**SHORT, **settings}.items():
        command += ["--set", f"{key}={value}"]
    # As a user has it: nothing that tests set to quiet TensorFlow
    quiet = ("TF_CPP_MIN_LOG_LEVEL", "TF_ENABLE_ONEDNN_OPTS")
    env = {name: value for name, value in os.environ.items() if name not in quiet}
    if warm:
        env = {**os.environ, **warm_ranks.environment()}
    return subprocess.run(
        command,
        cwd=ROOT,
        env={**env, "PYTHONPATH": QUICK},
        text=True,
        capture_output=True,
        timeout=900,
    )


@pytest.mark.extended
@pytest.mark.parametrize(
    ("ranks", "node_size", "chosen"), [(2, 1, [0, 3]), case(4, 2, [0, 1, 2, 3], kept=False)]
)
def test_the_miniature_goes_through_all_phases_and_prints_what_a_user_wants(
    tmp_path, ranks, node_size, chosen
):
    """Two nodes of a rank, and the phases that differ most; `make demo` has two nodes of two."""
    given = {"data.limit": 32 * ranks, "phases": phases(*chosen)}
    ended = train(tmp_path, ranks, **given, node_size=node_size)
    # On a crowded machine a rank may wait for more than a minute, and says so
    errors = [line for line in ended.stderr.splitlines() if "Log of rank" not in line]
    assert ended.returncode == 0 and not errors, ended.stderr
    # And an epoch takes more than a minute: then there are lines within it
    found = (line.rstrip() for line in ended.stdout.splitlines())
    lines = [line for line in found if not line.startswith("step ")]
    last = len(chosen)
    epochs, rest = lines[:last], lines[last:]
    for number, line in enumerate(epochs, 1):
        assert re.fullmatch(
            rf"epoch  {number}/{last} .* loss \d.* test 0\.\d+ .* images/s .* \d+ s remaining", line
        ), line
    assert rest[0] == "dawnbench_miniature: epochs" and rest.count("where rank 0's time went") == 1
    # Otherwise tables: their frames, and rows between them
    titles = (rest[0], "phases, without the first step of each", "where rank 0's time went")
    tables = [line for line in rest[:-2] if line not in titles]
    assert all(line[0] in "┏┡├└│┃┌" for line in tables), tables
    assert rest[-2:] == [
        f"all files: {tmp_path}",
        f"curves: tensorboard --logdir {tmp_path}",
    ]
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert (summary["ranks"], summary["nodes"], summary["replicas_identical"]) == (ranks, 2, True)
    sent, dense = (summary[f"bytes_between_nodes{kind}"] for kind in ("", "_dense"))
    # A torus of nodes of one rank sends as much as plain Horovod; metrics are sent, too
    assert 0 < sent < (dense if node_size > 1 else 1.3 * dense)
    rows = summary["rows"]
    assert [row["route"] for row in rows] == ["hitopk", *["torus"] * (last - 1)]
    shipped = read(MINIATURE).phases
    assert [row["resolution"] for row in rows] == [shipped[one].resolution for one in chosen]
    sizes = [(row["steps"], row["global_batch"]) for row in rows]
    assert sizes == [*[(1, 32 * ranks)] * (last - 1), (2, 16 * ranks)]
    assert all(math.isfinite(row["loss"]) for row in rows)


def test_an_error_that_all_ranks_find_is_one_line(tmp_path):
    ended = train(tmp_path, 2, warm=True, batch_per_rank="50000")
    assert ended.returncode == 2 and ended.stdout == ""
    assert re.fullmatch(r"tfcommx: A step needs batch \* ranks .*\n", ended.stderr), ended.stderr


def test_the_first_signal_asks_the_ranks_and_the_second_ends_them(tmp_path, capsys):
    """The file `stop` asks the ranks to stop; one of an earlier run is removed first."""
    ended = []

    class Process:
        def terminate(self) -> None:
            ended.append(self)

    file = tmp_path / "run" / "stop"
    file.parent.mkdir()
    file.touch()
    stop = LaunchStopper(file.parent)
    stop.running = Process()
    assert not file.exists() and stop.number == 0
    stop.ask(15, None)
    assert file.exists() and not ended and "Saving before" in capsys.readouterr().err
    stop.ask(2, None)
    assert len(ended) == 1 and stop.number == 15
    stop = LaunchStopper(file.parent, saves=False)
    stop.running = Process()
    stop.ask(2, None)
    assert len(ended) == 2 and not file.exists()


@pytest.mark.parametrize(("rank", "age", "stays"), [(0, 90, False), (0, 5, True), (1, 90, True)])
def test_a_request_to_an_earlier_run_does_not_stop_a_new_one(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    rank: int,
    age: float,
    stays: bool,
) -> None:
    """Under horovodrun no launcher of ours removes the file, and the run ended after a step."""
    for name, value in {"RANK": rank, "SIZE": 2, "LOCAL_RANK": rank}.items():
        monkeypatch.setenv(f"HOROVOD_{name}", str(value))
    file = tmp_path / "stop"
    file.touch()
    os.utime(file, (time.time() - age,) * 2)

    def end(*arguments: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("tfcommx.cli.train.load_tensorflow", end)
    with pytest.raises(KeyboardInterrupt):
        train_here(None, tmp_path, {})
    assert file.exists() == stays
    assert (str(file) in capsys.readouterr().err) != stays


def test_a_report_without_room_does_not_fail_a_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A training that had ended well had status 2, by which a scheduler starts it again."""
    summary = {name: 1 for name in REQUIRED} | {"counted": "images", "rows": []}
    (tmp_path / "summary.json").write_text(json.dumps(summary))
    with open("/dev/full", "w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        show_report_of(tmp_path)
    assert f"tfcommx report {tmp_path}" in capsys.readouterr().err


def test_a_signal_saves_though_the_disk_of_the_log_is_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The line that announces it raised an error in the handler, and the ranks were not asked."""
    stop = LaunchStopper(tmp_path)
    stop.running = SimpleNamespace(terminate=lambda: None)
    with open("/dev/full", "w") as full:
        # As sys.stderr, which writes each line at once
        full.reconfigure(line_buffering=True)
        monkeypatch.setattr(sys, "stderr", full)
        stop.ask(15, None)
        os.dup2(os.open(os.devnull, os.O_WRONLY), full.fileno())
    assert (tmp_path / "stop").exists()

"""The report of a failing rank to the others, which has at most 300 characters."""

from __future__ import annotations

import builtins
import os
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf

from tfcommx.watch import liveness, watcher
from tfcommx.watch.membership import Membership


@pytest.fixture
def reported(monkeypatch: pytest.MonkeyPatch):
    """Return a function that raises an uncaught error and returns the watcher's message."""
    monkeypatch.setattr(sys, "excepthook", lambda *failure: None)
    for module, name in ((sys, "exit"), (builtins, "exit"), (builtins, "quit")):
        monkeypatch.setattr(module, name, getattr(module, name))  # Restored at the end
    monkeypatch.setattr(liveness.atexit, "register", lambda ends: None)
    ours, theirs = socket.socketpair()
    liveness._say_how_it_ends(ours, Membership(), 0)

    def tell(error: BaseException) -> str:
        sys.excepthook(type(error), error, error.__traceback__)
        line = theirs.recv(65536).decode()
        assert line.endswith("\n")
        return line[:-1]

    with ours, theirs:
        yield tell


def test_the_cause_of_an_error_in_a_graph_comes_first(reported) -> None:
    net = keras.Sequential(
        [
            keras.layers.Input((3,)),
            keras.layers.Embedding(4, 2),
            keras.layers.Flatten(),
            keras.layers.Dense(1),
        ]
    )
    net.compile("sgd", loss="mse", jit_compile=False)
    with pytest.raises(tf.errors.InvalidArgumentError) as failed:
        net.fit(np.full((4, 3), 9), np.zeros((4, 1)), verbose=0)
    text = reported(failed.value)
    assert (
        text.startswith("failed: InvalidArgumentError: indices[")
        and "is not in [0, 4) Graph execution error" in text
    )
    assert len(text) <= 300 and "\n" not in text


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("one line", "one line"),
        ("", ""),
        ("why\n\n  where\tit was \n", "where it was why"),
        # The name of a file in another encoding; the others were told that the process had ended
        ("no caf\udce9.jpg", r"no caf\udce9.jpg"),
    ],
)
def test_other_errors_are_reported_whole(reported, text: str, expected: str) -> None:
    assert reported(ValueError(text)) == f"failed: ValueError: {expected}"


def test_a_process_lives_whatever_its_name() -> None:
    """The kernel cuts a script's name to 15 bytes, here within a letter: the watcher died of it."""
    name = Path("/proc/self/comm")
    before = name.read_bytes()
    name.write_bytes("обучение".encode()[:15])
    try:
        assert b"\xd0\n" in name.read_bytes() and watcher._state_of(os.getpid()) in "RSD"
    finally:
        name.write_bytes(before.strip())


def test_a_watcher_passes_on_a_name_in_another_encoding() -> None:
    """Ranks report the user's file to their watchers as JSON, which can hold such a name."""
    row = {"addresses": ["127.0.0.1"], "port": 1, "host": "h", "token": "t", "limit": 2.0}
    job = liveness.make_job(0, os.getpid(), [row | dict.fromkeys(liveness.Limits._fields[1:])] * 2)
    mine, theirs = socket.socketpair()
    with mine, theirs, socket.create_server(("127.0.0.1", 0)) as listening:
        sender = watcher.Watcher(job, listening, theirs)
        sender.links[1] = theirs
        sender.member.outbox, sender.member.to_rank = [(1, "at caf\udce9.py")], ["end caf\udce9.py"]
        sender.send_all()
        assert mine.recv(100) == rb"at caf\udce9.py" + b"\n" + rb"end caf\udce9.py" + b"\n"


def test_a_scripts_timeout_of_sockets_does_not_end_the_watch() -> None:
    """As of a script that downloads files: all ranks ended so many seconds after init()."""
    socket.setdefaulttimeout(0.01)
    try:
        listening, addresses = liveness.listen([], one_host=True)
        limits = liveness.Limits(20.0)._asdict()
        row = {"addresses": addresses, "port": 0, "host": "", "token": "t", **limits}
        with liveness.start_watcher(listening, liveness.make_job(0, os.getpid(), [row])) as watch:
            assert watch.gettimeout() is None
    finally:
        socket.setdefaulttimeout(None)


def test_a_forked_child_is_not_the_rank(reported) -> None:
    """A worker process that a data pipeline forks fails: the rank continues.

    No other rank may receive a report that it has failed.
    """
    if not (child := os.fork()):
        sys.excepthook(ValueError, ValueError("of the child"), None)
        os._exit(0)
    os.waitpid(child, 0)
    assert reported(ValueError("of the rank")) == "failed: ValueError: of the rank"


@pytest.mark.parametrize("ended", [[], [2, 1]])
def test_an_error_because_another_rank_is_gone_waits_for_the_alarm(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], ended: list[int]
) -> None:
    """The alarm ends the process with one line; without an alarm the traceback is printed.

    In that case a rank has ended in order, but too early for this one. Seen: a callback called
    `sys.exit(0)` on one rank, and the others' error did not name that rank.
    """
    done: list[str] = []
    monkeypatch.setattr(sys, "excepthook", lambda *failure: done.append("traceback"))
    monkeypatch.setattr(liveness.atexit, "register", lambda ends: None)
    monkeypatch.setattr(liveness.time, "sleep", lambda seconds: done.append("wait"))
    ours, theirs = socket.socketpair()
    with ours, theirs:
        membership = Membership()
        membership.early.update(ended)
        failed = liveness._say_how_it_ends(ours, membership, 0)
        error = RuntimeError(
            f"{liveness.GONE}. This was caused by an exception on one of the ranks"
        )
        sys.excepthook(type(error), error, None)
        theirs.setblocking(False)
        with pytest.raises(BlockingIOError):  # The others receive nothing about this rank
            theirs.recv(100)
    assert done == ["wait", "traceback"] and not failed.is_set()
    said = capsys.readouterr().err
    assert ("rank 1, rank 2, by" if ended else "another rank, by") in said and "AgreeOnStop" in said


class Unread:
    """A pipe whose reader has ended, as by `2>&1 | head`."""

    def write(self, text: str) -> int:
        raise BrokenPipeError

    def flush(self) -> None:
        raise BrokenPipeError


@pytest.mark.parametrize("stream", [None, Unread()])
def test_an_alarm_ends_a_rank_whose_output_cannot_be_written(
    monkeypatch: pytest.MonkeyPatch, stream: Unread | None
) -> None:
    """Python has None in place of a closed stdout or stderr. Only SIGKILL ended such a rank."""
    statuses: list[int] = []
    for name in ("stdout", "stderr"):
        monkeypatch.setattr(sys, name, stream)
    monkeypatch.setattr(os, "_exit", statuses.append)
    monkeypatch.setattr(liveness.time, "sleep", lambda seconds: None)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(b"early 2\nlost rank 1 on here (its process has ended).\n")
        membership = Membership()
        liveness._wait(ours, 0, membership, threading.Event())
    assert statuses == [1]
    # Named in errors, but not gone: a process that holds the centre awaits its last messages
    assert membership.early == {2} and not membership.gone()


def test_after_a_rank_has_died_the_process_ends_without_waiting_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Horovod's and MPI's own ends would wait for the rank that is gone."""
    ends, statuses = [], []
    monkeypatch.setattr(liveness.atexit, "register", ends.append)
    monkeypatch.setattr(os, "_exit", statuses.append)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        membership = Membership()
        liveness._say_how_it_ends(ours, membership, 0)
        ends[0]()
        membership.mark_gone(1, "it has ended", True)
        ends[0]()
        assert statuses == []
        membership.mark_gone(2, "its process has ended", False)
        ends[0]()
        assert statuses == [0] and theirs.recv(100) == b"bye\n" * 3


def test_a_rank_that_has_failed_ends_while_the_others_train(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """MPI's end waited for them until the watcher killed the rank, and mpirun returned 0."""
    ends, statuses = [], []
    monkeypatch.setattr(sys, "excepthook", lambda *failure: None)
    monkeypatch.setattr(liveness.atexit, "register", ends.append)
    monkeypatch.setattr(os, "_exit", statuses.append)
    monkeypatch.setattr(liveness.time, "sleep", lambda seconds: None)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        liveness._say_how_it_ends(ours, Membership(), 0)
        sys.excepthook(RuntimeError, RuntimeError("a full disk"), None)
        ends[0]()
        assert statuses == [1] and theirs.recv(100) == b"failed: RuntimeError: a full disk\n"


@pytest.mark.extended
def test_an_exception_of_native_code_tells_the_watcher_before_the_process_is_aborted() -> None:
    """Gloo's own exceptions end a rank in Horovod's thread, where no Python runs."""
    program = (
        "import ctypes, sys; from tfcommx.kernels import loader\n"
        "loader.plain_function('tfcommx_tell_of_terminate')(int(sys.argv[1]))\n"
        "ctypes.CDLL('libstdc++.so.6')['_ZSt9terminatev']()"
    )
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ended = subprocess.run(
            [sys.executable, "-c", program, str(ours.fileno())],
            pass_fds=[ours.fileno()],
            capture_output=True,
        )
        ours.close()
        assert ended.returncode == -signal.SIGABRT, ended.stderr.decode()
        assert theirs.recv(64) == b"aborted\n"
        assert b"terminate called" in ended.stderr


@pytest.mark.parametrize("code, status", [("sys.exit(3)", 3), ("quit(code=3)", 3), ("pass", 0)])
def test_a_script_that_outlives_a_rank_ends_with_its_own_status(code: str, status: int) -> None:
    """Under elastic averaging `sys.exit(3)` counted as ended well if another rank had died."""
    script = (
        "import socket, sys; from tfcommx.watch import liveness, membership; "
        "members = membership.Membership(); ours, theirs = socket.socketpair(); "
        "liveness._say_how_it_ends(ours, members, 0); "
        f"members.mark_gone(1, 'its process has ended', False); {code}"
    )
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert ended.returncode == status, ended.stderr


@pytest.mark.parametrize(
    "needed, code, status", [([0, 1], "sys.exit(3)", 3), ([0, 1], "pass", 9), ([1], "exit(3)", 9)]
)
def test_a_script_that_fails_on_a_needed_rank_ends_at_once(
    needed: list[int], code: str, status: int
) -> None:
    """MPI's shutdown waited for the others until the watcher killed it: status 137, and not 3."""
    script = (
        "import atexit, os, socket, sys; from tfcommx.watch import liveness, membership; "
        "atexit.register(os._exit, 9); "  # As MPI's shutdown
        "members = membership.Membership(); ours, theirs = socket.socketpair(); "
        f"liveness._say_how_it_ends(ours, members, 0); members.allow_leaving({needed}); {code}"
    )
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert ended.returncode == status, ended.stderr

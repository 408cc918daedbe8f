"""Law 7, on real processes: a rank that dies is named, and the others end.

Bad launches are refused before anything hangs.
"""

from __future__ import annotations

import contextlib
import functools
import re
import signal
import socket
import subprocess
import threading
import time
from typing import Any

import keras
import pytest
from drawing import case, extended
from launching import WORKERS, Ended, horovodrun

import tfcommx as cx
from tfcommx.collectives import process as this_process
from tfcommx.collectives.init import init
from tfcommx.core import ConfigurationError
from tfcommx.watch import liveness, protocol, watcher

WORKER = str(WORKERS / "faults.py")
pytestmark = pytest.mark.long_wait
NAMES = {
    # By the launcher if rank 2's process ends first; by the watchers if it takes its time to end
    "gloo": r"Process (name: )?2\b|rank 2 on \S+ \(",
    "mpi": r"process rank 2 with|rank 2 on \S+ \(|,2\]|\[1,2\]<stderr>: RuntimeError",
}


def seconds_since_the_fault(output: str) -> float:
    """Return the seconds since the fault; call it when the launch has ended.

    The start of a launch may take long if ranks share few cores, and is not counted.
    """
    found = re.search(r"now (\d+\.\d+)", output)
    assert found, output[-4000:]
    return time.time() - float(found[1])


@functools.cache
def without_rank_2(how: str, launcher: str) -> tuple[Ended, float]:
    """Launch 3 ranks of which one dies, once for all tests that read it.

    Returns the finished process, and the seconds that it took to end.
    """
    ended = horovodrun(3, [WORKER, how, "2"], launcher, seconds=120)
    return ended, seconds_since_the_fault(ended.output)


@pytest.mark.parametrize(
    ("how", "launcher"),
    [
        ("kill", "gloo"),
        ("kill", "mpi"),
        extended("raise", "gloo"),
        case("raise", "mpi", kept=False),
    ],
)
def test_a_rank_that_dies_ends_the_others_and_is_named(how: str, launcher: str) -> None:
    ended, seconds = without_rank_2(how, launcher)
    assert ended.status != 0
    assert seconds < 60, ended.output[-4000:]
    # Anywhere: launchers forward stdout and stderr each for itself
    assert re.search(NAMES[launcher], ended.output), ended.output[-4000:]
    assert ("this rank gives up" in ended.output) == (how == "raise"), ended.output[-4000:]


@pytest.mark.parametrize("launcher", ["gloo", case("mpi", kept=False)])
def test_a_rank_that_is_stopped_ends_the_others_and_is_named(launcher: str) -> None:
    ended = horovodrun(2, [WORKER, "stop", "1", "5"], launcher, seconds=120)
    assert ended.status != 0
    assert seconds_since_the_fault(ended.output) < 60, ended.output[-4000:]
    said = r"rank 0 ends, because ranks are missing: rank 1 on \S+ \(no response"
    assert re.search(said, ended.output), ended.output[-4000:]


@pytest.mark.extended
def test_ranks_that_end_early_or_hold_pythons_lock_are_not_missed() -> None:
    ended = horovodrun(2, [WORKER, "apart", "1", "3"], "gloo", seconds=120)
    assert ended.status == 0, ended.output[-4000:]
    assert ended.output.count("done") == 2 and "missing" not in ended.output, ended.output[-4000:]


def test_a_failure_is_told_to_the_others_and_not_blamed_on_those_that_it_drags_along() -> None:
    ended, _ = without_rank_2("raise", "gloo")
    for rank in (0, 1):
        said = (
            rf"rank {rank} ends, because ranks are missing: rank 2 on \S+ \(failed: "
            r"RuntimeError: this rank gives up\)"
        )
        assert re.search(said, ended.output), ended.output[-4000:]


def test_a_watch_that_cannot_be_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="watch_seconds"):
        init(watch_seconds=0)


@pytest.mark.extended
@pytest.mark.parametrize(
    ("how", "said"),
    [
        case("kill", r"rank 1\b", kept=False),
        case("raise", "rank 1 gives up", kept=False),
        ("stop", "rank 0 gives up"),
    ],
)
def test_messages_end_too_when_a_rank_does_not_come(how: str, said: str) -> None:
    """A rank that waits in MPI for a message is out of Horovod's reach.

    An uncaught error ends the launch, and waiting has an end.
    """
    ended = horovodrun(
        2,
        [WORKER, how, "1", "20", "pipeline"],
        "mpi",
        seconds=120,
        TFCOMMX_MESSAGE_TIMEOUT_SECONDS="5",
    )
    assert "now" in ended.output and ended.status != 0, ended.output[-4000:]
    assert ended.seconds < 60, f"{ended.seconds:.0f} s\n{ended.output[-4000:]}"
    # Not after "now": mpirun forwards stdout and stderr each for itself
    assert re.search(said, ended.output), ended.output[-4000:]
    if how == "stop":
        assert re.search(r"has waited longer for ranks \[", ended.output), ended.output[-4000:]


@pytest.mark.extended
def test_unequal_slots_are_refused_by_two_level_routes_and_work_with_one_level() -> None:
    code = (
        "import numpy as np, keras, tensorflow as tf, tfcommx as cx; c = cx.init();"
        "v = keras.Variable(np.zeros((64, 64), 'float32'), name='w');"
        "o = cx.DistributedOptimizer(keras.optimizers.SGD(1.0), cx.Scheme('allgather', 'mstopk', "
        "0.5)); o.apply([tf.ones([64, 64])], [v]);"
        "print('one level', c.topology.size);"
        "cx.DistributedOptimizer(keras.optimizers.SGD(1.0), cx.Scheme('hitopk', 'mstopk', 0.1))"
    )
    ended = horovodrun(3, ["-c", code], "gloo", seconds=120, hosts="localhost:2,127.0.0.1:1")
    assert ended.status != 0
    assert ended.output.count("one level 3") == 3, ended.output[-4000:]
    assert "localhost:2, 127.0.0.1:1" in ended.output, ended.output[-4000:]


def test_without_init_the_error_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(this_process, "_current", None)
    with pytest.raises(cx.LaunchError, match=r"tfcommx\.init\(\)"):
        cx.DistributedOptimizer(keras.optimizers.SGD(0.1))


def job_of(rank: int, pid: int, ports: list[int]) -> dict[str, Any]:
    """Return a watcher's job, as liveness makes it."""
    told = {
        "addresses": ["127.0.0.1"],
        "host": "here",
        "token": "t",
        "limit": 2.0,
        "stall_seconds": None,
        "stall_limit": None,
    }
    return liveness.make_job(rank, pid, [{**told, "port": port} for port in ports])


def test_a_watcher_whose_rank_was_killed_with_an_alarm_unread_ends_in_order() -> None:
    mine, theirs = socket.socketpair()
    with socket.create_server(("127.0.0.1", 0)) as listening:
        one = watcher.Watcher(job_of(0, 1, [0]), listening, theirs)
        theirs.send(b"an alarm")
        mine.close()
        one.hear_rank(theirs)
    one.member.tell_if_due(time.monotonic() + 1)  # The others have been told
    assert one.member.finished and not one.member.last_words
    theirs.close()


def test_a_rank_that_failed_and_is_killed_is_said_to_have_failed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Under MPI the launcher named the signal alone, and asked for more memory."""
    monkeypatch.setattr(protocol, "LAST_WORDS_SECONDS", 0.0)
    for failed in (True, False):
        mine, theirs = socket.socketpair()
        with subprocess.Popen(["sleep", "60"]) as process:
            listening = socket.create_server(("127.0.0.1", 0))
            one = watcher.Watcher(job_of(0, process.pid, [0]), listening, theirs)
            if failed:
                mine.send(b"failed: RuntimeError: planned\n")
            else:  # Others are missing
                one.member.alarm.set_told(time.monotonic(), False)
            one.run()
            assert process.wait() == -signal.SIGKILL
        mine.close()
        theirs.close()
        assert capsys.readouterr().err == (protocol.KILLED.format(rank=0) if failed else "")


def test_a_stranger_who_calls_does_not_keep_a_watcher_from_its_beats() -> None:
    """Two watchers, each of a separate process, and callers from elsewhere.

    Of 200 callers one sends a byte now and then, the others nothing. One more is rank 1's watcher:
    it has waited too long to be accepted, and tries again.
    """
    ranks = [subprocess.Popen(["sleep", "60"]) for _ in range(2)]
    listening = [socket.create_server(("127.0.0.1", 0)) for _ in ranks]
    ports = [one.getsockname()[1] for one in listening]
    ends = [socket.socketpair() for _ in ranks]
    watchers = [
        watcher.Watcher(job_of(rank, process.pid, ports), listening[rank], ends[rank][1])
        for rank, process in enumerate(ranks)
    ]
    threads = [threading.Thread(target=one.run) for one in watchers]
    try:
        with socket.create_connection(("127.0.0.1", ports[0])) as given_up:
            given_up.sendall(b"t 1\n")
        callers = [socket.create_connection(("127.0.0.1", ports[0])) for _ in range(200)]
        for thread in threads:
            thread.start()
        for _ in range(12):
            with contextlib.suppress(OSError):  # it is hung up on
                callers[0].send(b"x")
            time.sleep(0.5)
        assert [process.poll() for process in ranks] == [None, None]
        for mine, _ in ends:
            mine.setblocking(False)
            with pytest.raises(BlockingIOError):  # an alarm would be there to read
                mine.recv(100)
        assert [list(one.links) for one in watchers] == [[1], [0]]
        assert "(_hear)" not in " ".join(one.name for one in threading.enumerate())
    finally:
        for (mine, _), process in zip(ends, ranks, strict=True):
            mine.send(b"bye\n")
            mine.close()
            process.kill()
            process.wait()
        for thread in threads:
            thread.join(10)

"""To its launcher, a rank that begins in a process with TensorFlow is as one that loads it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import warm_ranks
from launching import QUICK

from tfcommx.launch import horovodrun

SAY = """\
import json, os, sys
print(json.dumps({
    "loaded": "tensorflow" in sys.modules, "own": "tfcommx" in sys.modules, "words": sys.argv,
    "name": __name__, "folder": os.getcwd(), "path": sys.path[0], "hash": hash("a word"),
    "variable": os.environ["SAID"], "pid": os.getpid(), "read": sys.stdin.read(),
    "warm": [name for name in os.environ if "WARM" in name],
}), flush=True)
"""


@pytest.fixture(autouse=True)
def warm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(warm_ranks, "wanted", True)  # In `make test-all`, too


def start(*words: str, rank: int = 0, folder: Path | None = None, **more: str) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, *words],
        cwd=folder,
        env={
            **os.environ,
            "PYTHONPATH": QUICK,
            "HOROVOD_RANK": str(rank),
            "SAID": "this",
            **warm_ranks.environment(),
            **more,
        },
        text=True,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def said(process: subprocess.Popen, text: str = "") -> dict:
    out, errors = process.communicate(text, timeout=120)
    assert process.returncode == 0, errors
    return json.loads(out)


def test_it_is_what_python_would_have_made_of_it(tmp_path: Path) -> None:
    """Script, module, command or folder: its words, files, and modules are its own."""
    (tmp_path / "say.py").write_text(SAY)
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "__main__.py").write_text(SAY)
    kinds = {
        ("say.py", "a", "-b"): ["say.py", "a", "-b"],
        ("-m", "say", "a"): [str(tmp_path / "say.py"), "a"],
        ("-c", SAY, "a"): ["-c", "a"],
        ("folder", "a"): ["folder", "a"],
    }
    for words, expected in kinds.items():
        warm = said(start(*words, folder=tmp_path), "read this")
        cold = said(start(*words, folder=tmp_path, TFCOMMX_TEST_WARM=""), "read this")
        assert warm.pop("loaded") and not cold.pop("loaded")
        assert warm["words"] == expected and warm["read"] == "read this" and not warm["own"]
        for one in (warm, cold):
            del one["pid"], one["hash"], one["warm"]
        assert warm == cold


def test_ranks_hash_words_differently_and_what_they_start_begins_as_ever() -> None:
    found = [said(start("-c", SAY, rank=rank)) for rank in (0, 1)]
    assert found[0]["hash"] != found[1]["hash"]
    assert not found[0]["warm"] and found[0]["loaded"]


LATER = "import os; from threading import Thread; from time import sleep; "


@pytest.mark.parametrize(
    ("code", "status"),
    [
        ("import sys; sys.exit(3)", 3),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL),
        ("import os, signal; os.kill(os.getpid(), signal.SIGTERM)", -signal.SIGTERM),
        ("import atexit; atexit.register(print, 'last'); raise ValueError('no')", 1),
        ("import sys; sys.exit('no')", 1),
        # Python waits for the thread, and says that the buffer cannot be written
        (f"{LATER}Thread(target=lambda: (sleep(0.2), print('last', flush=True))).start()", 0),
        (f"{LATER}print('last'); os.close(1)", 120),
    ],
)
def test_it_ends_as_its_program_does(code: str, status: int) -> None:
    process = start("-c", code, PYTHONUNBUFFERED="")
    out, errors = process.communicate(timeout=120)
    assert process.returncode == status
    assert out == ("last\n" if "last" in code and status != 120 else "")
    assert errors.endswith({0: "", 1: "no\n", 120: "Bad file descriptor\n"}.get(status, ""))


# In short sleeps, because a signal just before a sleep does not interrupt it
WAIT = "import os, time; print(os.getpid(), flush=True); [time.sleep(0.05) for _ in range(12000)]"
TOLD = "import signal; signal.signal(signal.SIGTERM, lambda *_: exit(7)); " + WAIT


@pytest.mark.parametrize(
    ("code", "number", "status"),
    [(TOLD, signal.SIGTERM, 7), (WAIT, signal.SIGTERM, -15), (WAIT, signal.SIGKILL, -9)],
    ids=["told", "ended", "killed"],
)
def test_what_happens_to_it_happens_to_its_program(code: str, number: int, status: int) -> None:
    process = start("-c", code)
    program = int(process.stdout.readline())
    assert program != process.pid
    process.send_signal(number)
    process.communicate(timeout=60)
    assert process.returncode == status
    deadline = time.monotonic() + 60
    while psutil.pid_exists(program):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_it_loads_tensorflow_itself_in_other_surroundings() -> None:
    """Variables that are read while it is loaded; programs that are no ranks; `make test-all`."""
    assert not said(start("-c", SAY, TF_CPP_MIN_LOG_LEVEL="0"))["loaded"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(warm_ranks, "wanted", False)
        assert warm_ranks.environment() == {}
        assert not said(start("-c", SAY))["loaded"]
    words = [sys.executable, "-c", SAY]
    for alone in (True, False):
        variables = warm_ranks.environment(alone) | {"PYTHONPATH": QUICK, "SAID": ""}
        done = subprocess.run(
            words, env=os.environ | variables, text=True, capture_output=True, input=""
        )
        assert json.loads(done.stdout)["loaded"] == alone


def test_ranks_of_tfcommx_run_begin_warm() -> None:
    """A variable that the launcher adds for its ranks made each of them load TensorFlow."""
    added = {
        name: value
        for name, value in horovodrun.environment().items()
        if os.environ.get(name) != value
    }
    assert said(start("-c", SAY, **added))["loaded"]


@pytest.mark.parametrize("encoding", ["utf-8", "latin-1:replace", "ascii:backslashreplace"])
def test_its_streams_have_the_encoding_that_python_would_give_them(encoding: str) -> None:
    code = "print('zw\u00f6lf \u20ac'); import sys; print('\u00f6', file=sys.stderr)"
    ways = ({}, {"TFCOMMX_TEST_WARM": ""})
    processes = [start("-c", code, PYTHONIOENCODING=encoding, **way) for way in ways]
    written = []
    for process in processes:
        process.stdin.close()
        written.append((process.stdout.buffer.read(), process.stderr.buffer.read()))
        assert process.wait(60) == 0
    assert written[0] == written[1]


def test_what_it_uses_is_counted() -> None:
    before = warm_ranks.cpu_seconds()
    start("-c", "import time\nwhile time.process_time() < 0.5: pass").communicate(timeout=60)
    assert 0.4 < warm_ranks.cpu_seconds() - before < 30

"""`tfcommx centre`: the program that each process of a launch becomes, and refused launches."""

from __future__ import annotations

import os
import re
import signal
import sys

import pytest

from tfcommx.cli import main
from tfcommx.launch.launcher import launcher


class Replaced(Exception):
    """Raised in place of `execvp`, which would not return."""


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch):
    """Run the command as one process of a launch; return the command line that replaces it."""

    def run(rank: int, size: int, *words: str, kind: str = "OMPI_COMM_WORLD") -> list[str]:
        for name in ("RANK", "SIZE", "LOCAL_RANK"):
            value = {"SIZE": size}.get(name, rank)
            monkeypatch.setenv(f"{kind}_{name}", str(value))
        monkeypatch.setenv("PMIX_NAMESPACE", "launch-1")
        monkeypatch.setenv("TFCOMMX_CENTRE", "")
        monkeypatch.setattr(sys, "argv", ["tfcommx", "centre", *words])
        monkeypatch.setattr(main.time, "sleep", lambda seconds: None)
        became: list[list[str]] = []

        def replace(file: str, words: list[str]) -> None:
            became.append(words)
            raise Replaced

        monkeypatch.setattr(os, "execvp", replace)
        before = signal.getsignal(signal.SIGPIPE)
        try:
            with pytest.raises(Replaced):
                main.main()
        finally:  # The command sets it for the program that would replace this process
            signal.signal(signal.SIGPIPE, before)
        return became[0]

    return run


@pytest.mark.parametrize("dashes", [["--"], []])
def test_the_last_process_holds_the_centre_and_the_others_train(
    launched, monkeypatch: pytest.MonkeyPatch, dashes: list[str]
) -> None:
    command = [sys.executable, "train.py", "--epochs", "3", "--help"]
    monkeypatch.delenv("TF_CPP_MIN_LOG_LEVEL", raising=False)
    for rank in range(3):
        assert launched(rank, 4, *dashes, *command) == command
        assert launcher() == ("mpi", rank, 3, rank, True)
    assert "TF_CPP_MIN_LOG_LEVEL" not in os.environ  # The script is the user's
    assert launched(3, 4, *dashes, *command)[1:] == ["-m", "tfcommx.strategies.easgd.process"]
    assert launcher() == ("mpi", 3, 3, 3, True)
    # A launch that the script makes is another one
    monkeypatch.setenv("PMIX_NAMESPACE", "launch-2")
    assert launcher() == ("mpi", 3, 4, 3, False)


@pytest.mark.parametrize(
    ("size", "kind", "command", "words"),
    [
        (4, "HOROVOD", sys.executable, r"MPI.*\b3\b.*gloo"),
        (2, "OMPI_COMM_WORLD", sys.executable, r"--enable-recovery .*\b2\b"),
        (4, "OMPI_COMM_WORLD", "no-such-program", "'no-such-program'"),
    ],
)
def test_another_launch_is_refused_on_every_rank(
    launched, capsys, size: int, kind: str, command: str, words: str
) -> None:
    for rank in (0, size - 1):
        with pytest.raises(SystemExit) as ended:
            launched(rank, size, "--", command, kind=kind)
        assert ended.value.code == 2
        assert re.search(words, capsys.readouterr().err)

"""Start ranks with horovodrun, and wait until they have ended.

    Launch(hosts, command)  ->  Running(launch)  ->  wait(lines) -> exit status

    tfcommx run <- horovodrun (and mpirun) <- rank_output <- rank

**Ranks:** local, in the launcher. Needs neither TensorFlow nor Horovod in this process.
"""

from __future__ import annotations

import contextlib
import ctypes
import io
import os
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import IO

from tfcommx.core import LaunchError
from tfcommx.launch.hosts import Host
from tfcommx.launch.rank_output import RankLines

PR_SET_PDEATHSIG = 1  # prctl(2)
KINDS = ("gloo", "mpi")
# What starts each rank, on each host
RANK_OUTPUT = str(Path(__file__).with_name("rank_output.py"))
# For the end of the launcher's output, when all its processes have ended
OUTPUT_SECONDS = 2.0
# What Open MPI 5 takes; a Horovod that set-up has not changed has one dash too few
BINDING = "--bind-to none --map-by slot"
# For more ranks than cores: a rank that waits sleeps. sched_yield, the default, may starve others.
CROWDED = (
    "--mca mpi_yield_when_idle 1 --mca threads_pthreads_yield_strategy nanosleep "
    "--mca threads_pthreads_nanosleep_time 20000"
)


@dataclass(frozen=True)
class Launch:
    """What is started, and where.

    Args:
        hosts: a rank on every slot, numbered host by host.
        command: of every rank.
        kind: "gloo", or "mpi" for routes of messages.
        mpi_args: options for mpirun, beside those that it needs.
        options: other options of horovodrun, as they are.
    """

    hosts: tuple[Host, ...]
    command: tuple[str, ...]
    kind: str = "gloo"
    mpi_args: str = ""
    options: tuple[str, ...] = ()

    @property
    def size(self) -> int:
        return sum(host.slots for host in self.hosts)

    def host_of(self, rank: int) -> str:
        """Return the name of the host of a rank."""
        names = [host.name for host in self.hosts for _ in range(host.slots)]
        return names[rank]

    def words(self) -> list[str]:
        """Return the command line of horovodrun.

        **Raises:** LaunchError without horovodrun.
        """
        program = shutil.which("horovodrun", path=search_path())
        if program is None:
            raise LaunchError(
                f"horovodrun is required beside {sys.executable}. Install Horovod in this "
                "environment.",
                1,
            )
        where = ",".join(f"{host.name}:{host.slots}" for host in self.hosts)
        # The cache holds what was found of these hosts an hour ago, in one file for all launches
        words = [program, "-np", str(self.size), "-H", where, f"--{self.kind}", "--disable-cache"]
        if self.kind == "mpi":
            crowded = max(host.slots for host in self.hosts) > (os.cpu_count() or 1)
            arguments = " ".join([CROWDED] * crowded + [self.mpi_args] * bool(self.mpi_args))
            words += [f"--binding-args={BINDING}", *[f"--mpi-args={arguments}"] * bool(arguments)]
        return [*words, *self.options, *self._command()]

    def _command(self) -> tuple[str, ...]:
        """Return the command, behind rank_output, with what horovodrun must not see.

        See environment().
        """
        job = os.environ.get("LSB_JOBID")
        hidden = ("env", f"LSB_JOBID={job}") if job else ()
        # -I, -S: the user's packages may do anything when Python starts
        return (*hidden, sys.executable, "-I", "-S", RANK_OUTPUT, *self.command)


def search_path() -> str:
    """Return PATH with the programs of this environment first: horovodrun, mpirun, python."""
    return f"{Path(sys.executable).parent}:{os.environ.get('PATH') or os.defpath}"


def environment() -> dict[str, str]:
    """Return horovodrun's environment variables.

    In a job of LSF it looks for no network interface, and Gloo fails without one. It prints what it
    has read from the ranks as UTF-8, which an ASCII locale would not let it do: the thread of that
    rank's output would end, and with it all later output.
    """
    own = {name: value for name, value in os.environ.items() if name != "LSB_JOBID"}
    return {**own, "PATH": search_path(), "PYTHONIOENCODING": "utf-8"}


def on_end_signals(handle: Callable[[int, FrameType | None], None]) -> None:
    """Handle SIGINT (Ctrl-C), SIGTERM and SIGHUP, except those that are ignored, as by nohup."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, handle)


def _discard_unread_output() -> None:
    """Write what no process reads to /dev/null: or Python ends with a status of its own, 120."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _end_with_parent() -> None:
    """Let this process get SIGTERM when the one that started it is gone, also by kill -9."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


class Running:
    """A launch that has been started.

    Signals of a terminal do not reach it: whoever started it says when it ends.

    Args:
        launch: what is started.
        variables: environment variables of the ranks, beside those of this process.
    """

    def __init__(self, launch: Launch, variables: Mapping[str, str] | None = None) -> None:
        self.launch = launch
        self._asked = False
        # Of our own output: a pipe whose reader has ended
        self._unread: OSError | None = None
        self.process = subprocess.Popen(
            launch.words(),
            env=environment() | dict(variables or {}),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            # Ctrl-C is for this process alone
            start_new_session=True,
            preexec_fn=_end_with_parent,
        )

    def terminate(self) -> None:
        """End all ranks: SIGTERM, and SIGKILL 5 s later; at once when called again.

        mpirun is a child of what horovodrun has become, so their group is told.
        """
        number = signal.SIGKILL if self._asked else signal.SIGTERM
        self._asked = True
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)

    def wait(self, lines: RankLines) -> int:
        """Show the ranks' lines until all have ended; return the launcher's exit status.

        **Raises:** LaunchError if the process that reads our output has ended.
        """

        def relay(stream: IO[bytes]) -> None:
            # A progress bar's \r ends a line too, and stays what it is
            with io.TextIOWrapper(stream, "utf-8", newline="", errors="replace") as text:
                try:
                    lines.relay(text)
                except OSError as error:  # No process reads our output
                    self._unread = error
                    _discard_unread_output()
                    self.terminate()
                    text.read()  # So that horovodrun can write its last words

        assert self.process.stdout and self.process.stderr
        threads = [
            threading.Thread(target=relay, args=[stream], daemon=True)
            for stream in (self.process.stdout, self.process.stderr)
        ]
        for thread in threads:
            thread.start()
        status = self.process.wait()
        # mpirun has the other ends of the pipes until it has ended the ranks. Another process may
        # keep them for longer, such as one that ssh has left.
        while self._has_processes() and any(thread.is_alive() for thread in threads):
            time.sleep(0.05)
        deadline = time.monotonic() + OUTPUT_SECONDS
        for thread in threads:
            thread.join(max(deadline - time.monotonic(), 0))
        if self._unread:
            raise LaunchError(
                "The output must be read to its end. Received an error from the process that reads "
                f"it: {self._unread}. All ranks were ended; write the output to a file.",
                128 + signal.SIGPIPE,
            )
        lines.finish()
        return status

    def _has_processes(self) -> bool:
        """Return True while a process of horovodrun's group lives."""
        try:
            os.killpg(self.process.pid, 0)
        except ProcessLookupError:
            return False
        return True

    def failed(self, status: int, lines: RankLines, advice: str = "") -> LaunchError:
        """Return the error of a launch that ended with a status != 0.

        Args:
            status: of the launcher.
            lines: what it and the ranks have said.
            advice: a sentence for the end of the message.
        """
        first = lines.failure()
        if first is None:
            words = shlex.join(self.launch.command)
            said = lines.launcher_error()
            return LaunchError(f"`{words}` did not start on all ranks, status {status}. {said}", 1)
        where = self.launch.host_of(first.rank)
        parts = [
            f"Rank {first.rank} on {where} {first.how()}; all others were ended.",
            lines.report_of_missing(first.rank),
            advice,
        ]
        return LaunchError(" ".join(part for part in parts if part), first.status)

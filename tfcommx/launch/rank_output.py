"""Run a rank, and end when it ends, also if processes that it started keep its output open.

    horovodrun or mpirun <--pipe-- this process <--pipe-- rank ... and a process that it leaves

Both launchers, and sshd, wait for the end of a rank's pipe, which a process that the rank started
and left behind (a server of TensorBoard, a profiler) holds open until it ends. Here the pipe to the
launcher is held by this process alone. It also turns bytes that are no UTF-8 into U+FFFD, because
horovodrun stops reading at the first one.

Each rank has one of these processes, so this file knows only the standard library.

The launchers mark each line with its rank, such as `[0]<stdout>:`, and add lines of their own.
`RankLines` shows the user less:

    what is written                                        what is shown
    rank 0                                                 the line
    rank r, otherwise                                      rank r: the line
    our own messages (`tfcommx: ...`)                      the line
    on stderr, a line or a traceback of another rank too   that of the first rank
    ranks that say which rank they miss                    once, if that rank gave no reason
    the launcher's messages and its traceback at the end   which rank ended first, and how
"""

from __future__ import annotations

import codecs
import ctypes
import os
import re
import resource
import selectors
import signal
import subprocess
import sys
import threading
import time
from types import FrameType
from typing import IO, NamedTuple

PR_SET_PDEATHSIG = 1  # prctl(2)
# Passed on to the rank, which is in a group of its own so that it receives each once
PASSED_ON = ("SIGHUP", "SIGINT", "SIGQUIT", "SIGTERM", "SIGUSR1", "SIGUSR2")
READ_BYTES = 65_536
# Of Linux, in bytes, unless root has raised it
LARGEST_PIPE = 2**20
# A shell's exit statuses for a command that does not exist, and for one that is no program
NOT_FOUND, NOT_EXECUTABLE = 127, 126


class Relay:
    """Writes what comes from one of the rank's pipes to this process's own.

    Args:
        source: file descriptor of the rank's pipe.
        target: file descriptor of this process.
    """

    def __init__(self, source: int, target: int) -> None:
        self.source, self._target = source, target
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def pass_on(self) -> bool:
        """Read once, and write it; return False at the end, or if no process reads the output."""
        try:
            data = os.read(self.source, READ_BYTES)
            self._write(self._decoder.decode(data, final=not data).encode())
        except OSError:  # Also a pipe that is empty, in `finish`
            return False
        return bool(data)

    def finish(self) -> None:
        """Write what the rank left in the pipe; a process that it left may write without end."""
        os.set_blocking(self.source, False)
        for _ in range(LARGEST_PIPE // READ_BYTES):
            if not self.pass_on():
                return

    def _write(self, data: bytes) -> None:
        while data:
            data = data[os.write(self._target, data) :]


def start(command: list[str]) -> subprocess.Popen[bytes]:
    """Start the rank, which ends with this process, and gets the signals that come for it."""
    prctl = ctypes.CDLL(None).prctl
    early: list[int] = []
    rank: list[subprocess.Popen[bytes]] = []

    def hand_on(number: int, frame: FrameType | None) -> None:
        if rank:
            rank[0].send_signal(number)
        else:
            early.append(number)

    for name in PASSED_ON:
        number = getattr(signal, name)
        if signal.getsignal(number) is not signal.SIG_IGN:  # As by nohup; the rank inherits it
            signal.signal(number, hand_on)
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        close_fds=False,  # Its launcher may have given it some
        process_group=0,
        preexec_fn=lambda: prctl(PR_SET_PDEATHSIG, signal.SIGKILL),
    )
    rank.append(process)
    for number in early:
        process.send_signal(number)
    return process


def relay(process: subprocess.Popen[bytes]) -> int:
    """Pass the rank's output on until it has ended; return its status as `Popen` has it."""
    ended, told = os.pipe()

    def wait() -> None:
        process.wait()
        os.close(told)

    threading.Thread(target=wait, daemon=True).start()
    assert process.stdout and process.stderr
    relays = [Relay(process.stdout.fileno(), 1), Relay(process.stderr.fileno(), 2)]
    with selectors.DefaultSelector() as selector:
        selector.register(ended, selectors.EVENT_READ)
        for stream in relays:
            selector.register(stream.source, selectors.EVENT_READ, stream)
        alive = True
        while alive:
            for key, _ in selector.select():
                if key.data is None:
                    alive = False
                elif not key.data.pass_on():
                    selector.unregister(key.fd)
                    os.close(key.fd)
                    relays.remove(key.data)
    for stream in relays:
        stream.finish()
    return process.wait()


def main() -> None:
    """Run the command of the command line; end as it ends, also by a signal."""
    try:
        process = start(sys.argv[1:])
    except OSError as error:
        print(f"tfcommx: A command that can be run is required. {error}.", file=sys.stderr)
        sys.exit(NOT_FOUND if isinstance(error, FileNotFoundError) else NOT_EXECUTABLE)
    status = relay(process)
    if status < 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        if -status != signal.SIGKILL:
            signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    # Not sys.exit: the thread may hold a lock of the rank's object
    os._exit(status)


if __name__ == "__main__":
    main()


# horovodrun: `[rank]<stdout>:text`; mpirun: `[job,rank]<stdout>: text`
MARK = re.compile(r"\[(?:(\d+),)?(\d+)\]<(stdout|stderr)>:(.*)", re.DOTALL)
MISSING = re.compile(r"tfcommx: rank \d+ ends, because ranks are missing: (.*)", re.DOTALL)
# What a shell writes if its rank was ended; the message at the end says how
ENDED = ("Terminated\n", "Killed\n")
TRACEBACK = "Traceback (most recent call last):"
# How the launchers say which rank ended first: its exit status, or the signal
EXITED = re.compile(r"Process name: (?:\[\S+,)?(\d+)\]?\s+Exit code:\s+(\d+)")
# What horovodrun says as soon as a rank has failed
ENDING = re.compile(r"Process (\d+) exit with status code (\d+)")
SIGNALLED = re.compile(r"process rank (\d+) with PID \d+ on node \S+ exited on\s+signal (\d+)")
UNREACHED = re.compile(
    r"ssh not successful for host (\S+):\n(.*?)\n(?:\n|ssh|Traceback)", re.DOTALL
)
# What TensorFlow's libraries write while they are loaded, before they read TF_CPP_MIN_LOG_LEVEL:
# messages of absl's level INFO, and one that says where messages go
START_UP_MESSAGE = re.compile(
    r"I\d{4} \d\d:\d\d:.*\] |WARNING: All log messages before absl::InitializeLog\(\)|"
    r"To enable the following instructions: "
)
# So many different lines of stderr are remembered
LINES_REMEMBERED = 10_000


def without_start_up_messages(text: str) -> str:
    r"""Return the lines that are no start-up messages of TensorFlow's libraries.

    >>> without_start_up_messages("I0000 00:00:17.45  25 port.cc:153] oneDNN is on.\nMind this\n")
    'Mind this\n'
    """
    lines = text.splitlines(keepends=True)
    return "".join(line for line in lines if not START_UP_MESSAGE.match(line))


class Failure(NamedTuple):
    """The rank that ended first, and not well."""

    rank: int
    # As a shell has it: 128 + the signal's number, if one ended it
    status: int

    def how(self) -> str:
        """Say how it ended."""
        signals = {128 + number: number.name for number in signal.Signals}
        if self.status in signals:
            return f"was killed by {signals[self.status]}"
        return f"ended with status {self.status}"


class RankLines:
    """Shows the ranks' lines, and keeps what the launcher itself says."""

    def __init__(self) -> None:
        # Lines of the launcher itself, and ranks' reports of missing ranks: shown only if needed
        self.own: list[str] = []
        self.missing: list[str] = []
        # What was shown on stderr, and the first rank that wrote it
        self.writers: dict[str, str] = {}
        # By rank: a traceback whose end has not come yet
        self.tracebacks: dict[str, str] = {}
        # Ranks that have failed, and when (monotonic clock); none if mpirun has started them
        self.endings: list[tuple[float, Failure]] = []

    def relay(self, stream: IO[str]) -> None:
        """Show all lines of a stream."""
        unended: tuple[str, str] | None = None
        for line in stream:
            if marked := MARK.match(line):
                rank, kind = marked[2], marked[3]
                text = marked[4].removeprefix(" ") if marked[1] else marked[4]
            elif unended:  # mpirun marks the beginning of a line only: a progress bar goes on
                (rank, kind), text = unended, line
            else:
                self.own.append(line)
                if found := ENDING.match(line):
                    failure = Failure(int(found[1]), int(found[2]))
                    self.endings.append((time.monotonic(), failure))
                continue
            unended = (rank, kind) if text.endswith("\r") else None
            if kind == "stdout":
                print(f"{mark(rank, text)}{text}", end="", flush=True)
            else:
                self.collect(rank, text)

    def collect(self, rank: str, text: str) -> None:
        """Put a rank's traceback together; show every other line at once."""
        begun = self.tracebacks.pop(rank, "")
        if text.startswith(TRACEBACK) or (begun and (text[:1].isspace() or text.endswith(":\n"))):
            self.tracebacks[rank] = begun + text
        else:
            self.show(rank, begun + text)

    def show(self, rank: str, text: str) -> None:
        """Show what a rank has written on stderr, if no other rank has written the same."""
        # Rank 0 leaves its number out of our own messages
        same = text.replace(f"tfcommx: rank {rank}: ", "tfcommx: ", 1)
        if len(self.writers) > LINES_REMEMBERED:
            self.writers.clear()
        if missing := MISSING.match(text):
            self.missing.append(missing[1])
        elif text.strip() and text not in ENDED and self.writers.setdefault(same, rank) == rank:
            print(f"{mark(rank, text)}{text}", end="", file=sys.stderr, flush=True)

    def finish(self) -> None:
        """Show the tracebacks that were cut off."""
        for rank, text in self.tracebacks.items():
            self.show(rank, text)

    def failure(self) -> Failure | None:
        """Return which rank ended first, and how; None if the launcher does not say so."""
        said = "".join(self.own)
        if found := SIGNALLED.search(said):
            return Failure(int(found[1]), 128 + int(found[2]))
        if found := EXITED.search(said):
            return Failure(int(found[1]), int(found[2]))
        return None

    def report_of_missing(self, rank: int) -> str:
        """Return what other ranks say of a rank that could not print anything itself."""
        known = ("(failed: ", f"rank {rank} on ")
        reports = [text.strip() for text in self.missing if not any(map(text.count, known))]
        return reports[0] if reports else ""

    def launcher_error(self) -> str:
        """Return what the launcher says, if no rank has started: what to do, where that is known.

        Its traceback is left out, except the error.
        """
        said = without_start_up_messages("".join(self.own))
        if hosts := UNREACHED.findall(said):
            why = "; ".join(f"{host} ({' '.join(text.split())})" for host, text in hosts)
            return (
                f"Every host must answer ssh. No answer from {why}. `ssh {hosts[0][0]} true` must "
                "return at once and without a password; --ssh-port and --ssh-identity-file say "
                "how. Without ssh, start the ranks by srun, if this is a Slurm job."
            )
        before, found, trace = said.partition(TRACEBACK)
        lines = [line for line in trace.splitlines() if line and not line[0].isspace()]
        return "\n".join([before.strip(), *lines]).strip() if found else before.strip()


def mark(rank: str, text: str) -> str:
    """Return what stands before a line: nothing for rank 0 and our own messages."""
    return "" if rank == "0" or text.startswith("tfcommx: ") else f"rank {rank}: "

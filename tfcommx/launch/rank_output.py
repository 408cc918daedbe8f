"""Run a rank, and end when it ends, even if its background processes keep its output open.

    horovodrun or mpirun <--pipe-- this process <--pipe-- rank ... and a background process

Both launchers, and sshd, wait for the end of a rank's pipe, which a background process of the rank
(a server of TensorBoard, a profiler) holds open until it ends. This process alone holds the pipe to
the launcher. It also turns bytes that are not UTF-8 into U+FFFD, because horovodrun stops reading
at the first one.

Imports only the standard library, because each rank has one of these processes.

The launchers mark each line with its rank, such as `[0]<stdout>:`, and write lines themselves.
`RankLines` shows the user less:

    written                                                shown
    rank 0                                                 the line
    rank r, otherwise                                      rank r: the line
    our own messages (`tfcommx: ...`)                      the line
    on stderr, a line or a traceback of another rank too   that of the first rank
    ranks that say which rank they miss                    once, if that rank gave no reason
    the launcher's messages and its traceback at the end   which rank failed first, and how
"""

import codecs
import contextlib
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
from collections.abc import Callable, Iterable
from types import FrameType
from typing import NamedTuple

PR_SET_PDEATHSIG = 1  # prctl(2)
# Prefix of variables that horovodrun writes on no command line, because it takes them for its own
# secret; ranks on its host inherit them
HIDDEN = "_HOROVOD_SECRET_KEY_"
# Signals forwarded to the rank, which is in a separate group so that it receives each once
PASSED_ON = ("SIGHUP", "SIGINT", "SIGQUIT", "SIGTERM", "SIGUSR1", "SIGUSR2")
READ_BYTES = 65_536
# Largest pipe of Linux, in bytes, unless root has raised it
LARGEST_PIPE = 2**20
# A shell's exit statuses for a command that does not exist, and for one that is not executable
NOT_FOUND, NOT_EXECUTABLE = 127, 126


class Relay:
    """Copies the output of one of the rank's pipes to this process's output; both descriptors."""

    def __init__(self, source: int, target: int) -> None:
        self.source, self._target = source, target
        # Incremental, because a read may end within a character
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._within_line = False

    def pass_on(self) -> bool:
        """Read once, and write it; return False at the end, or if no process reads the output."""
        try:
            data = os.read(self.source, READ_BYTES)
            self._write(self._decoder.decode(data, final=not data).encode())
            if not data:
                self._end_line()
        except OSError:  # Also a pipe that is empty, in `finish`
            return False
        return bool(data)

    def finish(self) -> None:
        """Write the rest of the pipe."""
        # Without waiting, because a background process may keep the pipe open
        os.set_blocking(self.source, False)
        # Bounded, because a background process may write forever
        for _ in range(LARGEST_PIPE // READ_BYTES):
            if not self.pass_on():
                break
        with contextlib.suppress(OSError):  # No process reads the output
            self._end_line()

    def _end_line(self) -> None:
        # Because the next rank's mark would otherwise continue the line
        if self._within_line:
            self._write(b"\n")

    def _write(self, data: bytes) -> None:
        if data:
            self._within_line = not data.endswith(b"\n")
        # In a loop, because a pipe may take fewer bytes than it is given
        while data:
            data = data[os.write(self._target, data) :]


def ends_with_this_process(number: int) -> Callable[[], object]:
    """Return a child's `preexec_fn`, by which it receives a signal when this process ends."""
    # Looked up before the fork: in the child, a lock that another thread holds is never released
    prctl = ctypes.CDLL(None).prctl
    return lambda: prctl(PR_SET_PDEATHSIG, number)


def start(command: list[str]) -> subprocess.Popen[bytes]:
    """Start the rank, which ends with this process; forward this process's signals to it."""
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
        close_fds=False,  # Because the launcher may have passed some to the rank
        process_group=0,
        preexec_fn=ends_with_this_process(signal.SIGKILL),
    )
    rank.append(process)
    # Forwarded only now, because the rank did not exist when they came
    for number in early:
        process.send_signal(number)
    return process


def relay(process: subprocess.Popen[bytes]) -> int:
    """Copy the rank's output until it has ended; return its status as in `Popen`."""
    ended, end_writer = os.pipe()

    def wait() -> None:
        process.wait()
        os.close(end_writer)

    # By a thread and not by the ends of the pipes, which the rank's background processes may keep
    # open
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
    """Run the command of the command line; end with its status or by its signal."""
    for name in [name for name in os.environ if name.startswith(HIDDEN)]:
        os.environ[name.removeprefix(HIDDEN)] = os.environ.pop(name)
    try:
        process = start(sys.argv[1:])
    except OSError as error:
        print(f"tfcommx: A command that can be run is required. {error}.", file=sys.stderr)
        sys.exit(NOT_FOUND if isinstance(error, FileNotFoundError) else NOT_EXECUTABLE)
    status = relay(process)
    if status < 0:
        with contextlib.suppress(OSError):  # No process reads the output
            os.write(2, f"tfcommx: signal {-status} has ended this rank\n".encode())
        # This process must leave no core file beside the rank's
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        if -status != signal.SIGKILL:  # SIGKILL's handler cannot be set
            signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    # Not sys.exit, because the thread may hold a lock of the rank's object
    os._exit(status)


if __name__ == "__main__":
    main()


# horovodrun: `[rank]<stdout>:text`; mpirun: `[job,rank]<stdout>: text`; before it, if the user has
# asked for it, the time: `Mon Nov 30 17:17:50 2026`, mpirun's in brackets
MARK = re.compile(
    r"(?:\[?(\w+ \w+ [\d ]\d [\d:]+ \d+)\]?)?\[(?:(\d+),)?(\d+)\]<(stdout|stderr)>:(.*)", re.DOTALL
)
MISSING = re.compile(r"tfcommx: rank (\d+) ends, because ranks are missing: (.*)", re.DOTALL)
# In such a report: a rank that an uncaught exception ended, for which Python's exit status is 1
FAILED = re.compile(r"rank (\d+) on \S+ \(failed: ")
FAILED_STATUS = 1
# Written by the watcher of such a rank, which ended slowly
SLOW = re.compile(r"tfcommx: rank (\d+) has failed, and is killed")
# Lines of a shell whose rank was ended, hidden because the last message gives the signal
ENDED = ("Terminated\n", "Killed\n")
TRACEBACK = "Traceback (most recent call last):"
# Written by `main`, because mpirun with --enable-recovery does not report such a rank
KILLED = re.compile(r"tfcommx: signal (\d+) has ended this rank\n")
# The launchers' report of the rank that ended first: its exit status; SIGNALLED: its signal
EXITED = re.compile(r"Process name: (?:\[\S+,)?(\d+)\]?\s+Exit code:\s+(\d+)")
# horovodrun's report of a failed rank, written at once
ENDING = re.compile(r"Process (\d+) exit with status code (\d+)")
SIGNALLED = re.compile(r"process rank (\d+) with PID \d+ on node \S+ exited on\s+signal (\d+)")
# Open MPI's report of a rank that has called MPI_Abort
ABORTING = re.compile(r'process rank (\d+) with PID \d+ on node \S+\s+calling\s+"abort"')
UNREACHED = re.compile(
    r"ssh not successful for host (\S+):\n(.*?)\n(?:\n|ssh|Traceback)", re.DOTALL
)
# horovodrun's message about an option that it does not know
REFUSED = "horovodrun: error: "
# Messages of TensorFlow's libraries while they are loaded, before they read TF_CPP_MIN_LOG_LEVEL:
# absl's level INFO, and one about the destination of messages
START_UP_MESSAGE = re.compile(
    r"I\d{4} \d\d:\d\d:.*\] |WARNING: All log messages before absl::InitializeLog\(\)|"
    r"To enable the following instructions: "
)
# Number of different lines of stderr that are remembered
LINES_REMEMBERED = 10_000


def without_start_up_messages(text: str) -> str:
    r"""Return the lines that are not start-up messages of TensorFlow's libraries.

    >>> without_start_up_messages("I0000 00:00:17.45  25 port.cc:153] oneDNN is on.\nMind this\n")
    'Mind this\n'
    """
    lines = text.splitlines(keepends=True)
    return "".join(line for line in lines if not START_UP_MESSAGE.match(line))


class Failure(NamedTuple):
    """The first rank that failed."""

    rank: int
    # As in a shell: 128 + the signal's number, if a signal ended it
    status: int

    def how(self) -> str:
        signals = {128 + number: number.name for number in signal.Signals}
        if self.status in signals:
            return f"was killed by {signals[self.status]}"
        return f"ended with status {self.status}"


class RankLines:
    """Shows the ranks' lines, and keeps the launcher's."""

    def __init__(self) -> None:
        # Lines of the launcher itself, and ranks' reports of missing ranks: shown only if needed
        self.own: list[str] = []
        self.missing: list[str] = []
        # True once a rank has written a line; time of the last one, with a space, or ""
        self.has_ranks, self.time = False, ""
        # Ranks that ended because others were missing, and those that failed and were killed
        self.followers: set[int] = set()
        self.slow: set[int] = set()
        # Line shown on stderr -> the first rank that wrote it
        self.writers: dict[str, str] = {}
        # Rank -> its traceback, while its end has not been received
        self.tracebacks: dict[str, str] = {}
        # Rank -> the signal that ended it
        self.killed: dict[str, int] = {}
        # Failed ranks with the time (monotonic clock); none if mpirun has started them
        self.endings: list[tuple[float, Failure]] = []

    def relay(self, stream: Iterable[str]) -> None:
        unended: tuple[str, str] | None = None
        for line in stream:
            if marked := MARK.match(line):
                self.has_ranks = True
                self.time, rank, kind = f"{marked[1]} " if marked[1] else "", marked[3], marked[4]
                text = marked[5].removeprefix(" ") if marked[2] else marked[5]
            elif unended:  # mpirun marks only the beginning of a line: a progress bar continues
                (rank, kind), text = unended, line
            else:
                self.own.append(line)
                if match := ENDING.match(line):
                    failure = Failure(int(match[1]), int(match[2]))
                    self.endings.append((time.monotonic(), failure))
                continue
            unended = (rank, kind) if text.endswith("\r") else None
            if kind == "stdout":
                print(f"{self.time}{mark(rank, text)}{text}", end="", flush=True)
            else:
                self.collect(rank, text)

    def collect(self, rank: str, text: str) -> None:
        """Assemble a rank's traceback; show every other line at once."""
        if killed := KILLED.match(text):
            self.killed[rank] = int(killed[1])
            return
        if slow := SLOW.match(text):
            self.slow.add(int(slow[1]))
            return
        begun = self.tracebacks.pop(rank, "")
        if text.startswith(TRACEBACK) or (begun and (text[:1].isspace() or text.endswith(":\n"))):
            self.tracebacks[rank] = begun + text
        else:
            self.show(rank, begun + text)

    def show(self, rank: str, text: str) -> None:
        """Show a rank's text on stderr, unless another rank has written the same."""
        # Rank 0 leaves its number out of our messages
        same = text.replace(f"tfcommx: rank {rank}: ", "tfcommx: ", 1)
        if len(self.writers) > LINES_REMEMBERED:  # A run of weeks must not fill the memory
            self.writers.clear()
        if missing := MISSING.match(text):
            self.followers.add(int(missing[1]))
            self.missing.append(missing[2])
        elif text.strip() and text not in ENDED and self.writers.setdefault(same, rank) == rank:
            print(f"{self.time}{mark(rank, text)}{text}", end="", file=sys.stderr, flush=True)

    def finish(self) -> None:
        """Show the tracebacks that were cut off."""
        # A copy, because a thread may still read a pipe that a background process holds open
        for rank, text in list(self.tracebacks.items()):
            self.show(rank, text)

    def failure(self, status: int = FAILED_STATUS) -> Failure | None:
        """Return the first rank that failed, and its status; None if the launcher reports none.

        Args:
            status: the launcher's, != 0, which is that of a rank that has called MPI_Abort.
        """
        text = "".join(self.own)
        if match := SIGNALLED.search(text):
            first = Failure(int(match[1]), 128 + int(match[2]))
        elif match := EXITED.search(text):
            first = Failure(int(match[1]), int(match[2]))
        elif match := ABORTING.search(text):
            first = Failure(int(match[1]), status)
        else:
            return None
        # On busy cores a rank that failed may need longer to end than those that it ends
        reported = [int(rank) for report in self.missing for rank in FAILED.findall(report)]
        failed = {*reported, *self.slow}
        if first.rank in self.followers and (causes := failed - self.followers):
            return Failure(min(causes), FAILED_STATUS)
        # If several ranks fail, each is told of the others, and killed if it is still ending
        if first.rank in failed and first.status == 128 + signal.SIGKILL:
            return Failure(first.rank, FAILED_STATUS)
        return first

    def report_of_missing(self, rank: int) -> str:
        """Return another rank's report of a rank that could not print anything itself."""
        own_reasons = ("(failed: ", f"rank {rank} on ")
        reports = [text.strip() for text in self.missing if not any(map(text.count, own_reasons))]
        return reports[0] if reports else ""

    def launcher_error(self) -> str:
        """Return the launcher's message, if no rank has started, with a remedy if one is known."""
        output = without_start_up_messages("".join(self.own))
        if hosts := UNREACHED.findall(output):
            why = "; ".join(f"{host} ({' '.join(text.split())})" for host, text in hosts)
            return (
                f"Every host must answer ssh. No answer from {why}. `ssh {hosts[0][0]} true` must "
                "return at once and without a password; --ssh-port and --ssh-identity-file say "
                "how. Without ssh, start the ranks by srun, if this is a Slurm job."
            )
        # Without horovodrun's options, which argparse lists before it names the wrong one
        output = output[max(output.find(REFUSED), 0) :]
        # Without a traceback's frames, because they are the launcher's
        before, separator, trace = output.partition(TRACEBACK)
        lines = [line for line in trace.splitlines() if line and not line[0].isspace()]
        return "\n".join([before.strip(), *lines]).strip() if separator else before.strip()


def mark(rank: str, text: str) -> str:
    """Return the prefix of a line: empty for rank 0 and our messages."""
    return "" if rank == "0" or text.startswith("tfcommx: ") else f"rank {rank}: "

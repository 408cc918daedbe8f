"""Start processes with horovodrun on this machine; show what a user wants of their output.

horovodrun marks each line with its rank, such as `[0]<stdout>:`, and adds lines of its own. Here
rank 0's output is shown as it is, that of other ranks with their number, and an error once:

    what is written                                        what is shown
    rank 0, stdout                                         the line
    rank r, otherwise                                      rank r: the line
    our own messages (`tfcommx: ...`)                      the line
    a line or a traceback that another rank wrote too      that of the first rank
    ranks that say which rank they miss                    once, if that rank gave no reason
    horovodrun's messages and its traceback at the end     which rank ended first, and how
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path
from types import FrameType
from typing import IO

from tfcommx.cli.environment import quiet_horovod
from tfcommx.training.signals import STOP_FILE

MARK = re.compile(r"\[(\d+)\]<(stdout|stderr)>:(.*)", re.DOTALL)
MISSING = re.compile(r"tfcommx: rank \d+ ends, because ranks are missing: (.*)", re.DOTALL)
# What a shell writes if its rank was ended; the message at the end says how
ENDED = ("Terminated\n", "Killed\n")
TRACEBACK = "Traceback (most recent call last):"
# Exit status of a rank that has printed an error that the user can fix
USER_ERROR = 2
FIRST = re.compile(r"Process name: (\d+)\s+Exit code: (\d+)")


class LaunchError(RuntimeError):
    """A launch that has failed; the message says which rank ended first."""


class Output:
    """What is shown of the lines that horovodrun forwards."""

    def __init__(self) -> None:
        # Lines of horovodrun itself, and ranks' reports of missing ranks: shown only if needed
        self.own: list[str] = []
        self.missing: list[str] = []
        # What was shown on stderr, and the first rank that wrote it
        self.writers: dict[str, str] = {}
        # By rank: a traceback whose end has not come yet
        self.tracebacks: dict[str, str] = {}

    def relay(self, stream: IO[str]) -> None:
        """Show all lines of a stream."""
        for line in stream:
            marked = MARK.match(line)
            if not marked:
                self.own.append(line)
            elif marked[1] == "0" and marked[2] == "stdout":
                print(marked[3], end="", flush=True)
            else:
                self.collect(marked[1], marked[3])

    def collect(self, rank: str, text: str) -> None:
        """Put a rank's traceback together; show every other line at once."""
        begun = self.tracebacks.pop(rank, "")
        if text.startswith(TRACEBACK) or (begun and (text[:1].isspace() or text.endswith(":\n"))):
            self.tracebacks[rank] = begun + text
        else:
            self.show(rank, begun + text)

    def show(self, rank: str, text: str) -> None:
        """Show what a rank has written, if no other rank has written the same."""
        # Rank 0 leaves its number out of our own messages
        same = text.replace(f"tfcommx: rank {rank}: ", "tfcommx: ", 1)
        if missing := MISSING.match(text):
            self.missing.append(missing[1])
        elif text.strip() and text not in ENDED and self.writers.setdefault(same, rank) == rank:
            by = "" if text.startswith("tfcommx: ") else f"rank {rank}: "
            print(f"{by}{text}", end="", file=sys.stderr, flush=True)

    def finish(self) -> None:
        """Show the tracebacks that were cut off."""
        for rank, text in self.tracebacks.items():
            self.show(rank, text)

    def refuse(self, status: int) -> None:
        """End a launch that has failed.

        **Raises:** LaunchError; SystemExit with status 2 if a rank printed a user error.
        """
        first = FIRST.search("".join(self.own))
        if not first:
            sys.stderr.writelines(self.own)
            raise LaunchError(f"horovodrun ended with status {status}.")
        rank, status = int(first[1]), int(first[2])
        if status == USER_ERROR:
            sys.exit(USER_ERROR)
        signals = {128 + number: number.name for number in signal.Signals}
        how = f"was killed by {signals[status]}" if status in signals else "failed"
        # What other ranks report of ranks that could not print anything themselves
        known = ("(failed: ", f"rank {rank} on ")
        reports = [f"{text.strip()} " for text in self.missing if not any(map(text.count, known))]
        raise LaunchError(
            f"Rank {rank} {how}; all others were ended. {''.join(reports[:1])}"
            "Add --resume to continue from the last checkpoint."
        )


def horovodrun(processes: int, words: list[str], folder: Path, saves: bool = True) -> None:
    """Run `tfcommx WORDS...` in several processes on this machine, and wait for their end.

    The first SIGINT (Ctrl-C), SIGTERM or SIGHUP asks the ranks to save and stop, by the file `stop`
    in the run's folder; the second one ends them. horovodrun alone kills them 5 s after the first.

    Args:
        processes: number of ranks, >= 1.
        words: command and options of `tfcommx`; `--terminal` is added if there is one.
        folder: of the run.
        saves: whether the ranks save when they are asked to stop; else the first signal ends them.

    **Raises:** LaunchError if a rank fails; SystemExit if a rank printed an error that the user can
    fix.
    """
    if sys.stdout.isatty():
        words = [*words, "--terminal", os.ttyname(sys.stdout.fileno())]
    quiet_horovod()
    process = subprocess.Popen(
        [*_launcher(processes), sys.executable, "-m", "tfcommx.cli.main", *words],
        text=True,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        # Ctrl-C is for this process alone: horovodrun would kill the ranks
        start_new_session=True,
    )
    stop = Stop(process, folder, saves)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, stop.ask)
    output = Output()
    status = _follow(process, output)
    output.finish()
    if stop.number:
        sys.exit(128 + stop.number)
    if status:
        output.refuse(status)


class Stop:
    """Stops a launch when this process is asked to end."""

    def __init__(self, process: subprocess.Popen[str], folder: Path, saves: bool = True) -> None:
        self.process, self.file, self.saves = process, folder / STOP_FILE, saves
        # The signal that came first; 0: none
        self.number = 0
        # Of an earlier run
        self.file.unlink(missing_ok=True)

    def ask(self, number: int, frame: FrameType | None) -> None:
        """Ask the ranks to save and stop; end them when asked again, or if they save nothing."""
        again, self.number = self.number, self.number or number
        if again or not self.saves:
            self.process.terminate()
            return
        print("Saving before the run stops. Once more ends it at once.", file=sys.stderr)
        try:
            self.file.parent.mkdir(parents=True, exist_ok=True)
            self.file.touch()
        except OSError:
            self.process.terminate()


def _launcher(processes: int) -> list[str]:
    """Return the beginning of the command that starts the ranks."""
    program = shutil.which("horovodrun", path=f"{Path(sys.executable).parent}:{os.defpath}")
    if program is None:
        raise LaunchError(
            f"horovodrun is required beside {sys.executable}. Install Horovod in this environment."
        )
    # Horovod 0.28 starts a rank on every slot, whatever -np says
    return [program, "-np", str(processes), "-H", f"localhost:{processes}", "--gloo"]


def _follow(process: subprocess.Popen[str], output: Output) -> int:
    """Show a process's output until it ends; return its exit status."""

    def relay(stream: IO[str]) -> None:
        try:
            output.relay(stream)
        except OSError:  # Nobody reads the output
            process.terminate()

    threads = [
        threading.Thread(target=relay, args=[stream], daemon=True)
        for stream in (process.stdout, process.stderr)
    ]
    for thread in threads:
        thread.start()
    status = process.wait()
    for thread in threads:
        thread.join()
    return status

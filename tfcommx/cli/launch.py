"""Start processes with horovodrun on this machine, and show of their output what a user wants.

horovodrun marks each line with its rank, such as `[0]<stdout>:`, and adds lines of its own. Here
rank 0's output is shown as it is, that of other ranks with their number, and an error once:

    what is written                                        what is shown
    rank 0, stdout                                         the line
    rank r, otherwise                                      rank r: the line
    our own messages (`tfcommx: ...`)                      the line
    ranks that say which rank they miss                    once, if that rank has not told why
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
from typing import IO

MARK = re.compile(r"\[(\d+)\]<(stdout|stderr)>:(.*)", re.DOTALL)
MISSING = re.compile(r"tfcommx: rank \d+ ends, because ranks are missing: (.*)", re.DOTALL)
FIRST = re.compile(r"Process name: (\d+)\s+Exit code: (\d+)")


class LaunchError(RuntimeError):
    """A launch that has failed; the message says which rank ended first."""


class Output:
    """What is shown of the lines that horovodrun forwards."""

    def __init__(self) -> None:
        # horovodrun's own lines, and what ranks say of missing ranks: shown only if needed
        self.own: list[str] = []
        self.missing: list[str] = []

    def show(self, line: str) -> None:
        """Show one line of horovodrun's output, or keep it for the end."""
        marked = MARK.match(line)
        if not marked:
            self.own.append(line)
            return
        rank, stream, text = marked.groups()
        if missing := MISSING.match(text):
            self.missing.append(missing[1])
        elif stream == "stdout" and rank == "0":
            print(text, end="", flush=True)
        elif text.strip():
            by = "" if text.startswith("tfcommx: ") else f"rank {rank}: "
            print(f"{by}{text}", end="", file=sys.stderr, flush=True)

    def relay(self, stream: IO[str]) -> None:
        """Show all lines of a stream."""
        for line in stream:
            self.show(line)

    def refuse(self, status: int) -> None:
        """End a launch that has failed.

        **Raises:** LaunchError; SystemExit with status 2 if a rank told a user error.
        """
        first = FIRST.search("".join(self.own))
        if not first:
            sys.stderr.writelines(self.own)
            raise LaunchError(f"horovodrun ended with status {status}.")
        rank, code = first.groups()
        if code == "2":
            sys.exit(2)
        told = next((text for text in self.missing if "(failed: " not in text), "")
        raise LaunchError(
            f"Rank {rank} ended first, with status {code}. {told.strip() or 'All were ended.'}"
        )


def horovodrun(processes: int, words: list[str]) -> None:
    """Run `tfcommx WORDS...` in several processes on this machine, and wait for their end.

    Args:
        processes: number of ranks, >= 1.
        words: command and options of `tfcommx`; `--terminal` is added if there is one.

    **Raises:** LaunchError if a rank fails; SystemExit if a rank told what the user can put right.
    """
    program = shutil.which("horovodrun", path=f"{Path(sys.executable).parent}:{os.defpath}")
    if program is None:
        raise LaunchError(
            f"horovodrun is required beside {sys.executable}. Install Horovod in this environment."
        )
    if sys.stdout.isatty():
        words = [*words, "--terminal", os.ttyname(sys.stdout.fileno())]
    # Horovod 0.28 starts a rank on every slot, whatever -np says
    place = ["-np", str(processes), "-H", f"localhost:{processes}", "--gloo"]
    command = [program, *place, sys.executable, "-m", "tfcommx.cli.main", *words]
    process = subprocess.Popen(
        command, text=True, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    signal.signal(signal.SIGTERM, lambda number, frame: process.terminate())
    output = Output()
    relays = [
        threading.Thread(target=output.relay, args=[stream], daemon=True)
        for stream in (process.stdout, process.stderr)
    ]
    for relay in relays:
        relay.start()
    try:
        status = process.wait()
    except KeyboardInterrupt:
        # The terminal has sent it to horovodrun too, which ends the ranks
        process.wait()
        sys.exit(128 + signal.SIGINT)
    for relay in relays:
        relay.join()
    if status:
        output.refuse(status)

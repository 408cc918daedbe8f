"""Run short commands: until they end, whatever they leave, and never for longer than allowed."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

# From a request to end to the end by force, for a command that is given time
GRACE_SECONDS = 10.0


class Ended(NamedTuple):
    """A command that has ended."""

    # As `Popen` has it: < 0 after a signal
    status: int
    output: str
    errors: str
    # Whether it took longer than allowed, and was ended with its children
    late: bool = False


def run_to_end(
    words: Sequence[str] | str,
    seconds: float,
    env: Mapping[str, str] | None = None,
    folder: Path | None = None,
    grace: float = 0.0,
) -> Ended:
    """Run a command without input, in a session of its own; return its status and output.

    The output goes to files: with pipes, a process that the command leaves in the background, which
    has them open, would be waited for, also after the command was killed.

    Args:
        words: the command; a string is given to the shell.
        seconds: after which it is killed together with its children, > 0.
        env: its environment; None: this process's.
        folder: where it runs; None: here.
        grace: seconds between SIGTERM to the command and SIGKILL to all, >= 0.

    Returns:
        How it ended. What is no UTF-8 in its output is replaced.

    **Ranks:** local. **Raises:** OSError if it cannot be started.
    """
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
        process = subprocess.Popen(
            words,
            shell=isinstance(words, str),
            env=env,
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=errors,
            # Ctrl-C is for this process, and the whole group can be killed
            start_new_session=True,
        )
        late = False
        try:
            process.wait(seconds)
        except subprocess.TimeoutExpired:
            late = True
            if grace:
                process.terminate()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(grace)
        finally:
            if late or process.poll() is None:  # Also after an exception, such as Ctrl-C
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        texts = []
        for file in (output, errors):
            file.seek(0)
            texts.append(file.read().decode(errors="replace"))
        return Ended(process.returncode, *texts, late)

"""Requests to save and stop a run: signals, or a file."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from pathlib import Path
from types import FrameType
from typing import Any

# mpirun forwards SIGUSR1 to the ranks, and ends them for SIGTERM
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
# In the run's folder; `touch` it to stop the run
STOP_FILE = "stop"


class StopRequests:
    """Catches the first signal inside its `with` block; a second one has its usual effect.

    Args:
        folder: folder of the run, whose file `stop` counts as a signal; None except on rank 0.

    **Ranks:** local; the ranks agree afterwards.
    """

    def __init__(self, folder: Path | None) -> None:
        self.file = None if folder is None else folder / STOP_FILE
        self.reason = ""
        self._before: dict[signal.Signals, Any] = {}
        self._pid = os.getpid()

    def __enter__(self) -> StopRequests:
        # Python allows signal handlers only in the main thread
        if threading.current_thread() is threading.main_thread():
            self._before = {
                number: signal.signal(number, self._catch)
                for number in SIGNALS
                # A shell's script starts a background job with SIGINT ignored, so that Ctrl-C ends
                # the script's other commands alone
                if signal.getsignal(number) is not signal.SIG_IGN
            }
        return self

    def __exit__(self, *exception: object) -> None:
        self._restore()

    def asked(self) -> bool:
        """Return True if this rank was asked to stop."""
        # Not `Path.exists`, which raises errors of a network file system, such as ESTALE
        if self.file is not None and os.path.exists(self.file):
            self.reason = self.reason or f"the file {self.file}"
            # It would stop the next run, too
            with contextlib.suppress(OSError):
                self.file.unlink()
        return bool(self.reason)

    def _catch(self, number: int, frame: FrameType | None) -> None:
        self.reason = signal.Signals(number).name
        self._restore()
        if os.getpid() != self._pid:  # A forked child, such as a worker that reads samples, ends
            os.kill(os.getpid(), number)

    def _restore(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}

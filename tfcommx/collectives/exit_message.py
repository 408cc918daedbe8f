"""A rank's last message to the process that holds the centres of elastic averaging."""

from __future__ import annotations

import atexit
import builtins
import functools
import os
import sys
import threading
import time
from typing import NoReturn

import numpy as np

from tfcommx.collectives import mpi
from tfcommx.launch.launcher import launcher

# The tag of the message, on no centre's channel
END = 0
# For it to be on its way
END_SECONDS = 2.0
# Between two looks whether it has left
POLL_SECONDS = 0.0005


class ExitStatus:
    """Notes what this process will end with: Python tells it nobody at the end."""

    def __init__(self) -> None:
        self._code: object = None
        self._exit = sys.exit

    def watch(self) -> None:
        """Note what is given to `sys.exit` from now on."""

        @functools.wraps(self._exit)
        def exit(code: str | int | None = None, /) -> NoReturn:
            if threading.current_thread() is threading.main_thread():
                self._code = code
            self._exit(code)

        # `exit` and `quit` are the interpreter's own; a SystemExit that is raised is not seen
        sys.exit = exit
        for name in ("exit", "quit"):
            setattr(builtins, name, exit)

    def get(self) -> int:
        """Return the status of a process that ends now: that of the last `sys.exit`.

        1 for a message in its place, and after an exception that nothing has caught.
        """
        if hasattr(sys, "last_value"):
            return 1
        if self._code is None or isinstance(self._code, int):
            return int(self._code or 0)
        return 1


def tell_the_centre_at_exit() -> None:
    """Tell the process that holds the centres, at this rank's end, how it ends. **Ranks:** each."""
    status = ExitStatus()
    status.watch()
    atexit.register(_say_end, os.getpid(), status)


def _say_end(pid: int, status: ExitStatus) -> None:
    if os.getpid() != pid:  # A forked child is not the rank
        return
    messages = mpi.MpiPointToPoint(watched=True, lasting=False, with_centre=True)
    request = messages.send(np.array([status.get()], np.int32), launcher().size, END)
    until = time.monotonic() + END_SECONDS
    while not messages.done(request) and time.monotonic() < until:
        time.sleep(POLL_SECONDS)

"""A rank's last message to the process that holds the centres of elastic averaging."""

from __future__ import annotations

import atexit
import os
import time

import numpy as np

from tfcommx.collectives import mpi
from tfcommx.launch.interpreter import ExitStatus
from tfcommx.launch.launcher import launcher

# Tag of the message, on no centre's channel
END = 0
# Seconds to wait until the message is sent
END_SECONDS = 2.0
# Seconds between two checks whether it is sent
POLL_SECONDS = 0.0005


def tell_the_centre_at_exit() -> None:
    """Send this rank's exit status to the process that holds the centres. **Ranks:** each."""
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

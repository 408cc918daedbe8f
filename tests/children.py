"""A child that a test forks, and its end by a signal."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def default_effect(number: signal.Signals) -> Iterator[None]:
    """Give a signal its default effect, which a handler of the test process would replace."""
    before = signal.signal(number, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(number, before)


def signal_that_ends_child(number: signal.Signals) -> int | None:
    """Fork a child that sleeps, send it a signal, and return the signal that ended it."""
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        try:
            os.write(writing, b"ready")  # Python drops a signal that a fork receives earlier
            time.sleep(5)
        finally:
            os._exit(0)
    os.read(reading, 5)
    os.kill(child, number)
    _, status = os.waitpid(child, 0)
    os.close(reading)
    os.close(writing)
    return os.WTERMSIG(status) if os.WIFSIGNALED(status) else None

"""SIGTERM to a rank that takes snapshots, at any moment and any number of times."""

from __future__ import annotations

import os
import signal
import threading
import time

from children import default_effect, signal_that_ends_child

from tfcommx.checkpoint.snapshots import Snapshots


def test_two_signals_do_not_hang_a_rank() -> None:
    """The handler set an Event: a second signal during that call waited for its lock forever.

    A launcher sends SIGTERM to a rank, and so does the host that is to be taken away.
    """
    child = os.fork()
    if not child:
        status = 1
        try:
            signals_without_pause()
            status = 0
        finally:
            os._exit(status)
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            assert status == 0
            return
        time.sleep(0.02)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    raise AssertionError("hangs after two signals")


def supervised() -> Snapshots:
    snapshots = object.__new__(Snapshots)
    snapshots.supervised, snapshots._leave = object(), False  # type: ignore[assignment]
    return snapshots


def test_a_forked_child_ends_at_its_first_signal() -> None:
    """Keras's PyDataset with `use_multiprocessing` ends its workers by SIGTERM."""
    snapshots = supervised()
    with default_effect(signal.SIGTERM), snapshots.leaving_on_sigterm():
        assert signal_that_ends_child(signal.SIGTERM) == signal.SIGTERM
    assert not snapshots._leave


def signals_without_pause() -> None:
    """Send this process SIGTERM again and again, while its main thread handles them."""
    snapshots = supervised()
    end = time.monotonic() + 2

    def send() -> None:
        while time.monotonic() < end:
            os.kill(os.getpid(), signal.SIGTERM)

    with snapshots.leaving_on_sigterm():
        senders = [threading.Thread(target=send) for _ in range(2)]
        for sender in senders:
            sender.start()
        while any(sender.is_alive() for sender in senders):
            snapshots.leave()
        assert snapshots._leave

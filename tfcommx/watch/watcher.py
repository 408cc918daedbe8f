"""The watcher: a small process beside each rank that notices if another rank is missing.

A process of its own, because the rank may hold Python's lock for long (tracing, compilation)
without being in trouble, and because a stopped rank cannot speak for itself. Started by
liveness.py; knows only the standard library. It has at most 7 connections: what it says on them,
and what it concludes, is in watch_protocol.py; here are the sockets and the clock.

    rank 0 -- watcher 0 ===== TCP, neighbours ===== watcher 1 -- rank 1
       socket pair
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import queue
import selectors
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from tfcommx.launch.handshake import NO_PARTNER, Caller, Entrance, Handshake
from tfcommx.watch.protocol import GATHER_SECONDS, MISSING, WatchProtocol

# Messages "alive" in `limit` seconds, and what the ranks do in `stall_seconds`
BEATS = 10
# For one address to answer, and for whoever connects to prove who it is
DIAL_SECONDS = 2.0
# What is kept for a neighbour that does not read; more is dropped
LARGEST_PENDING = 65536
# Bytes of a neighbour's line; one that sends a longer one is no watcher
LARGEST_LINE = 65536


class Watcher:
    """The sockets of one watcher; `run` is its loop.

    Args:
        job: what WatchProtocol takes; pid and token; addresses (best first) and ports of the
            neighbours.
        listening: the socket whose port the neighbours know.
        to_rank: leads to the rank's process.
    """

    def __init__(
        self, job: dict[str, Any], listening: socket.socket, to_rank: socket.socket
    ) -> None:
        self.pid = job["pid"]
        self.handshake = Handshake(job["token"], "tfcommx watch 1")
        self.member = WatchProtocol(job, time.monotonic())
        places = zip(job["addresses"], job["ports"], strict=True)
        self.places = dict(zip(self.member.neighbours, places, strict=True))
        self.links: dict[int, socket.socket] = {}
        # Those that have said something on their connection: until then it may be one that was
        # given up while it waited to be accepted
        self.greeted: set[int] = set()
        self.redial = threading.Event()
        # Neighbours that a connection was made to, and what threads give the loop to do
        self.dialled: set[int] = set()
        self.from_threads: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        # Of each neighbour the beginning of a line whose end has not come, and what is to be sent
        self.rests: dict[int, bytes] = {}
        self.pending: dict[int, bytes] = {}
        self.to_rank, self.rank_rest = to_rank, b""
        periods = (job["limit"], job["stall_seconds"], job["stall_limit"])
        self.beat_seconds = min(period for period in periods if period) / BEATS
        self.select = selectors.DefaultSelector()
        woken, self.wake = socket.socketpair()
        self.select.register(woken, selectors.EVENT_READ, self.do_for_threads)
        self.select.register(to_rank, selectors.EVENT_READ, self.hear_rank)
        Entrance(
            listening,
            self.handshake,
            DIAL_SECONDS,
            lambda caller: self.in_loop(functools.partial(self.let_in, caller)),
        )

    # --- connections --------------------------------------------------------------------

    def dial_all(self) -> None:
        """Connect to the lower neighbours, again until it works. In a thread, because it waits."""
        lower = [other for other in self.places if other < self.member.rank]
        while True:
            while waiting := [other for other in lower if other not in self.dialled]:
                for other in waiting:
                    self.dial(other)
                time.sleep(0.2)
            self.redial.wait()
            self.redial.clear()

    def dial(self, other: int) -> None:
        addresses, port = self.places[other]
        for address in addresses:
            with contextlib.suppress(*NO_PARTNER), contextlib.ExitStack() as unless_kept:
                link = socket.create_connection((address, port), timeout=DIAL_SECONDS)
                unless_kept.callback(link.close)
                rank = self.handshake.call(link, self.member.rank, time.monotonic() + DIAL_SECONDS)
                if rank == other:  # Another host may have the same address and port
                    unless_kept.pop_all()
                    self.dialled.add(other)
                    self.in_loop(functools.partial(self.connected, other, link))
                    return

    def in_loop(self, work: Callable[[], None]) -> None:
        self.from_threads.put(work)
        self.wake.send(b"w")

    def do_for_threads(self, woken: socket.socket) -> None:
        woken.recv(64)
        while not self.from_threads.empty():
            self.from_threads.get()()

    def let_in(self, caller: Caller) -> None:
        other = caller.said
        try:
            if other not in self.places or other in self.rests:
                raise ValueError(other)
            caller.answer(self.member.rank)
        except (OSError, TypeError, ValueError):
            caller.connection.close()
        else:
            self.connected(other, caller.connection)

    def connected(self, other: int, link: socket.socket) -> None:
        link.setblocking(False)
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.links[other], self.rests[other] = link, b""
        self.select.register(link, selectors.EVENT_READ, lambda link: self.hear(other))
        self.member.connected(other, time.monotonic())

    def forget(self, other: int) -> None:
        """Connect again: the other side may have given the connection up and tried another."""
        self.member.disconnected(other)
        self.rests.pop(other)
        if other in self.dialled:
            self.dialled.remove(other)
            self.redial.set()

    def send_all(self) -> None:
        """Send what the member has said, as far as it can be sent now."""
        for other, line in self.member.outbox:
            before = self.pending.get(other, b"")
            if other in self.links and len(before) < LARGEST_PENDING:
                self.pending[other] = before + line.encode() + b"\n"
        for other, data in list(self.pending.items()):
            # `hear` notices a failure
            with contextlib.suppress(OSError):
                data = data[self.links[other].send(data) :] if other in self.links else b""
            self.pending[other] = data
            if not data:
                del self.pending[other]
        for line in self.member.to_rank:
            with contextlib.suppress(OSError):
                self.to_rank.send(line.encode() + b"\n")
        self.member.outbox, self.member.to_rank = [], []

    # --- what comes in ------------------------------------------------------------------

    def hear(self, other: int) -> None:
        link = self.links[other]
        try:
            data = link.recv(65536)
        except BlockingIOError:
            return
        except OSError as error:  # such as a connection that TCP gave up
            data, what = b"", f"its connection failed ({error.strerror})"
        else:
            what = "its process has ended"
        now = time.monotonic()
        *lines, self.rests[other] = (self.rests[other] + data).split(b"\n")
        if len(self.rests[other]) > LARGEST_LINE:
            data, what = b"", f"it has sent more than {LARGEST_LINE} bytes without an end of line"
        if not data:
            self.select.unregister(link)
            link.close()
            del self.links[other]
            if other in self.greeted:
                self.member.broken(other, what, now)
            else:
                self.forget(other)
            return
        self.greeted.add(other)
        for line in lines:
            self.member.received(other, line.decode(errors="replace"), now)

    def hear_rank(self, to_rank: socket.socket) -> None:
        try:
            data = to_rank.recv(65536)
        except ConnectionResetError:  # It was killed before it read an alarm
            data = b""
        *lines, self.rank_rest = (self.rank_rest + data).split(b"\n")
        for line in lines:
            self.member.rank_says(line.decode(errors="replace"), time.monotonic())
        if b"bye" in lines:
            _close_stderr()
        if not data:
            self.select.unregister(to_rank)
            self.member.rank_is_gone(time.monotonic())

    def run(self) -> None:
        """Beat, listen and look until there is nothing to watch any more."""
        threading.Thread(target=self.dial_all, daemon=True).start()
        next_beat = last_turn = time.monotonic()
        while True:
            member = self.member
            wait = next_beat - time.monotonic()
            for key, _ in self.select.select(
                max(0.0, min(wait, GATHER_SECONDS) if member.alarm.lost or self.pending else wait)
            ):
                key.data(key.fileobj)
            now = time.monotonic()
            if now >= next_beat:
                next_beat = now + self.beat_seconds
                state = _state_of(self.pid) if not member.gone else ""
                if state in ("", "Z", "X"):  # It may have said bye a moment ago
                    for key, _ in self.select.select(0):
                        key.data(key.fileobj)
                    if not member.gone:
                        member.rank_is_gone(now)
                member.stopped = state == "T"
                member.beat(now, max(0.0, now - last_turn - self.beat_seconds))
            last_turn = now
            member.tell_if_due(now)
            self.send_all()
            if member.finished:
                if words := member.last_words:
                    sys.stderr.write(MISSING.format(rank=member.rank, text=words))
                return
            kill_at = member.alarm.kill_at
            if kill_at is not None and now >= kill_at and not member.gone:
                os.kill(self.pid, signal.SIGKILL)
                return


def _state_of(pid: int) -> str:
    """Return one letter of proc(5): T is stopped, Z and X are dead; empty if it is gone."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0]
    except OSError:
        return ""


def _close_stderr() -> None:
    """Let go of the launcher's stderr: it waits for its end, and the watcher may stay for long."""
    with open(os.devnull, "wb") as nowhere:
        os.dup2(nowhere.fileno(), 2)


def main() -> None:
    """Run the watcher; the arguments are its two sockets, the first of which gives the job."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # The watcher ends with its ranks
    to_rank, listening = (socket.socket(fileno=int(word)) for word in sys.argv[1:3])
    # What follows the line is for the loop
    with open(os.dup(to_rank.fileno()), "rb", buffering=0) as file:
        job = json.loads(file.readline())
    Watcher(job, listening, to_rank).run()

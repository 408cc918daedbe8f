"""Run the watcher: a small process for each rank that notices if another rank is missing.

It is a separate process, because a healthy rank may hold Python's lock for long (tracing,
compilation), and because a stopped rank cannot report itself. Started by liveness.py; imports only
the standard library. It has at most 7 connections: protocol.py has their messages and its
decisions; this file has the sockets and the clock.

    rank 0 -- watcher 0 ===== TCP, neighbours ===== watcher 1 -- rank 1
       socket pair
"""

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

from tfcommx.launch.handshake import Caller, Entrance, Handshake
from tfcommx.watch.protocol import GATHER_SECONDS, KILLED, MISSING, WatchProtocol

# Beats in the shortest of `limit`, `stall_seconds` and `stall_limit`
BEATS = 10
# Time limit for one address to answer, and for a caller's proof
DIAL_SECONDS = 2.0
# Bytes buffered for a neighbour that does not read; further lines are dropped
LARGEST_PENDING = 65536
# Limit in bytes on a neighbour's line, because no watcher sends a longer one
LARGEST_LINE = 65536


class Watcher:
    """The sockets of one watcher; `run` is its loop.

    Args:
        job: the job of WatchProtocol, with pid and token; addresses (best first) and ports of the
            neighbours.
        listening: the socket whose port the neighbours know.
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
        # Neighbours that have sent data on their connection. Until then the connection may be one
        # that the neighbour gave up before it was accepted.
        self.greeted: set[int] = set()
        self.redial = threading.Event()
        # Neighbours that this watcher has dialled, and work that threads pass to the loop
        self.dialled: set[int] = set()
        self.from_threads: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        # Neighbour -> beginning of a line whose end has not arrived, and data to be sent
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
        """Connect to the lower neighbours, repeatedly. Runs in a thread, because it blocks."""
        # The higher rank of a pair dials, because two watchers that dialled each other at once
        # would have two connections
        lower = [peer for peer in self.places if peer < self.member.rank]
        while True:
            while waiting := [peer for peer in lower if peer not in self.dialled]:
                for peer in waiting:
                    self.dial(peer)
                # A neighbour may not listen yet, and a loop without a pause would occupy a core
                time.sleep(0.2)
            self.redial.wait()
            self.redial.clear()

    def dial(self, peer: int) -> None:
        addresses, port = self.places[peer]
        for address in addresses:
            with contextlib.suppress(ConnectionError):
                link, rank = self.handshake.connect(
                    [(address, port)], self.member.rank, DIAL_SECONDS, DIAL_SECONDS
                )
                if rank == peer:  # Because another host may have the same address and port
                    self.dialled.add(peer)
                    self.in_loop(functools.partial(self.connected, peer, link))
                    return
                link.close()

    def in_loop(self, work: Callable[[], None]) -> None:
        # The loop alone changes the watcher's state, so that no lock is needed. It may wait in
        # `select`, which a queue does not wake
        self.from_threads.put(work)
        self.wake.send(b"w")

    def do_for_threads(self, woken: socket.socket) -> None:
        woken.recv(64)
        while not self.from_threads.empty():
            self.from_threads.get()()

    def let_in(self, caller: Caller) -> None:
        peer = caller.said
        try:
            if peer not in self.places or peer in self.rests:  # No neighbour, or connected already
                raise ValueError(peer)
            caller.answer(self.member.rank)
        except (OSError, TypeError, ValueError):
            caller.connection.close()
        else:
            self.connected(peer, caller.connection)

    def connected(self, peer: int, link: socket.socket) -> None:
        link.setblocking(False)
        # Beats are 2 bytes, which TCP would otherwise hold back until the last one is acknowledged
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.links[peer], self.rests[peer] = link, b""
        self.select.register(link, selectors.EVENT_READ, lambda link: self.hear(peer))
        self.member.connected(peer, time.monotonic())

    def forget(self, peer: int) -> None:
        # The other side may have replaced the connection by another
        self.member.neighbours[peer].connected = False
        self.rests.pop(peer)
        if peer in self.dialled:
            self.dialled.remove(peer)
            self.redial.set()

    def send_all(self) -> None:
        """Send the member's lines, as far as the sockets accept them now."""
        for peer, line in self.member.outbox:
            before = self.pending.get(peer, b"")
            if peer in self.links and len(before) < LARGEST_PENDING:
                self.pending[peer] = before + _encoded(line)
        for peer, data in list(self.pending.items()):
            # `hear` notices a failure
            with contextlib.suppress(OSError):
                data = data[self.links[peer].send(data) :] if peer in self.links else b""
            self.pending[peer] = data
            if not data:
                del self.pending[peer]
        for line in self.member.to_rank:
            # Its process may have ended, which `hear_rank` notices
            with contextlib.suppress(OSError):
                self.to_rank.send(_encoded(line))
        self.member.outbox, self.member.to_rank = [], []

    # --- input --------------------------------------------------------------------------

    def hear(self, peer: int) -> None:
        link = self.links[peer]
        try:
            data = link.recv(65536)
        # Linux may report a socket without data as ready
        except BlockingIOError:
            return
        except OSError as error:  # Such as a connection that TCP gave up
            data, event = b"", f"its connection failed ({error.strerror})"
        else:
            event = "its process has ended"
        time_now = time.monotonic()
        *lines, self.rests[peer] = (self.rests[peer] + data).split(b"\n")
        if len(self.rests[peer]) > LARGEST_LINE:
            data, event = b"", f"it has sent more than {LARGEST_LINE} bytes without an end of line"
        if not data:
            self.select.unregister(link)
            link.close()
            del self.links[peer]
            if peer in self.greeted:
                self.member.broken(peer, event, time_now)
            else:
                self.forget(peer)
            return
        self.greeted.add(peer)
        for line in lines:
            self.member.received(peer, line.decode(errors="replace"), time_now)

    def hear_rank(self, to_rank: socket.socket) -> None:
        try:
            data = to_rank.recv(65536)
        except ConnectionResetError:  # It was killed before it read an alarm
            data = b""
        *lines, self.rank_rest = (self.rank_rest + data).split(b"\n")
        for line in lines:
            self.member.rank_says(line.decode(errors="replace"), time.monotonic())
        if b"bye" in lines:
            # The launcher waits for the end of stderr, and this process may outlive its rank
            with open(os.devnull, "wb") as nowhere:
                os.dup2(nowhere.fileno(), 2)
        if not data:
            self.select.unregister(to_rank)
            self.member.rank_is_gone(time.monotonic())

    def run(self) -> None:
        """Send beats and process input until the watch is finished."""
        threading.Thread(target=self.dial_all, daemon=True).start()
        next_beat = last_turn = time.monotonic()
        while True:
            member = self.member
            wait = next_beat - time.monotonic()
            for key, _ in self.select.select(
                max(0.0, min(wait, GATHER_SECONDS) if member.alarm.lost or self.pending else wait)
            ):
                key.data(key.fileobj)
            time_now = time.monotonic()
            if time_now >= next_beat:
                next_beat = time_now + self.beat_seconds
                state = _state_of(self.pid) if not member.gone else ""
                if state in ("", "Z", "X"):  # It may have said bye a moment ago
                    for key, _ in self.select.select(0):
                        key.data(key.fileobj)
                    if not member.gone:
                        member.rank_is_gone(time_now)
                # Its neighbours hear no beat from now on, and report it after `limit`
                member.stopped = state == "T"
                member.beat(time_now, max(0.0, time_now - last_turn - self.beat_seconds))
            last_turn = time_now
            member.tell_if_due(time_now)
            self.send_all()
            if member.finished:
                if words := member.last_words:
                    sys.stderr.write(MISSING.format(rank=member.rank, text=words))
                return
            kill_at = member.alarm.kill_at
            if kill_at is not None and time_now >= kill_at and not member.gone:
                if member.has_failed:  # Or the launcher would report the signal as its end
                    sys.stderr.write(KILLED.format(rank=member.rank))
                os.kill(self.pid, signal.SIGKILL)
                return


def _encoded(line: str) -> bytes:
    # The name of a file or a host, in a report of a rank, may have bytes that are not UTF-8
    return line.encode(errors="backslashreplace") + b"\n"


def _state_of(pid: int) -> str:
    """Return the state letter of proc(5): T is stopped, Z and X are dead; empty if it has ended."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            # Behind the last parenthesis, because the name before it may contain any character, and
            # end within one, where the kernel has cut it
            return file.read().rpartition(b")")[2].split()[0].decode()
    except OSError:
        return ""


def main() -> None:
    """Run the watcher; the arguments are its two sockets, the first of which delivers the job."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # The watcher ends with its ranks
    to_rank, listening = (socket.socket(fileno=int(word)) for word in sys.argv[1:3])
    # Unbuffered, because data after the line is for the loop
    with open(os.dup(to_rank.fileno()), "rb", buffering=0) as file:
        job = json.loads(file.readline())
    Watcher(job, listening, to_rank).run()

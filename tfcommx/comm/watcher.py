"""The watcher: a small process beside each rank that notices if another rank is missing.

A process of its own, because the rank may hold Python's lock for long (tracing, compilation)
without being in trouble, and because a stopped rank cannot speak for itself. Started by liveness.py
with this file's path; knows only the standard library.

    rank 0 -- watcher 0 ===== TCP, every pair ===== watcher 1 -- rank 1
       socket pair

    lines between watchers     .            alive
                               bye          the rank ends as it should
                               lost JSON    which ranks are missing, and what was noticed

A watcher says "alive" while its rank's process exists and is not stopped. It raises the alarm if it
has had no message of a rank for `limit` seconds, or at once if a rank's connection ends without a
bye, or if another watcher raises the alarm.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import socket
import sys
import threading
import time
from typing import Any

# Messages "alive" in `limit` seconds
BEATS = 10
# From the first sign to the alarm: ranks of a node that dies are named together
GATHER_SECONDS = 0.3
# For the rank to end by itself after an alarm, before it is killed
LAST_WORDS_SECONDS = 8.0
# After the rank's end, for a bye to those that have not connected yet
LINGER_SECONDS = 3.0
# For one address to answer, and for whoever connects to say who it is
DIAL_SECONDS = 2.0


class Peer:
    """Another rank, as this watcher sees it."""

    def __init__(self, rank: int, now: float) -> None:
        self.rank, self.heard = rank, now
        self.socket: socket.socket | None = None
        # Made by the thread that connects, until the loop takes it over
        self.dialled: socket.socket | None = None
        # The beginning of a line whose end has not come yet
        self.rest = b""
        # Whether it said bye
        self.done = False
        # What is wrong with it
        self.sign: str | None = None


class Watcher:
    """The state of one watcher; `run` is its loop."""

    def __init__(
        self, job: dict[str, Any], listening: socket.socket, to_rank: socket.socket
    ) -> None:
        self.rank, self.token, self.limit, self.pid = (
            job["rank"],
            job["token"],
            job["limit"],
            job["pid"],
        )
        # Of every rank, best first
        self.addresses: list[list[str]] = job["addresses"]
        self.ports, self.hosts = job["ports"], job["hosts"]
        now = time.monotonic()
        self.peers = {rank: Peer(rank, now) for rank in range(len(self.ports)) if rank != self.rank}
        # Connections that have not said who they are: the bytes so far, and the deadline
        self.callers: dict[socket.socket, tuple[bytes, float]] = {}
        self.to_rank, self.leaving, self.ended = to_rank, False, 0.0
        self.alarm_at: float | None = None
        self.kill_at: float | None = None
        self.select = selectors.DefaultSelector()
        listening.setblocking(False)
        woken, self.wake = socket.socketpair()
        self.select.register(woken, selectors.EVENT_READ, self.take_dialled)
        self.select.register(listening, selectors.EVENT_READ, self.accept)
        self.select.register(to_rank, selectors.EVENT_READ, self.hear_rank)

    def hello(self, rank: int) -> bytes:
        return f"{self.token} {rank}\n".encode()

    # --- connections --------------------------------------------------------------------

    def dial_all(self) -> None:
        """Connect to the lower ranks, again until it works. In a thread, because it waits."""
        while waiting := [
            peer
            for rank, peer in self.peers.items()
            if rank < self.rank and not (peer.socket or peer.dialled)
        ]:
            for peer in waiting:
                self.dial(peer)
            time.sleep(0.2)

    def dial(self, peer: Peer) -> None:
        for address in self.addresses[peer.rank]:
            with contextlib.suppress(OSError):
                link = socket.create_connection(
                    (address, self.ports[peer.rank]), timeout=DIAL_SECONDS
                )
                link.sendall(self.hello(self.rank))
                # Another host may have the same address and port
                if _line(link) == self.hello(peer.rank):
                    peer.dialled = link
                    self.wake.send(b"w")
                    return
                link.close()

    def take_dialled(self, woken: socket.socket) -> None:
        woken.recv(64)
        for peer in self.peers.values():
            if peer.dialled and not peer.socket:
                self.connected(peer, peer.dialled)

    def accept(self, listening: socket.socket) -> None:
        """Accept a connection; the other side says later who it is.

        Nobody may keep this loop from saying that its rank is alive.
        """
        # It may be closed already, or there are too many of them
        with contextlib.suppress(OSError):
            link, _ = listening.accept()
            link.setblocking(False)
            self.callers[link] = b"", time.monotonic() + DIAL_SECONDS
            self.select.register(link, selectors.EVENT_READ, self.greet)

    def greet(self, link: socket.socket) -> None:
        received, until = self.callers[link]
        try:
            more = link.recv(200)
        except BlockingIOError:
            return
        except OSError:
            more = b""
        self.callers[link] = received + more, until
        if more and b"\n" not in received + more and len(received + more) < 200:
            return
        self.dismiss(link)
        try:
            token, rank = (received + more).decode().split()
            peer = self.peers[int(rank)]
            if token != self.token or peer.socket:
                raise ValueError(token)
            link.send(self.hello(self.rank))
        except (OSError, ValueError, KeyError):  # Not a watcher of this run
            link.close()
            return
        self.connected(peer, link)

    def dismiss(self, link: socket.socket) -> None:
        self.select.unregister(link)
        del self.callers[link]

    def connected(self, peer: Peer, link: socket.socket) -> None:
        link.setblocking(False)
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        peer.socket, peer.heard = link, time.monotonic()
        self.select.register(link, selectors.EVENT_READ, lambda link: self.hear(peer))
        if self.leaving:
            self.say(peer, b"bye\n")

    def say(self, peer: Peer, line: bytes) -> None:
        if peer.socket:
            # What does not fit now is an "alive" that nobody reads; `hear` notices a failure
            with contextlib.suppress(OSError):
                peer.socket.send(line)

    def hear(self, peer: Peer) -> None:
        try:
            data = peer.socket.recv(65536)
        except BlockingIOError:
            return
        except OSError as error:  # such as a connection that TCP gave up
            data, what = b"", f"its connection failed ({error.strerror})"
        else:
            what = "its process has ended"
        if not data:
            self.select.unregister(peer.socket)
            peer.socket.close()
            peer.socket = None
            if not peer.done:
                self.sign(peer, what)
            return
        peer.heard = time.monotonic()
        *lines, peer.rest = (peer.rest + data).split(b"\n")
        for line in lines:
            if line == b"bye":
                peer.done = True
            elif line.startswith(b"lost "):
                self.alarm(json.loads(line[5:]), f" Noticed by rank {peer.rank}.")

    def hear_rank(self, to_rank: socket.socket) -> None:
        try:
            data = to_rank.recv(1024)
        except ConnectionResetError:  # It was killed before it read an alarm
            data = b""
        if data.startswith(b"bye"):
            self.leaving = True
            for peer in self.peers.values():
                self.say(peer, b"bye\n")
        elif data:
            self.alarm({str(self.rank): data.decode(errors="replace")})
        if not data:
            self.select.unregister(to_rank)
            self.ended = time.monotonic()

    # --- the alarm ----------------------------------------------------------------------

    def sign(self, peer: Peer, what: str) -> None:
        peer.sign = what
        self.alarm_at = self.alarm_at or time.monotonic() + GATHER_SECONDS

    def alarm(self, lost: dict[str, str], by: str = "") -> None:
        """Tell my rank, and every other watcher, who is missing; only the first alarm counts."""
        if self.kill_at or self.ended:
            return
        for peer in self.peers.values():
            self.say(peer, b"lost " + json.dumps(lost).encode() + b"\n")
        names = ", ".join(
            f"rank {rank} on {self.hosts[int(rank)]} ({what})" for rank, what in lost.items()
        )
        with contextlib.suppress(OSError):
            self.to_rank.send(f"{names}.{by}".encode())
        # A stopped process cannot end by itself
        stopped = _state_of(self.pid) == "T"
        self.kill_at = time.monotonic() + (0 if stopped else LAST_WORDS_SECONDS)

    def look(self, now: float) -> None:
        """Find the ranks that have been silent for too long."""
        if any(not peer.done and now - peer.heard > self.limit for peer in self.peers.values()):
            for peer in self.peers.values():
                silence = now - peer.heard
                if not peer.done and not peer.sign and silence > self.limit / 2:
                    never = (
                        ""
                        if peer.socket
                        else ", and no connection: does a firewall close the ports between the "
                        "hosts?"
                    )
                    self.sign(peer, f"no response for {silence:.0f} s{never}")

    def run(self) -> None:
        """Beat, listen and look until the rank has ended."""
        threading.Thread(target=self.dial_all, daemon=True).start()
        beat_seconds = self.limit / BEATS
        next_beat = last_turn = time.monotonic()
        while True:
            wait = (
                min(beat_seconds, GATHER_SECONDS) if self.alarm_at or self.ended else beat_seconds
            )
            for key, _ in self.select.select(max(0.0, min(wait, next_beat - time.monotonic()))):
                key.data(key.fileobj)
            now = time.monotonic()
            for link in [link for link, (_, until) in self.callers.items() if now > until]:
                self.dismiss(link)
                link.close()
            late = now - last_turn - beat_seconds
            # This process was itself kept from running: it knows nothing of the others in that time
            if late > 0:
                for peer in self.peers.values():
                    peer.heard = min(now, peer.heard + late)
            last_turn = now
            if now >= next_beat:
                next_beat = now + beat_seconds
                state = _state_of(self.pid)
                if state in ("", "Z", "X"):
                    self.ended = self.ended or now
                elif state != "T":
                    for peer in self.peers.values():
                        self.say(peer, b".\n")
                if not self.ended:
                    self.look(now)
            if self.alarm_at and now >= self.alarm_at and not self.kill_at:
                self.alarm({str(peer.rank): peer.sign for peer in self.peers.values() if peer.sign})
            if self.ended and self._may_leave(now):
                return
            if self.kill_at and now >= self.kill_at:
                os.kill(self.pid, signal.SIGKILL)
                return

    def _may_leave(self, now: float) -> bool:
        """Tell whether the watcher may end after its rank.

        At once, unless the rank said bye and a watcher that must be told has not connected yet.
        """
        waiting = self.leaving and any(
            not peer.socket and not peer.done and not peer.sign for peer in self.peers.values()
        )
        return not waiting or now - self.ended > LINGER_SECONDS


def _line(link: socket.socket) -> bytes:
    data = b""
    while not data.endswith(b"\n") and len(data) < 200:
        more = link.recv(1)
        if not more:
            break
        data += more
    return data


def _state_of(pid: int) -> str:
    """Return one letter of proc(5): T is stopped, Z and X are dead; empty if it is gone."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0]
    except OSError:
        return ""


def main() -> None:
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # The watcher ends with its rank
    to_rank, listening = (socket.socket(fileno=int(word)) for word in sys.argv[1:3])
    # What follows the line is for the loop
    with open(os.dup(to_rank.fileno()), "rb", buffering=0) as file:
        job = json.loads(file.readline())
    Watcher(job, listening, to_rank).run()


if __name__ == "__main__":
    main()

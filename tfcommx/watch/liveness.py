"""Law 7, "no hang": if a rank is missing, every other rank ends soon, with an error that names it.

Horovod's collectives wait for a rank that was stopped, or whose machine or network is gone, and
their own time limits name nobody. Beside each rank runs a small process (watcher.py), which
exchanges heartbeats with a few other watchers over TCP (watch_protocol.py); a thread of the rank
waits for its alarm.
A rank that ends normally, early or late, says so and is not reported as missing. Nor is a rank that
computes, traces or compiles, however long: only one that is stopped, dead or cut off.

    what happens to a rank             noticed                      said of it
    its process is killed or crashes   at once                      its process has ended
    it fails with an exception         at once                      failed: RuntimeError: ...
    it is stopped, its machine or      after `limit` seconds        no response for 20 s
    network is gone

The rank that fails prints its traceback; every other rank prints one line, also if Horovod has
raised an error there because the failed rank is gone.

If all ranks are alive, but some wait long for others, every rank logs who waits for whom
(stalls.py); progress.py sees what this rank does.

**Cost:** one process of about 15 MB per rank, asleep except for 10 messages of 2 bytes to each of
at most 7 other watchers per `limit` seconds, and one of at most 2 kB to one of them.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import json
import logging
import os
import secrets
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Protocol

from tfcommx.kernels import loader
from tfcommx.launch.interpreter import Hook, end_at_once, handle_uncaught
from tfcommx.watch.membership import Membership
from tfcommx.watch.protocol import MISSING, neighbours
from tfcommx.watch.stalls import CAUSES

log = logging.getLogger("tfcommx")

# Seconds: less than the 30 after which Gloo gives up; more than TCP needs to recover after a link
# was down for 5 s
LIMIT_SECONDS = 20.0
# Evaluating and saving on one rank may take some time
STALL_SECONDS = 60.0
# Seconds between the error and the end. The launcher names the rank that ended first, which should
# be the one that failed.
LAUNCHER_SECONDS = 2.0
# For one address of a watcher to answer
DIAL_SECONDS = 2.0
# At most between two looks at what this rank does
LOOK_SECONDS = 2.0
# In the error of Horovod's collectives after one of the ranks is gone
GONE = "Horovod has been shut down"
# What a rank says before it ends because a stall has reached its limit
WAITING = MISSING.replace("ranks are missing", "ranks wait for each other")
LOOPBACK = "127.0.0.1"
# The folder that holds the package
PACKAGES = Path(__file__).resolve().parents[2]
SIOCGIFADDR = 0x8915  # netdevice(7)


def addresses(interfaces: list[str]) -> list[str]:
    """Return this host's IPv4 addresses, loopback last.

    Args:
        interfaces: whose addresses count, if this host has any of them; otherwise all count.

    Returns:
        The addresses, such as `192.168.0.2`.
    """
    found: dict[str, str] = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        for _, name in socket.if_nameindex():
            try:
                answer = fcntl.ioctl(asking, SIOCGIFADDR, struct.pack("256s", name[:15].encode()))
            except OSError:  # No IPv4 address on this one
                continue
            found[name] = socket.inet_ntoa(answer[20:24])
    chosen = [found[name] for name in interfaces if name in found] or list(found.values())
    return [address for address in chosen if address != LOOPBACK] + [LOOPBACK]


def listen(interfaces: list[str], one_host: bool) -> tuple[socket.socket, list[str]]:
    """Return a listening socket, and the addresses at which partners reach it, best first.

    It listens no wider than they need: on the loopback if all are on this host, on one address if
    this host, or the interfaces that are named, have no other.

    Args:
        interfaces: network interfaces that the ranks were launched on; empty: any.
        one_host: whether all partners are on this host.
    """
    own = [LOOPBACK] if one_host else addresses(interfaces)
    return socket.create_server((own[0] if len(own) <= 2 else "", 0), backlog=64), own


class Limits(NamedTuple):
    """After which seconds what is done."""

    # Without a sign of life: the rank is missing, > 0; None: no watch
    limit: float | None
    # Of a wait for ranks that are alive: it is reported, > 0; None: none is
    stall_seconds: float | None = STALL_SECONDS
    # Of such a wait: the job ends, > 0; None: none ends it
    stall_limit: float | None = None


class ReportsProgress(Protocol):
    """What a process does, for its watcher; see progress.py."""

    def watch(self, send: Callable[[bytes], object], period: float) -> None:
        """Tell through `send`, every `period` seconds, what the process does."""


class Watched(Protocol):
    """What the watch needs of a process that is watched, as Comm has it."""

    rank: int
    membership: Membership

    @property
    def progress(self) -> ReportsProgress:
        """What the process does."""


def start(
    here: Watched,
    interfaces: list[str],
    limits: Limits,
    gather: Callable[[dict[str, Any]], list[dict[str, Any]]],
    one_host: bool = False,
    holds: str = "",
) -> None:
    """Start this rank's watcher, and the thread that ends the process at its alarm.

    Args:
        here: the Comm of this rank.
        interfaces: network interfaces that the ranks were launched on; empty: any.
        limits: rank 0's count.
        gather: returns what all that are watched have given it, in rank order.
        one_host: whether all of them are on this host.
        holds: what people are told of this rank, behind its host's name.

    **Ranks:** all. **Cost:** one exchange of addresses. An alarm writes one line to stderr, flushes
    and ends with status 1.
    """
    listening, own = listen(interfaces, one_host)
    mine = {
        "addresses": own,
        "port": listening.getsockname()[1],
        "host": socket.gethostname() + holds,
        "token": secrets.token_hex(8),
        **limits._asdict(),
    }
    every = gather(mine)
    if every[0]["limit"] is None:
        listening.close()
        return
    job = make_job(here.rank, os.getpid(), every)
    ours = start_watcher(listening, job)
    failed = _say_how_it_ends(ours, here.membership)
    here.membership.report_to(ours.send)
    others = set(range(len(every))) - {here.rank}
    here.membership.probe_with(lambda rank: responds(every[rank]), others, job["limit"])
    periods = [seconds for seconds in (job["stall_seconds"], job["stall_limit"]) if seconds]
    if periods:
        here.progress.watch(ours.send, min(LOOK_SECONDS, *(one / 5 for one in periods)))
    threading.Thread(
        target=_wait, args=(ours, here, failed), name="tfcommx-watch", daemon=True
    ).start()


def responds(row: dict[str, Any]) -> bool:
    """Tell whether a rank's watcher is there, by what the rank has told of itself.

    It is, as long as the rank's process is. **Cost:** one connection.
    """
    for address in row["addresses"][:-1] or row["addresses"]:  # The last one is of any host
        with contextlib.suppress(OSError):
            socket.create_connection((address, row["port"]), DIAL_SECONDS).close()
            return True
    return False


def make_job(rank: int, pid: int, every: list[dict[str, Any]]) -> dict[str, Any]:
    """Return what a rank's watcher must know.

    Args:
        rank: whose watcher it is.
        pid: of the rank's process.
        every: what each rank has told the others, in rank order.
    """
    others = [every[other] for other in neighbours(rank, len(every))]
    return {
        "rank": rank,
        "size": len(every),
        "pid": pid,
        "host": every[rank]["host"],
        **{name: every[0][name] for name in ("token", "limit", "stall_seconds", "stall_limit")},
        **{f"{name}s": [row[name] for row in others] for name in ("host", "port")},
        "addresses": [row["addresses"] for row in others],
    }


def start_watcher(listening: socket.socket, job: dict[str, Any]) -> socket.socket:
    """Start the watcher's process; return the socket that leads to it."""
    ours, theirs = socket.socketpair()
    fds = [theirs.fileno(), listening.fileno()]
    # Without the user's environment and packages, which may do anything at the start
    program = (
        f"import sys; sys.path.insert(0, {str(PACKAGES)!r}); "
        "from tfcommx.watch.watcher import main; main()"
    )
    subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", program, *map(str, fds)],
        pass_fds=fds,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
    )
    theirs.close()
    listening.close()
    ours.sendall(json.dumps(job).encode() + b"\n")
    tell_of_terminate = loader.plain_function("tfcommx_tell_of_terminate")
    if tell_of_terminate is not None:
        tell_of_terminate(ours.fileno())
    return ours


def _wait(ours: socket.socket, here: Watched, failed: threading.Event) -> None:
    """Log stalls; wait for the alarm, then end the process, whatever its other threads wait for."""
    kind, text = "lost", "the watcher of this rank, a process of its own, has ended."
    with contextlib.suppress(OSError), ours.makefile(encoding="utf-8", errors="replace") as lines:
        for line in lines:
            kind, _, text = line.strip().partition(" ")
            if kind not in ("stall", "gone"):
                break
            if kind == "gone":
                here.membership.mark_gone(*json.loads(text))
            else:
                log.warning("Log of rank %d: %s", here.rank, text)
            kind, text = "lost", "the watcher of this rank, a process of its own, has ended."
    if not failed.is_set():
        said = MISSING if kind == "lost" else WAITING
        sys.stderr.write(said.format(rank=here.rank, text=text))
        sys.stderr.flush()
    time.sleep(LAUNCHER_SECONDS / 2 if failed.is_set() else LAUNCHER_SECONDS)
    end_at_once(1)


def _cause_first(text: str) -> str:
    """Return an error's text in one line, its last line first.

    TensorFlow gives the cause after the whole stack, before `[[nodes]]`.
    """
    lines = [
        " ".join(line.split())
        for line in text.splitlines()
        if line.strip() and not line.lstrip().startswith("[[")
    ]
    return " ".join(lines[-1:] + lines[:-1])


def _say_how_it_ends(ours: socket.socket, membership: Membership) -> threading.Event:
    """Say bye at the interpreter's end; after an uncaught exception tell the other ranks instead.

    Horovod raises on every rank if one is gone. That is not this rank's failure: it waits a little
    for the alarm, which names the rank that has failed, and prints its own error only if none
    comes.

    Args:
        ours: leads to this rank's watcher.
        membership: after a rank has died, Horovod's and MPI's own ends would wait for it.

    Returns:
        An event that is set if this rank has failed.
    """
    pid, failed, no_bye = os.getpid(), threading.Event(), threading.Event()

    def fail(
        report: Hook,
        kind: type[BaseException],
        error: BaseException,
        trace: TracebackType | None,
    ) -> None:
        # A forked child is not the rank
        if os.getpid() != pid:
            report(kind, error, trace)
            return
        no_bye.set()
        if GONE in str(error):
            time.sleep(2 * LAUNCHER_SECONDS)
            report(kind, error, trace)
            # No alarm has ended this process: nobody is missing
            sys.stderr.write(f"tfcommx: A rank has ended while this one waited for it. {CAUSES}\n")
            return
        report(kind, error, trace)
        failed.set()
        said = f"failed: {kind.__name__}: {_cause_first(str(error))}"[:300]
        with contextlib.suppress(OSError):
            ours.send(f"{said}\n".encode())

    def bye() -> None:
        if os.getpid() == pid and not no_bye.is_set():
            with contextlib.suppress(OSError):
                ours.send(b"bye\n")
            if membership.any_died():
                end_at_once(0)

    handle_uncaught(fail)
    atexit.register(bye)
    return failed

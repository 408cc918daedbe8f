"""Law 7, "no hang": if a rank is missing, every other rank ends soon, with an error that names it.

Horovod's collectives wait for a rank that was stopped, or whose machine or network has failed, and
their time limits name no rank. Therefore each rank has a small process (watcher.py), which
exchanges heartbeats with a few other watchers over TCP (protocol.py); a thread of the rank waits
for its alarm.
A rank that ends normally, early or late, announces it and is not reported as missing. Nor is a rank
that computes, traces or compiles, however long: only one that is stopped, dead or cut off.

    fault of a rank                    noticed                      reported as
    its process is killed or crashes   at once                      its process has ended
    it fails with an exception         at once                      failed: RuntimeError: ...
    it is stopped, its machine or      after `limit` seconds        no response for 20 s
    network has failed

The rank that fails prints its traceback; every other rank prints one line, even if Horovod has
raised an error there because the failed rank is gone.

If all ranks are alive, but some wait long for others, every rank logs the waiting ranks and their
causes, and all end if they wait for each other (stalls.py); progress.py observes this rank.

**Cost:** one process of about 15 MB per rank, asleep except for 10 messages of 2 bytes to each of
at most 7 other watchers per `limit` seconds, and one of at most 2 kB to one of them.
"""

import atexit
import contextlib
import json
import os
import secrets
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, NamedTuple

from tfcommx.core import log
from tfcommx.kernels import loader
from tfcommx.launch.commands import ipv4_addresses
from tfcommx.launch.interpreter import ExitStatus, Hook, end_at_once, handle_uncaught, isolated
from tfcommx.watch.membership import Membership
from tfcommx.watch.protocol import MISSING, neighbours
from tfcommx.watch.stalls import CAUSES

# Default limit of silence, in seconds: below Gloo's limit of 30 s; above the time that TCP needs to
# recover after a link was down for 5 s
LIMIT_SECONDS = 20.0
# Default of `Limits.stall_seconds`: above the usual time of evaluating and saving on one rank
STALL_SECONDS = 60.0
# Seconds between the error and the end, because the launcher names the rank that ended first, which
# should be the one that failed
LAUNCHER_SECONDS = 2.0
# Time limit for one address of a watcher to answer
DIAL_SECONDS = 2.0
# Longest period of observing this rank, in seconds
LOOK_SECONDS = 2.0
# Part of the error of Horovod's collectives after a rank has ended
GONE = "Horovod has been shut down"
# Last line of a rank that ends because a stall has reached its limit
WAITING = MISSING.replace("ranks are missing", "ranks wait for each other")
LOOPBACK = "127.0.0.1"


def addresses(interfaces: list[str]) -> list[str]:
    """Return this host's IPv4 addresses, such as `192.168.0.2`, loopback last.

    Args:
        interfaces: names of interfaces whose addresses count, if this host has any of them;
            otherwise all count.
    """
    by_interface = ipv4_addresses()
    chosen = [address for name in interfaces for address in by_interface.get(name, [])]
    chosen = chosen or [address for own in by_interface.values() for address in own]
    return [address for address in chosen if address != LOOPBACK] + [LOOPBACK]


def listen(interfaces: list[str], one_host: bool) -> tuple[socket.socket, list[str]]:
    """Return a listening socket, and the addresses at which partners reach it, best first.

    Args:
        interfaces: network interfaces that the ranks were launched on; empty: any.
        one_host: True if all partners are on this host.
    """
    reachable = [LOOPBACK] if one_host else addresses(interfaces)
    # No wider than required: on one address if there is no other besides the loopback
    address = reachable[0] if len(reachable) <= 2 else ""
    return socket.create_server((address, 0), backlog=64), reachable


class Limits(NamedTuple):
    """Time limits of the watch, in seconds."""

    # Silence after which a rank counts as missing, > 0; None: no watch
    limit: float | None
    # Wait for living ranks that is reported, > 0; five times as long ends ranks that wait for each
    # other; None: neither
    stall_seconds: float | None = STALL_SECONDS
    # Wait for living ranks that ends the job, > 0; None: no limit
    stall_limit: float | None = None


# (sends a line to the watcher, seconds of a period): reports the activity of a process in each
# period, as `Progress.watch` does
Report = Callable[[Callable[[bytes], object], float], None]


def start(
    rank: int,
    membership: Membership,
    report: Report,
    interfaces: list[str],
    limits: Limits,
    gather: Callable[[dict[str, Any]], list[dict[str, Any]]],
    one_host: bool = False,
    holds: str = "",
) -> None:
    """Start this rank's watcher, and the thread that ends the process at its alarm.

    Args:
        membership: receives the ranks that leave.
        report: starts to report this process's activity.
        interfaces: network interfaces that the ranks were launched on; empty: any.
        limits: time limits; those of rank 0 apply.
        gather: returns the arguments of all watched ranks, in rank order.
        one_host: True if all of them are on this host.
        holds: description of this rank, appended to its host's name in messages.

    **Ranks:** all. **Cost:** one exchange of addresses. An alarm writes one line to stderr, flushes
    and ends with status 1.
    """
    listening, reachable = listen(interfaces, one_host)
    row = {
        "addresses": reachable,
        "port": listening.getsockname()[1],
        "host": socket.gethostname() + holds,
        "token": secrets.token_hex(8),
        **limits._asdict(),
    }
    rows = gather(row)
    # Rank 0 decides for all, because a rank without a watcher would be reported as missing
    if rows[0]["limit"] is None:
        listening.close()
        return
    job = make_job(rank, os.getpid(), rows)
    to_watcher = start_watcher(listening, job)
    failed = _say_how_it_ends(to_watcher, membership, rank)
    membership.report_to(to_watcher.send)
    other_ranks = set(range(len(rows))) - {rank}
    membership.probe_with(lambda other: responds(rows[other]), other_ranks, job["limit"])
    periods = [seconds for seconds in (job["stall_seconds"], job["stall_limit"]) if seconds]
    if periods:
        report(to_watcher.send, min(LOOK_SECONDS, *(period / 5 for period in periods)))
    threading.Thread(
        target=_wait, args=(to_watcher, rank, membership, failed), name="tfcommx-watch", daemon=True
    ).start()


def responds(row: dict[str, Any]) -> bool:
    """Return True if a rank's watcher accepts connections, as it does while the rank runs."""
    # Not the last, the loopback, where another process of this host may have the same port
    for address in row["addresses"][:-1] or row["addresses"]:
        with contextlib.suppress(OSError):
            socket.create_connection((address, row["port"]), DIAL_SECONDS).close()
            return True
    return False


def make_job(rank: int, pid: int, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the job of a rank's watcher, as `watcher.main` reads it."""
    neighbour_rows = [rows[neighbour] for neighbour in neighbours(rank, len(rows))]
    return {
        "rank": rank,
        "size": len(rows),
        "pid": pid,
        "host": rows[rank]["host"],
        **{name: rows[0][name] for name in ("token", "limit", "stall_seconds", "stall_limit")},
        **{f"{name}s": [row[name] for row in neighbour_rows] for name in ("host", "port")},
        "addresses": [row["addresses"] for row in neighbour_rows],
    }


def start_watcher(listening: socket.socket, job: dict[str, Any]) -> socket.socket:
    """Start the watcher's process; return the socket connected to it."""
    to_watcher, watcher_end = socket.socketpair()
    # Otherwise a script's `socket.setdefaulttimeout` would end the wait for the alarm
    for part in (to_watcher, watcher_end, listening):
        part.settimeout(None)
    fds = [watcher_end.fileno(), listening.fileno()]
    # stderr is inherited, because the watcher writes the last words of a rank that could not
    subprocess.Popen(
        [*isolated("tfcommx.watch.watcher"), *map(str, fds)],
        pass_fds=fds,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
    )
    watcher_end.close()
    listening.close()
    to_watcher.sendall(json.dumps(job).encode() + b"\n")
    # Native, because no Python runs in a process that Gloo aborts. The process with the centre of
    # elastic averaging has no Gloo, and the loader would load TensorFlow, some 500 MB
    if "tensorflow" in sys.modules:
        tell_of_terminate = loader.plain_function("tfcommx_tell_of_terminate")
        if tell_of_terminate is not None:
            tell_of_terminate(to_watcher.fileno())
    return to_watcher


def _wait(
    to_watcher: socket.socket, rank: int, membership: Membership, failed: threading.Event
) -> None:
    """Log stalls until the alarm, then end the process regardless of its other threads."""
    kind, text = "lost", "the watcher of this rank, a separate process, has ended."
    with (
        contextlib.suppress(OSError),
        to_watcher.makefile(encoding="utf-8", errors="replace") as lines,
    ):
        for line in lines:
            event, _, content = line.strip().partition(" ")
            if event == "gone":
                membership.mark_gone(*json.loads(content))
            elif event == "early":
                membership.early.add(int(content))
            elif event == "stall":
                log.warning("Log of rank %d: %s", rank, content)
            else:
                kind, text = event, content
                break
    # A rank that has failed has printed its traceback, which is the cause
    if not failed.is_set():
        message = MISSING if kind == "lost" else WAITING
        _say(message.format(rank=rank, text=text))
    # The rank that failed ends before the others, so that the launcher names it
    time.sleep(LAUNCHER_SECONDS / 2 if failed.is_set() else LAUNCHER_SECONDS)
    end_at_once(1)


def _say(text: str) -> None:
    """Write to stderr, unless it is closed or no process reads it."""
    with contextlib.suppress(OSError, ValueError):
        if sys.stderr is not None:
            sys.stderr.write(text)
            sys.stderr.flush()


def _cause_first(text: str) -> str:
    # Its last line first, because TensorFlow puts the cause after the stack, before `[[nodes]]`
    lines = [
        " ".join(line.split())
        for line in text.splitlines()
        if line.strip() and not line.lstrip().startswith("[[")
    ]
    return " ".join(lines[-1:] + lines[:-1])


def _say_how_it_ends(
    to_watcher: socket.socket, membership: Membership, rank: int
) -> threading.Event:
    """Send bye at the interpreter's end; after an uncaught exception report the failure instead.

    Returns:
        An event that is set if this rank has failed.
    """
    pid, failed, no_bye = os.getpid(), threading.Event(), threading.Event()
    status = ExitStatus()
    status.watch()

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
        # Horovod raises on every rank if one has ended. This rank waits for the alarm, which names
        # the failed rank, and prints its own error only if none arrives
        if GONE in str(error):
            time.sleep(2 * LAUNCHER_SECONDS)
            report(kind, error, trace)
            # No alarm has ended this process: no rank is missing, but one has ended too early
            who = ", ".join(f"rank {rank}" for rank in sorted(membership.early)) or "another rank"
            _say(
                f"tfcommx: This rank waited for one that has ended in order: {who}, by `sys.exit` "
                f"or because its script was over. {CAUSES}\n"
            )
            return
        report(kind, error, trace)
        failed.set()
        message = f"failed: {kind.__name__}: {_cause_first(str(error))}"[:300]
        with contextlib.suppress(OSError):
            # An error may name a file whose bytes are not UTF-8
            to_watcher.send(f"{message}\n".encode(errors="backslashreplace"))

    def bye() -> None:
        if os.getpid() == pid and failed.is_set():
            # Usually `_wait` ends it before. MPI's shutdown would wait for ranks that train on,
            # until the watcher kills this one, and mpirun with --enable-recovery returns 0 then
            time.sleep(LAUNCHER_SECONDS)
            end_at_once(1)
        if os.getpid() == pid and not no_bye.is_set():
            with contextlib.suppress(OSError):
                to_watcher.send(b"bye\n")
            # Because Horovod's and MPI's shutdown would wait for a rank that has died, and that of
            # a needed rank for all others, until the watcher kills it
            if membership.any_died() or (rank in membership.needed and status.get()):
                end_at_once(status.get())

    handle_uncaught(fail)
    atexit.register(bye)
    return failed

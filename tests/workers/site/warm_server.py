"""Loads TensorFlow once, and forks for each rank that calls (warm_start.py).

A connection is one rank: if it breaks off, the process that has called was killed, and so is the
fork. Started by tests/warm_ranks.py; whoever holds the other end of `lifeline` keeps it.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import io
import json
import os
import runpy
import selectors
import signal
import socket
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import warm_start


class Caller(NamedTuple):
    """A process that waits for its fork."""

    connection: socket.socket
    # The process whose tests have started it
    account: str


class Server:
    """Forks for each caller. `serve` returns only in the forks, with the program they run."""

    def __init__(
        self, listening: int, lifeline: int, cpu_files: str, loaded_in: dict[str, Any]
    ) -> None:
        self.listening = socket.socket(fileno=listening)
        self.lifeline = lifeline
        self.cpu_files, self.cpu_seconds = cpu_files, Counter[str]()
        self.loaded_in = loaded_in
        self.callers: dict[int, Caller] = {}  # by the process that was forked for each

    def serve(self) -> dict[str, Any]:
        ended, wake = socket.socketpair()
        ended.setblocking(False), wake.setblocking(False)
        signal.set_wakeup_fd(wake.fileno(), warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        waits = selectors.DefaultSelector()
        for one in (self.listening, ended, self.lifeline):
            waits.register(one, selectors.EVENT_READ)
        while True:
            for key, _ in waits.select():
                if key.fileobj == self.lifeline:
                    self.end()
                elif key.fileobj == ended:
                    ended.recv(4096)
                    for caller in self.reap():
                        if caller in waits.get_map():
                            waits.unregister(caller)
                        caller.close()
                elif key.fileobj == self.listening:
                    caller, _ = self.listening.accept()
                    told, files = receive(caller)
                    alike = told.get("surroundings") == self.loaded_in
                    pid = os.fork() if alike else None
                    if pid == 0:
                        others = (other.connection for other in self.callers.values())
                        for one in (ended, wake, caller, self.listening, *others):
                            one.close()
                        waits.close()
                        os.close(self.lifeline)
                        signal.set_wakeup_fd(-1)
                        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                        os.setsid()
                        for number, file in enumerate(files):
                            os.dup2(file, number)
                            os.close(file)
                        return told
                    for file in files:
                        os.close(file)
                    tell(caller, pid or 0)
                    if pid:
                        account = told["environment"].get(warm_start.ACCOUNT, "")
                        self.callers[pid] = Caller(caller, account)
                        waits.register(caller, selectors.EVENT_READ)
                    else:
                        caller.close()
                else:
                    self.kill(key.fileobj)
                    waits.unregister(key.fileobj)  # `reap` closes it

    def kill(self, broken: socket.socket) -> None:
        for pid, caller in self.callers.items():
            if caller.connection is broken:
                os.kill(pid, signal.SIGKILL)

    def reap(self) -> list[socket.socket]:
        """Tell callers how their processes have ended; return the connections."""
        done = []
        while self.callers:
            pid, status, used = os.wait4(-1, os.WNOHANG)
            if not pid:
                break
            caller, account = self.callers.pop(pid)
            self.cpu_seconds[account] += used.ru_utime + used.ru_stime
            # A reader finds the old text or the new one
            part = Path(f"{self.cpu_files}-{account}.part")
            part.write_text(str(self.cpu_seconds[account]))
            part.replace(part.with_suffix(".cpu"))
            done.append(caller)
            tell(caller, status)
        return done

    def end(self) -> NoReturn:
        for pid in self.callers:
            os.kill(pid, signal.SIGKILL)
        os._exit(0)


def tell(caller: socket.socket, number: int) -> None:
    with contextlib.suppress(OSError):  # It was killed
        caller.sendall(f"{number}\n".encode())


def receive(caller: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """Return a process's program and its first three files; nothing if it was killed."""
    with contextlib.suppress(OSError, ValueError), caller.makefile("rb") as text:
        head, files, _, _ = socket.recv_fds(caller, 8, 3)
        return json.loads(text.read(int.from_bytes(head, "big"))), files
    return {}, []


def enter(caller: int) -> None:
    """Go to the node of scripts/cluster, if it is one, of the process that has called."""
    spaces = [f"/proc/{caller}/ns/{space}" for space in ("net", "uts", "ipc", "mnt")]
    other = [one for one in spaces if os.readlink(one) != os.readlink(f"/proc/self/ns/{one[-3:]}")]
    for file in [os.open(one, os.O_RDONLY) for one in other]:
        if ctypes.CDLL(None, use_errno=True).setns(file, 0):
            raise OSError(ctypes.get_errno(), "setns")
        os.close(file)


def open_streams() -> None:
    """Open the standard streams as Python does; the server's are a log's, without a buffer."""
    encoding, _, errors = os.environ.get("PYTHONIOENCODING", "").partition(":")
    form = {"encoding": encoding or None, "errors": errors or None}
    sys.stdin = open(0, **form, closefd=False)  # noqa: SIM115
    direct = bool(os.environ.get("PYTHONUNBUFFERED"))
    out = open(1, "wb", 0 if direct else -1, closefd=False)  # noqa: SIM115
    sys.stdout = io.TextIOWrapper(out, **form, write_through=direct)
    error = open(2, "wb", closefd=False)  # noqa: SIM115
    form["errors"] = "backslashreplace"
    sys.stderr = io.TextIOWrapper(error, **form, line_buffering=True)


def become(told: dict[str, Any]) -> None:
    """Run a program in this process's `__main__`, as `python WORDS` does."""
    os.environ.clear()
    os.environ.update(told["environment"])
    # Its children start as usual
    for name in (warm_start.SOCKETS, warm_start.ALONE, warm_start.ACCOUNT):
        os.environ.pop(name, None)
    enter(told["pid"])
    os.chdir(told["folder"])
    os.sched_setaffinity(0, told["processors"])
    open_streams()
    if told["deaf"]:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    kind, *words = told["words"]
    sys.modules["__main__"].__dict__.pop("warm_server", None)
    sys.orig_argv = [sys.executable, *told["words"]]
    sys.path[:] = told["path"]
    if kind == "-m":
        sys.path.insert(0, os.getcwd())
        sys.argv = words
        runpy._run_module_as_main(words[0])
        return
    names = sys.modules["__main__"].__dict__
    if kind == "-c":
        sys.path.insert(0, "")
        sys.argv = ["-c", *words[1:]]
        exec(compile(words[0], "<string>", "exec", dont_inherit=True), names)
        return
    sys.argv = [kind, *words]
    if Path(kind).is_dir():  # Of a package, such as scripts/bench
        sys.path.insert(0, str(Path(kind).absolute()))
        runpy._run_module_as_main("__main__", alter_argv=False)
        return
    sys.path.insert(0, str(Path(kind).resolve().parent))
    names["__file__"] = kind
    exec(compile(Path(kind).read_bytes(), kind, "exec", dont_inherit=True), names)


class End:
    """Ends a fork, once Python has waited for threads and called all functions of `atexit`.

    Python would then free all objects, and so copy most pages that the fork shares with the server,
    which takes a fifth of a CPU second.
    """

    def __init__(self) -> None:
        self.status: int | None = None
        atexit.register(self.leave)  # The first one is called last

    @contextlib.contextmanager
    def recorded(self) -> Iterator[None]:
        """Record the status with which Python ends after this block."""
        try:
            yield
            self.status = 0
        except SystemExit as end:
            self.status = end.code if isinstance(end.code, int) else int(end.code is not None)
            raise
        except Exception:
            self.status = 1
            raise

    def leave(self) -> None:
        if self.status is None or "mpi4py.MPI" in sys.modules:  # It finalizes MPI after this
            return
        with contextlib.suppress(Exception):  # Then Python reports it, with another status
            sys.stdout.flush(), sys.stderr.flush()
            os._exit(self.status)


def main(listening: int, lifeline: int, cpu_files: str) -> None:
    """Serve; in a fork, run the program that it was told."""
    loaded_in, end = warm_start.surroundings(), End()
    # What ranks of most programs import
    import cloudpickle  # noqa: F401
    import numpy as np
    import pydantic  # noqa: F401
    import tensorflow  # noqa: F401
    import typer  # noqa: F401
    import yaml  # noqa: F401

    gc.collect()
    gc.freeze()
    told = Server(listening, lifeline, cpu_files, loaded_in).serve()
    np.random.seed()  # Python's own has a new seed after each fork
    with end.recorded():
        become(told)

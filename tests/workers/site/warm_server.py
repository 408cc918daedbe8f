"""Loads TensorFlow once, and forks for each rank that calls (warm_start.py).

A connection is one rank: if it breaks off, the process that has called was killed, and so is the
fork. Started by tests/warm_ranks.py; whoever holds the other end of `lifeline` keeps it.
"""

from __future__ import annotations

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
from pathlib import Path
from typing import Any, NoReturn

import warm_start


class Server:
    """Forks for each caller. `serve` returns only in the forks, with the program they run."""

    def __init__(
        self, listening: int, lifeline: int, cpu_file: str, loaded_in: dict[str, Any]
    ) -> None:
        self.listening = socket.socket(fileno=listening)
        self.lifeline = lifeline
        self.cpu_file, self.cpu_seconds = Path(cpu_file), 0.0
        self.loaded_in = loaded_in
        self.callers: dict[int, socket.socket] = {}  # by the process that was forked for each

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
                        for one in (ended, wake, caller, self.listening, *self.callers.values()):
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
                        self.callers[pid] = caller
                        waits.register(caller, selectors.EVENT_READ)
                    else:
                        caller.close()
                else:
                    self.kill(key.fileobj)
                    waits.unregister(key.fileobj)  # `reap` closes it

    def kill(self, broken: socket.socket) -> None:
        for pid, caller in self.callers.items():
            if caller is broken:
                os.kill(pid, signal.SIGKILL)

    def reap(self) -> list[socket.socket]:
        """Tell callers how their processes have ended; return the connections."""
        done = []
        while self.callers:
            pid, status, used = os.wait4(-1, os.WNOHANG)
            if not pid:
                break
            self.cpu_seconds += used.ru_utime + used.ru_stime
            part = self.cpu_file.with_suffix(".part")  # A reader finds the old text or the new one
            part.write_text(str(self.cpu_seconds))
            part.replace(self.cpu_file)
            done.append(self.callers.pop(pid))
            tell(done[-1], status)
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
    direct = "PYTHONUNBUFFERED" in os.environ
    out = open(1, "wb", 0 if direct else -1, closefd=False)  # noqa: SIM115
    sys.stdout = io.TextIOWrapper(out, **form, write_through=direct)
    error = open(2, "wb", closefd=False)  # noqa: SIM115
    form["errors"] = "backslashreplace"
    sys.stderr = io.TextIOWrapper(error, **form, line_buffering=True)


def become(told: dict[str, Any]) -> None:
    """Run a program in this process's `__main__`, as `python WORDS` does."""
    os.environ.clear()
    os.environ.update(told["environment"])
    for name in (warm_start.SOCKETS, warm_start.ALONE):  # Its children start as usual
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


def main(listening: int, lifeline: int, cpu_file: str) -> None:
    """Serve; in a fork, run the program that it was told."""
    loaded_in = warm_start.surroundings()
    import numpy as np
    import tensorflow  # noqa: F401

    gc.collect()
    gc.freeze()
    told = Server(listening, lifeline, cpu_file, loaded_in).serve()
    np.random.seed()  # Python's own has a new seed after each fork
    become(told)

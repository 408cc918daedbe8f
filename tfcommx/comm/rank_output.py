"""Run a rank, and end when it ends, also if processes that it started keep its output open.

    horovodrun or mpirun <--pipe-- this process <--pipe-- rank ... and a process that it leaves

Both launchers, and sshd, wait for the end of a rank's pipe, which a process that the rank started
and left behind (a server of TensorBoard, a profiler) holds open until it ends. Here the pipe to the
launcher is held by this process alone. It also turns bytes that are no UTF-8 into U+FFFD, because
horovodrun stops reading at the first one.

A file that knows only the standard library: each rank has one of these processes.
"""

from __future__ import annotations

import codecs
import ctypes
import os
import resource
import selectors
import signal
import subprocess
import sys
import threading
from types import FrameType

PR_SET_PDEATHSIG = 1  # prctl(2)
# Passed on to the rank, which is in a group of its own so that it receives each once
PASSED_ON = ("SIGHUP", "SIGINT", "SIGQUIT", "SIGTERM", "SIGUSR1", "SIGUSR2")
READ_BYTES = 65_536
# Of Linux, in bytes, unless root has raised it
LARGEST_PIPE = 2**20
# A shell's exit statuses for a command that does not exist, and for one that is no program
NOT_FOUND, NOT_EXECUTABLE = 127, 126


class Relay:
    """Writes what comes from one of the rank's pipes to this process's own.

    Args:
        source: file descriptor of the rank's pipe.
        target: file descriptor of this process.
    """

    def __init__(self, source: int, target: int) -> None:
        self.source, self._target = source, target
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def pass_on(self) -> bool:
        """Read once, and write it; return False at the end, or if no process reads the output."""
        try:
            data = os.read(self.source, READ_BYTES)
            self._write(self._decoder.decode(data, final=not data).encode())
        except OSError:  # Also a pipe that is empty, in `finish`
            return False
        return bool(data)

    def finish(self) -> None:
        """Write what the rank left in the pipe; a process that it left may write without end."""
        os.set_blocking(self.source, False)
        for _ in range(LARGEST_PIPE // READ_BYTES):
            if not self.pass_on():
                return

    def _write(self, data: bytes) -> None:
        while data:
            data = data[os.write(self._target, data) :]


def start(command: list[str]) -> subprocess.Popen[bytes]:
    """Start the rank, which ends with this process, and gets the signals that come for it."""
    prctl = ctypes.CDLL(None).prctl
    early: list[int] = []
    rank: list[subprocess.Popen[bytes]] = []

    def hand_on(number: int, frame: FrameType | None) -> None:
        if rank:
            rank[0].send_signal(number)
        else:
            early.append(number)

    for name in PASSED_ON:
        number = getattr(signal, name)
        if signal.getsignal(number) is not signal.SIG_IGN:  # As by nohup; the rank inherits it
            signal.signal(number, hand_on)
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        close_fds=False,  # Its launcher may have given it some
        process_group=0,
        preexec_fn=lambda: prctl(PR_SET_PDEATHSIG, signal.SIGKILL),
    )
    rank.append(process)
    for number in early:
        process.send_signal(number)
    return process


def relay(process: subprocess.Popen[bytes]) -> int:
    """Pass the rank's output on until it has ended; return its status as `Popen` has it."""
    ended, told = os.pipe()

    def wait() -> None:
        process.wait()
        os.close(told)

    threading.Thread(target=wait, daemon=True).start()
    assert process.stdout and process.stderr
    relays = [Relay(process.stdout.fileno(), 1), Relay(process.stderr.fileno(), 2)]
    with selectors.DefaultSelector() as selector:
        selector.register(ended, selectors.EVENT_READ)
        for stream in relays:
            selector.register(stream.source, selectors.EVENT_READ, stream)
        alive = True
        while alive:
            for key, _ in selector.select():
                if key.data is None:
                    alive = False
                elif not key.data.pass_on():
                    selector.unregister(key.fd)
                    os.close(key.fd)
                    relays.remove(key.data)
    for stream in relays:
        stream.finish()
    return process.wait()


def main() -> None:
    """Run the command of the command line; end as it ends, also by a signal."""
    try:
        process = start(sys.argv[1:])
    except OSError as error:
        print(f"tfcommx: A command that can be run is required. {error}.", file=sys.stderr)
        sys.exit(NOT_FOUND if isinstance(error, FileNotFoundError) else NOT_EXECUTABLE)
    status = relay(process)
    if status < 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        if -status != signal.SIGKILL:
            signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    # Not sys.exit: the thread may hold a lock of the rank's object
    os._exit(status)


if __name__ == "__main__":
    main()

"""Start ranks with horovodrun, and wait until they have ended.

    Launch(hosts, command)  ->  Running(launch)  ->  wait(lines) -> exit status

    tfcommx run <- horovodrun (and mpirun) <- rank_output <- rank

**Ranks:** local, in the launcher. Needs neither TensorFlow nor Horovod in this process.
"""

import contextlib
import errno
import io
import multiprocessing
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import IO

from tfcommx.core import ConfigurationError, LaunchError
from tfcommx.launch.commands import ipv4_addresses, is_local
from tfcommx.launch.hosts import Host, slots_of
from tfcommx.launch.rank_output import (
    HIDDEN,
    REFUSED,
    Failure,
    RankLines,
    ends_with_this_process,
)

KINDS = ("gloo", "mpi")
# Script that starts each rank, on each host
RANK_OUTPUT = str(Path(__file__).with_name("rank_output.py"))
# Variables by which a launch of Horovod, and a supervised run, identify one of their ranks
OF_ONE_RANK = re.compile(
    r"HOROVOD_(?:(?:LOCAL_|CROSS_)?(?:RANK|SIZE)|HOSTNAME)"
    r"|TFCOMMX_(?:RUN|GENERATION|SUPERVISOR|SUPERVISOR_SECRET|STARTED)"
)
# Names of variables that may hold a secret
SECRET = re.compile("SECRET|TOKEN|PASS|CREDENTIAL|KEY|AUTH", re.IGNORECASE)
# Names of variables that horovodrun can write into the command of a shell, where it quotes values
# alone: not ProgramFiles(x86)
SHELL_NAME = re.compile(r"\w[\w.%+,:@/-]*")
# Errors of writing lines to a file whose disk is full
NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
# Time limit for the rest of the launcher's output, after all its processes have ended and lines
# that were received have been shown
OUTPUT_SECONDS = 2.0
# Longest word of a command, in bytes (MAX_ARG_STRLEN of Linux), and the share of it for the command
# of a rank and the variables that horovodrun adds
LONGEST_WORD, COMMAND_BYTES = 32 * os.sysconf("SC_PAGE_SIZE"), 8192
# Spelling of Open MPI 5, because a Horovod that set-up has not changed has one dash too few
BINDING = "--bind-to none --map-by slot"
# Options for more ranks than cores: waiting ranks sleep, because sched_yield may starve others
CROWDED = (
    "--mca mpi_yield_when_idle 1 --mca threads_pthreads_yield_strategy nanosleep "
    "--mca threads_pthreads_nanosleep_time 20000"
)


@dataclass(frozen=True)
class Launch:
    """The command of a launch, its hosts and its options.

    Args:
        hosts: a rank on every slot, numbered host by host.
        kind: "gloo", or "mpi" for routes of messages.
        mpi_args: options for mpirun, in addition to the required ones.
        options: other options of horovodrun, unchanged.
    """

    hosts: tuple[Host, ...]
    command: tuple[str, ...]
    kind: str = "gloo"
    mpi_args: str = ""
    options: tuple[str, ...] = ()

    @property
    def size(self) -> int:
        return slots_of(self.hosts)

    def host_of(self, rank: int) -> str:
        names = [host.name for host in self.hosts for _ in range(host.slots)]
        return names[rank]

    def words(self) -> list[str]:
        """Return the command line of horovodrun.

        **Raises:** LaunchError without horovodrun.
        """
        program = shutil.which("horovodrun", path=search_path())
        if program is None:
            raise LaunchError(
                f"horovodrun is required beside {sys.executable}. Install Horovod in this "
                "environment.",
                1,
            )
        where = ",".join(f"{host.name}:{host.slots}" for host in self.hosts)
        # No cache, because all launches share one file of checks that may be an hour old
        words = [program, "-np", str(self.size), "-H", where, f"--{self.kind}", "--disable-cache"]
        if self.kind == "mpi":
            crowded = max(host.slots for host in self.hosts) > (os.cpu_count() or 1)
            arguments = " ".join([CROWDED] * crowded + [self.mpi_args] * bool(self.mpi_args))
            words += [f"--binding-args={BINDING}", *[f"--mpi-args={arguments}"] * bool(arguments)]
        return [*words, *self.options, *self._command()]

    def _command(self) -> tuple[str, ...]:
        job = os.environ.get("LSB_JOBID")  # Which horovodrun must not see: environment()
        hidden = ("env", f"LSB_JOBID={job}") if job else ()
        # Because horovodrun does not quote the folder in its `cd` on other hosts, where ranks would
        # start in the home folder
        try:
            folder = os.getcwd()
        except FileNotFoundError:
            raise LaunchError(
                "A working folder is required. Received one that was deleted. `cd` to another.", 1
            ) from None
        in_folder = ("env", "-C", folder) if shlex.quote(folder) != folder else ()
        # -I, -S: because the user's packages may run any code when Python starts
        return (*in_folder, *hidden, sys.executable, "-I", "-S", RANK_OUTPUT, *self.command)


def require_small_environment(variables: Mapping[str, str]) -> None:
    """Refuse environment variables that horovodrun cannot hand on to ranks under Gloo.

    **Raises:** LaunchError that names the largest variables.
    """
    # It writes all of them into one word of a shell's command
    bytes_of = {
        name: len(os.fsencode(f"{name}={shlex.quote(value)} ")) for name, value in variables.items()
    }
    total, most = sum(bytes_of.values()), LONGEST_WORD - COMMAND_BYTES
    if total > most:
        largest = sorted(bytes_of, key=bytes_of.__getitem__, reverse=True)[:3]
        named = ", ".join(f"{name} ({bytes_of[name]})" for name in largest)
        raise LaunchError(
            f"Environment variables must have at most {most} bytes under Gloo, because horovodrun "
            f"hands them on in a command. Received {total}, most of them in {named}. Unset "
            "those that ranks do not need, or launch with --mpi.",
            1,
        )


def require_semaphores() -> None:
    """Refuse a host on which horovodrun cannot start processes. **Raises:** LaunchError."""
    try:
        multiprocessing.Lock()
    except (OSError, ImportError) as error:
        raise LaunchError(
            "A /dev/shm that can be written is required, because horovodrun has semaphores there. "
            f"Received: {error}. Mount it: mount -t tmpfs tmpfs /dev/shm; in a container, also by "
            "--shm-size or an emptyDir with `medium: Memory`.",
            1,
        ) from None


def require_interfaces(names: Collection[str]) -> None:
    """Refuse network interfaces at which ranks cannot reach horovodrun on this host.

    **Raises:** ConfigurationError.
    """
    # All, because horovodrun takes any of them
    available = [name for name, addresses in ipv4_addresses().items() if addresses]
    if missing := [name for name in names if name not in available]:
        raise ConfigurationError(
            "--network-interfaces must name interfaces with an IPv4 address, which this host and "
            f"all others have. Received {missing[0]!r}, and this host has {', '.join(available)}."
        )


def search_path() -> str:
    """Return PATH with the programs of this environment first: horovodrun, mpirun, python."""
    return f"{Path(sys.executable).parent}:{os.environ.get('PATH') or os.defpath}"


def environment() -> dict[str, str]:
    """Return horovodrun's environment variables."""
    variables = {
        name: value
        for name, value in os.environ.items()
        # In a job of LSF horovodrun looks for no network interface, and Gloo fails without one.
        # This process may be part of another launch, whose variables horovodrun would let replace
        # those of the ranks that it starts.
        if name != "LSB_JOBID" and SHELL_NAME.fullmatch(name) and not OF_ONE_RANK.fullmatch(name)
    }
    # UTF-8, because in an ASCII locale the thread that prints a rank's output would end at the
    # first other character, and all later output would be lost
    return {**variables, "PATH": search_path(), "PYTHONIOENCODING": "utf-8"}


def error_of_import() -> str:
    """Return the error of Horovod's import in the launcher's environment; empty if there is none.

    horovodrun counts any such error as a Horovod without Gloo or MPI.
    """
    # In another process, because this one does not load TensorFlow
    check = "from tfcommx.collectives.horovod import import_horovod; import_horovod()"
    command = [sys.executable, "-c", check]
    tried = subprocess.run(
        command, env=environment(), capture_output=True, text=True, errors="replace", check=False
    )
    return tried.stderr.strip().rpartition("\n")[2] if tried.returncode else ""


def on_end_signals(handle: Callable[[int, FrameType | None], None]) -> None:
    """Handle the signals that end a run, except those that are ignored, as by nohup.

    SIGINT (Ctrl-C), SIGTERM, SIGHUP, and SIGUSR1, which many job scripts let Slurm send before the
    time limit.
    """
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, handle)


def discard_unread_output() -> None:
    """Discard output that cannot be written, and all that follows."""
    # Otherwise Python would fail to flush at its end, and set the status to 120. It has None in
    # place of a closed one
    for stream in filter(None, (sys.stdout, sys.stderr)):
        try:
            stream.flush()
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


class Running:
    """A launch that has been started.

    Signals of a terminal do not reach it, because its owner decides when it ends.
    """

    def __init__(self, launch: Launch, variables: Mapping[str, str] | None = None) -> None:
        self.launch = launch
        env = environment() | dict(variables or {})
        if launch.kind == "gloo":
            require_semaphores()
            # Otherwise every user could read them in the process list for as long as ranks run
            if all(is_local(host.name) for host in launch.hosts):
                env = {HIDDEN * bool(SECRET.search(name)) + name: env[name] for name in env}
            require_small_environment(env)
        else:  # Open MPI does not start without one, as in a container or a system's service
            env.setdefault("HOME", os.path.expanduser("~"))
        # True once the ranks have been asked to end
        self.asked = False
        # Error of writing our output to a pipe whose reader has ended
        self._unread: OSError | None = None
        self.process = subprocess.Popen(
            launch.words(),
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            # Ctrl-C must reach this process only
            start_new_session=True,
            # The ranks end if this process does, also by kill -9
            preexec_fn=ends_with_this_process(signal.SIGTERM),
        )

    def terminate(self) -> None:
        """End all ranks: SIGTERM, and SIGKILL 5 s later; at once when called again."""
        number = signal.SIGKILL if self.asked else signal.SIGTERM
        self.asked = True
        # The group, because mpirun is a child of horovodrun's process
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)

    def wait(self, lines: RankLines) -> int:
        """Show the ranks' lines until all ranks have ended; return the launcher's exit status.

        **Raises:** LaunchError if the process that reads our output has ended.
        """
        lost: list[OSError] = []
        # Threads that wait for the process which reads our output, such as a pager
        showing: set[threading.Thread] = set()

        def read_lines(text: IO[str]) -> Iterator[str]:
            thread = threading.current_thread()
            while line := text.readline():
                showing.add(thread)
                try:
                    yield line
                finally:
                    showing.discard(thread)

        def relay(stream: IO[bytes]) -> None:
            # A progress bar's \r ends a line too, and must not become \n
            with io.TextIOWrapper(stream, "utf-8", newline="", errors="replace") as text:
                ended = False
                while not ended:
                    try:
                        lines.relay(read_lines(text))
                        ended = True
                    except OSError as error:
                        # A full disk under the log must not end a training that can save elsewhere
                        if error.errno in NO_ROOM:
                            lost.append(error)
                            continue
                        # No process reads our output
                        ended, self._unread = True, error
                        discard_unread_output()
                        self.terminate()
                        text.read()  # So that horovodrun can write its last words

        assert self.process.stdout and self.process.stderr
        threads = [
            threading.Thread(target=relay, args=[stream], daemon=True)
            for stream in (self.process.stdout, self.process.stderr)
        ]
        for thread in threads:
            thread.start()
        status = self.process.wait()
        # mpirun holds the other ends of the pipes until it has ended the ranks. Another process
        # may hold them for longer, such as a background process of ssh.
        while self._has_processes() and any(thread.is_alive() for thread in threads):
            time.sleep(0.05)
        deadline = time.monotonic() + OUTPUT_SECONDS
        while any(thread.is_alive() for thread in threads) and time.monotonic() < deadline:
            time.sleep(0.01)
            if showing and not self.asked:
                deadline = time.monotonic() + OUTPUT_SECONDS
        if self._unread:
            raise LaunchError(
                "The output must be read to its end. Received an error from the process that reads "
                f"it: {self._unread}. All ranks were ended; write the output to a file.",
                128 + signal.SIGPIPE,
            )
        with contextlib.suppress(OSError) if lost else contextlib.nullcontext():
            lines.finish()
        if lost:
            with contextlib.suppress(OSError):
                text = f"tfcommx: {len(lost)} lines of the output are lost: {lost[0]}."
                print(text, file=sys.stderr, flush=True)
            discard_unread_output()
        # mpirun with --enable-recovery counts them as ended in order
        if not status and len(lines.killed) == self.launch.size:
            return 128 + next(iter(lines.killed.values()))
        return status

    def _has_processes(self) -> bool:
        try:
            os.killpg(self.process.pid, 0)
        except ProcessLookupError:
            return False
        return True

    def failed(self, status: int, lines: RankLines, advice: str = "") -> LaunchError:
        """Return the error of a launch that ended with a status != 0."""
        first = lines.failure(status)
        if first is None:
            words = shlex.join(self.launch.command)
            if status < 0:  # As in `Popen`; the launcher itself could say nothing
                killed = Failure(-1, 128 - status)
                return LaunchError(
                    f"horovodrun must run as long as the ranks of `{words}`. It {killed.how()}; "
                    "all ranks were ended. Was the memory of this host full?",
                    killed.status,
                )
            reason = lines.launcher_error()
            if "support has not been built" in reason:
                reason = error_of_import() or reason
            if lines.has_ranks:  # mpirun names none of them with --enable-recovery
                parts = [f"`{words}` ended with status {status}.", *lines.missing[:1], reason]
                return LaunchError(" ".join(part.strip() for part in parts if part), status)
            return LaunchError(
                f"`{words}` did not start on all ranks, status {status}. {reason}",
                2 if reason.startswith(REFUSED) else 1,
            )
        host = self.launch.host_of(first.rank)
        parts = [
            f"Rank {first.rank} on {host} {first.how()}; all others were ended.",
            lines.report_of_missing(first.rank),
            advice,
        ]
        return LaunchError(" ".join(part for part in parts if part), first.status)

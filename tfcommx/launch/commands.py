"""Run short commands: until they end, whatever they leave, and never for longer than allowed.

Other hosts are reached as horovodrun reaches them.

**Ranks:** local, in the launcher. Needs neither TensorFlow nor Horovod.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import socket
import subprocess
import tempfile
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO, NamedTuple

from tfcommx.launch.hosts import check_host_name

# From a request to end to the end by force, for a command that is given time
GRACE_SECONDS = 10.0


class Ended(NamedTuple):
    """A command that has ended."""

    # As `Popen` has it: < 0 after a signal
    status: int
    output: str
    errors: str
    # Whether it took longer than allowed, and was ended with its children
    late: bool = False


def run_to_end(
    words: Sequence[str] | str,
    seconds: float,
    env: Mapping[str, str] | None = None,
    folder: Path | None = None,
    grace: float = 0.0,
) -> Ended:
    """Run a command without input, in a session of its own; return its status and output.

    The output goes to files: with pipes, a process that the command leaves in the background, which
    has them open, would be waited for, also after the command was killed.

    Args:
        words: the command; a string is given to the shell.
        seconds: after which it is killed together with its children, > 0.
        env: its environment; None: this process's.
        folder: where it runs; None: here.
        grace: seconds between SIGTERM to the command and SIGKILL to all, >= 0.

    Returns:
        How it ended. What is no UTF-8 in its output is replaced.

    **Ranks:** local. **Raises:** OSError if it cannot be started.
    """
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
        process = subprocess.Popen(
            words,
            shell=isinstance(words, str),
            env=env,
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=errors,
            # Ctrl-C is for this process, and the whole group can be killed
            start_new_session=True,
        )
        late = False
        try:
            process.wait(seconds)
        except subprocess.TimeoutExpired:
            late = True
            if grace:
                process.terminate()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(grace)
        finally:
            if late or process.poll() is None:  # Also after an exception, such as Ctrl-C
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        return Ended(process.returncode, _text(output), _text(errors), late)


def _text(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read().decode(errors="replace")


# The options that horovodrun gives to ssh
SSH = ("ssh", "-o", "PasswordAuthentication=no", "-o", "StrictHostKeyChecking=no")
# The first MPI operator's command in place of ssh, and where it says so
KUBEXEC, AGENT = "/etc/mpi/kubexec.sh", "OMPI_MCA_plm_rsh_agent"
# For ssh to connect, and for a command of some milliseconds to end on a host that is busy
CONNECT_SECONDS = 3
COMMAND_SECONDS = 15.0


def is_local(host: str) -> bool:
    """Tell whether a host's name means this host: horovodrun then starts ranks without ssh."""
    import psutil  # Horovod needs it

    try:
        address = socket.gethostbyname(host)
    except OSError:
        return False
    own = (one for addresses in psutil.net_if_addrs().values() for one in addresses)
    return any(one.address == address for one in own)


class RemoteHosts(NamedTuple):
    """How other hosts are reached: ssh's port and private key; None: as ssh is configured."""

    port: int | None = None
    identity_file: Path | None = None

    def words(self, host: str, command: Sequence[str]) -> list[str]:
        """Return the words that run a command on a host. **Raises:** LaunchError for no host."""
        check_host_name(host, "the list of hosts")
        if os.environ.get(AGENT) == KUBEXEC:
            return [KUBEXEC, host, shlex.join(command)]
        words = [*SSH, "-o", f"ConnectTimeout={CONNECT_SECONDS}"]
        words += [] if self.port is None else ["-p", str(self.port)]
        words += [] if self.identity_file is None else ["-i", str(self.identity_file)]
        return [*words, "--", host, shlex.join(command)]

    def run(self, hosts: Collection[str], command: Sequence[str]) -> Mapping[str, str]:
        """Run a command on several hosts at once; return the output of those on which it succeeds.

        **Cost:** one connection to each host; at most `COMMAND_SECONDS`.
        """
        if not hosts:
            return {}
        with ThreadPoolExecutor(min(len(hosts), 32)) as pool:
            outputs = pool.map(lambda host: _output(self.words(host, command)), hosts)
            found = dict(zip(hosts, outputs, strict=True))
        return {host: output for host, output in found.items() if output is not None}


def _output(words: list[str]) -> str | None:
    """Return what a command has written; None if it failed or took too long."""
    try:
        done = run_to_end(words, COMMAND_SECONDS)
    except OSError:
        return None
    return None if done.status or done.late else done.output

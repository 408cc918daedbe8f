"""Run short commands with a time limit, and without waiting for their background processes.

Other hosts are reached in the same way as by horovodrun.

**Ranks:** local, in the launcher. Needs neither TensorFlow nor Horovod.
"""

import contextlib
import os
import re
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

# Seconds from SIGTERM to SIGKILL, for a command that may clean up
GRACE_SECONDS = 10.0


class Ended(NamedTuple):
    """The result of a command that has ended."""

    # Return code as in `Popen`: < 0 after a signal
    status: int
    output: str
    errors: str = ""
    # True if the command exceeded its time limit and was ended with its children
    late: bool = False


def run_to_end(
    words: Sequence[str] | str,
    seconds: float,
    env: Mapping[str, str] | None = None,
    folder: Path | None = None,
    grace: float = 0.0,
) -> Ended:
    """Run a command without input, in a separate session; return its status and output.

    Args:
        words: the command; a string is given to the shell.
        seconds: time limit, > 0, after which the command is killed together with its children.
        env: its environment; None: this process's.
        folder: working folder; None: this process's.
        grace: seconds between SIGTERM to the command and SIGKILL to all, >= 0.

    **Ranks:** local. **Raises:** OSError if it cannot be started.
    """
    # Not pipes, because a background process of the command would hold them open, and the reader
    # would wait for it even after the command was killed
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
        process = subprocess.Popen(
            words,
            shell=isinstance(words, str),
            env=env,
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=errors,
            # Ctrl-C must reach this process only, and the group must be killable as a whole
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


# Programs that read their script from standard input if no word names it
_INTERPRETERS = re.compile(r"(?:i?python|pypy)[\d.]*|(?:ba|da|k|z|c|tc)?sh")
# Their options that are followed by a value: of shells, and of Python, whose -O has none
_SHELL_VALUE = re.compile(r"[-+]\w*[oO]|--(?:rcfile|init-file)")
_PYTHON_VALUE = re.compile(r"-\w*[WX]|--check-hash-based-pycs")


def reads_script_from_input(words: Sequence[str]) -> bool:
    """Return True if a command is an interpreter that would read its script from standard input.

    >>> commands = ("python", "python3 -", "bash -s", "python -u train.py", "python -m train")
    >>> [reads_script_from_input(command.split()) for command in commands]
    [True, True, True, False, False]
    """
    if not _INTERPRETERS.fullmatch(os.path.basename(words[0])):
        return False
    shell, rest = words[0].endswith("sh"), iter(words[1:])
    with_value = _SHELL_VALUE if shell else _PYTHON_VALUE
    for word in rest:
        if word == "-" or (shell and re.fullmatch(r"-\w*s\w*", word)):
            return True
        if not word.startswith(("-", "+")) or re.fullmatch(r"-\w*[cm]|-[cm].+", word):
            return False
        # Such an option ends Python at once
        if re.fullmatch(r"-V+|-h|-\?|--(?:version|help.*)", word):
            return False
        if with_value.fullmatch(word):
            next(rest, None)
    return True


# The options that horovodrun gives to ssh
_SSH = ("ssh", "-o", "PasswordAuthentication=no", "-o", "StrictHostKeyChecking=no")
# Command that the first MPI operator uses in place of ssh, and the variable that names it
KUBEXEC, AGENT = "/etc/mpi/kubexec.sh", "OMPI_MCA_plm_rsh_agent"
# Limits in seconds: for ssh to connect, and for a command of milliseconds on a busy host
CONNECT_SECONDS = 3
COMMAND_SECONDS = 15.0


def ipv4_addresses() -> dict[str, list[str]]:
    """Return this host's network interfaces, and the IPv4 addresses of each."""
    import psutil  # A requirement of Horovod

    return {
        name: [entry.address for entry in entries if entry.family == socket.AF_INET]
        for name, entries in psutil.net_if_addrs().items()
    }


def is_local(host: str) -> bool:
    """Return True if a name resolves to this host, where horovodrun starts ranks without ssh."""
    try:
        address = socket.gethostbyname(host)
    except (OSError, UnicodeError):  # The latter for a part of more than 63 characters
        return False
    return any(address in own for own in ipv4_addresses().values())


class RemoteHosts(NamedTuple):
    """Options for reaching other hosts: ssh's port and private key; None: as ssh is configured."""

    port: int | None = None
    identity_file: Path | None = None

    def words(self, host: str, command: Sequence[str]) -> list[str]:
        """Return the words that run a command on a host.

        **Raises:** ConfigurationError for an invalid host name.
        """
        check_host_name(host, "the list of hosts")
        if os.environ.get(AGENT) == KUBEXEC:
            return [KUBEXEC, host, shlex.join(command)]
        words = [*_SSH, "-o", f"ConnectTimeout={CONNECT_SECONDS}"]
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
            by_host = dict(zip(hosts, outputs, strict=True))
        return {host: output for host, output in by_host.items() if output is not None}


def _output(words: list[str]) -> str | None:
    """Return a command's output; None if it failed or took too long."""
    try:
        done = run_to_end(words, COMMAND_SECONDS)
    except OSError:
        return None
    return None if done.status or done.late else done.output

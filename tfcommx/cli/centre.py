"""`tfcommx centre`: let the last process of a launch hold the centre of elastic averaging."""

import os
import shutil
import signal
import sys
from typing import Annotated

import typer

from tfcommx.core import ConfigurationError
from tfcommx.launch.launcher import CENTRE_LAUNCH, CENTRE_VARIABLE, launcher, run_name

# Least number of processes: two that train, and one with the centre
FEWEST = 3
SERVER = [sys.executable, "-m", "tfcommx.strategies.easgd.process"]


def centre(
    command: Annotated[
        list[str], typer.Argument(help="Command of the other processes, such as `python train.py`.")
    ],
) -> None:
    """Run COMMAND in all processes but the last, which holds the centre of elastic averaging.

    For scripts with `cx.strategies.ElasticAveraging(server="extra_rank")`; size() and rank() in
    them are those of the processes that train: `tfcommx run -np 9 -H node1:4,node2:5 --mpi
    --mpi-args=--enable-recovery -- tfcommx centre -- python train.py`.
    """
    process = launcher()
    if process.kind != "mpi" or process.size < FEWEST:
        raise ConfigurationError(
            f"An MPI launch of at least {FEWEST} processes is required: {CENTRE_LAUNCH}. Received "
            f"{process.size} processes, launched by {process.kind}."
        )
    if shutil.which(command[0]) is None:
        raise ConfigurationError(f"A command that can be run is required. Received {command[0]!r}.")
    words = SERVER if process.rank == process.size - 1 else command
    os.environ[CENTRE_VARIABLE] = run_name()
    sys.stdout.flush()
    # Because Python ignores SIGPIPE, and the command must not inherit that
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    os.execvp(words[0], words)

"""`tfcommx centre`: let the last process of a launch hold the centre of elastic averaging."""

from __future__ import annotations

import os
import shutil
import signal
import sys
from typing import Annotated

import typer

from tfcommx.core import ConfigurationError
from tfcommx.launch.launcher import CENTRE_LAUNCH, CENTRE_VARIABLE, launcher, run_name

# Two that train, and the one with the centre
FEWEST = 3
SERVER = [sys.executable, "-m", "tfcommx.strategies.easgd.process"]


def centre(
    command: Annotated[
        list[str], typer.Argument(help="What the other processes run, such as `python train.py`.")
    ],
) -> None:
    """Run COMMAND in all processes but the last, which holds the centre of elastic averaging.

    For scripts with `cx.strategies.ElasticAveraging(server="extra_rank")`; size() and rank() in
    them are those of the processes that train: `tfcommx run -np 9 -H node1:4,node2:5 --mpi
    --mpi-args=--enable-recovery -- tfcommx centre -- python train.py`.
    """
    here = launcher()
    if here.kind != "mpi" or here.size < FEWEST:
        raise ConfigurationError(
            f"An MPI launch of at least {FEWEST} processes is required: {CENTRE_LAUNCH}. Received "
            f"{here.size} processes, launched by {here.kind}."
        )
    if shutil.which(command[0]) is None:
        raise ConfigurationError(f"A command that can be run is required. Received {command[0]!r}.")
    words = SERVER if here.rank == here.size - 1 else command
    os.environ[CENTRE_VARIABLE] = run_name()
    sys.stdout.flush()
    # Python ignores SIGPIPE; the command must not inherit that
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    os.execvp(words[0], words)

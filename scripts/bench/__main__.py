"""The start of `python scripts/bench` and of `python -m bench`."""

import os
import signal
import sys
from pathlib import Path

# In place of this folder, so that the package is found by its name
sys.path[0] = str(Path(__file__).resolve().parent.parent)

from bench.command import main  # noqa: E402

try:
    status = main(sys.argv[1:])
    sys.stdout.flush()
except BrokenPipeError:  # As after `| head`
    # Python flushes once more at its end
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    status = 128 + signal.SIGPIPE  # As other programs; not 0, because a benchmark was not judged
sys.exit(status)

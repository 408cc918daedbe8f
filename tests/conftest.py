"""Shared by all tests: quiet TensorFlow, hypothesis's cases, which tests begin first."""

from __future__ import annotations

import gc
import os
import re
import signal
import sys
import tempfile
from typing import TYPE_CHECKING

import pytest
import warm_ranks
from hypothesis import settings

if TYPE_CHECKING:
    from xdist.workermanage import WorkerController

gc.set_threshold(100_000, 50, 50)  # Loading TensorFlow, and tracing, make much and little garbage
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "0")
# Ranks that share few cores look for work less often than every millisecond, because each look
# costs CPU time: with 6 instead of 3 ms tests of optimizers and callbacks took a quarter less
os.environ.setdefault("HOROVOD_CYCLE_TIME", "6")
# Images of Python keep no bytecode: each process that tests start would compile tfcommx again
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
# A job in the background of a shell ignores Ctrl-C, and so would all that tests start
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
# Launches cache the choices of Scheme("auto") here, not in the user's own folder
KEPT = tempfile.TemporaryDirectory(prefix="tfcommx_kept")
os.environ["TFCOMMX_CACHE"] = KEPT.name

# `make test` tries the same cases every time, and fewer of them; `make test-all` new ones, by the
# option --hypothesis-profile=random
settings.register_profile("same", derandomize=True, deadline=None, max_examples=10)
settings.register_profile("random", deadline=None, print_blob=True)
settings.load_profile("same")

FIRST = (
    # The longest launches keep all processors busy, so tests that mostly wait run beside them
    "tests/test_real_ranks",
    "tests/scripts/cluster/",
    "tests/watch/",
    "tests/launch/",
    "tests/collectives/",
    "tests/supervisor/",
    "tests/cli/test_run.py",
    # Launches and compilers
    "tests/cli/test_train_launch.py",
    "tests/kernels/test_cuda.py",
    "tests/scripts/bench/",
    "tests/training/",
    "tests/kernels/test_scan.py",
    "tests/packaging/",
    "tests/testing/",
)


def pytest_configure(config: pytest.Config) -> None:
    """Let ranks load TensorFlow for themselves in `make test-all`."""
    warm_ranks.wanted = bool(re.search(r"not\b.*exhaustive", config.option.markexpr))
    warm_ranks.shared = getattr(config, "workerinput", {}).get("warm_ranks", "")


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: WorkerController) -> None:
    """Share the servers of warm ranks between the workers; `make check` may need none."""
    if warm_ranks.wanted and "long_wait" not in node.config.option.markexpr:
        node.workerinput["warm_ranks"] = warm_ranks.servers().name


def pytest_collection_finish() -> None:
    """Keep the garbage collector from looking through all modules when a test calls it.

    A full collection takes half a second in a process that has loaded TensorFlow and all tests.
    """
    gc.collect()
    gc.freeze()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the long tests, so that no worker is left alone with one at the end."""

    def place(item: pytest.Item) -> int:
        listed = (at for at, name in enumerate(FIRST) if item.nodeid.startswith(name))
        return next(listed, len(FIRST) + (item.get_closest_marker("long_wait") is None))

    items.sort(key=place)

"""The Comm of this process, which init() made."""

from tfcommx.collectives.comm import Comm
from tfcommx.core import LaunchError

_current: Comm | None = None


def current() -> Comm:
    """Return the Comm that init() made.

    **Raises:** LaunchError before init().
    """
    if _current is None:
        raise LaunchError(
            "tfcommx.init() must be called first, once, at the start of the script on every rank."
        )
    return _current


def started() -> bool:
    """Return True if init() was called."""
    return _current is not None


def set_current(comm: Comm | None) -> None:
    """Make `comm` the Comm of this process; None forgets it."""
    global _current
    _current = comm


def rank() -> int:
    """Return this process's rank, in [0, size())."""
    return current().rank


def size() -> int:
    """Return the number of ranks."""
    return current().topology.size


def local_rank() -> int:
    """Return this process's number on its host, in [0, local_size()).

    It refers to the host even if `init(node_size=...)` counts another number of ranks as a node.
    Use it for work that is done once per host, such as unpacking a data set; init() assigns GPUs.
    """
    return current().local_rank


def local_size() -> int:
    """Return the number of ranks on this process's host."""
    return current().local_size


def is_chief() -> bool:
    """Return True on rank 0, which prints and saves."""
    return rank() == 0

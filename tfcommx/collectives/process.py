"""The process's own Comm, as init() made it."""

from __future__ import annotations

from tfcommx.collectives.comm import Comm

_current: Comm | None = None


def current() -> Comm:
    """Return the Comm that init() made.

    **Raises:** RuntimeError before init().
    """
    if _current is None:
        raise RuntimeError(
            "tfcommx.init() must be called first, once, at the start of the script on every rank."
        )
    return _current


def started() -> bool:
    """Tell whether init() was called."""
    return _current is not None


def set_current(comm: Comm | None) -> None:
    """Make `comm` the process's own; None forgets it."""
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

    The host's, also where `init(node_size=...)` says that another number of ranks stands for a
    node. For what is done once on a host, such as unpacking a data set: GPUs are given by init().
    """
    return current().local_rank


def local_size() -> int:
    """Return the number of ranks on this process's host."""
    return current().local_size


def is_chief() -> bool:
    """Tell whether this is rank 0, which prints and saves."""
    return rank() == 0

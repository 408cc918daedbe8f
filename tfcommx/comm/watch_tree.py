"""Which watchers are connected: at most 7 to each, however many ranks there are.

A tree with 4 children to a rank, and a ring, which keeps what is below a dead rank connected with
the rest.

    0 --+-- 1 --+-- 5        tree: the parent of r is (r - 1) // 4
        |       +-- 6
        |       +-- 7        ring: 0 -- 1 -- 2 -- ... -- p-1 -- 0
        |       +-- 8
        +-- 2 --+-- 9 ...
        +-- 3
        +-- 4
"""

from __future__ import annotations

CHILDREN = 4


def parent(rank: int) -> int | None:
    """Return the rank above in the tree; None for rank 0."""
    return (rank - 1) // CHILDREN if rank else None


def children(rank: int, size: int) -> list[int]:
    """Return the ranks below in the tree."""
    first = CHILDREN * rank + 1
    return list(range(first, min(first + CHILDREN, size)))


def neighbours(rank: int, size: int) -> list[int]:
    """Return the ranks whose watchers this rank's watcher is connected to, ascending.

    >>> neighbours(0, 2), neighbours(1, 100), neighbours(99, 100)
    ([1], [0, 2, 5, 6, 7, 8], [0, 24, 98])
    """
    above = {parent(rank)} - {None}
    return sorted({*above, *children(rank, size), (rank - 1) % size, (rank + 1) % size} - {rank})

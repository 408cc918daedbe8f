"""Merging by size: a bucket is closed as soon as it is large enough.

Gradients a to f become ready one after another, of 4 4 9 1 2 2 bytes; bucket_bytes is 8:

    backward pass   |  a  |  b  |  c  |  d  |  e  |  f  |
    sent                         [a b]   [c]               [d e f]

The last bucket may be smaller, and is sent after the backward pass. Horovod's tensor fusion does
the same with what is ready within a cycle.
"""

from __future__ import annotations

from collections.abc import Sequence


class Threshold:
    """The identity among the solvers: the sizes alone decide."""

    name = "threshold"

    def groups(self, sizes_bytes: Sequence[int], bucket_bytes: int) -> list[list[int]]:
        """Group consecutive positions until a group holds at least `bucket_bytes`.

        >>> SOLVER.groups([4, 4, 9, 1, 2, 2], 8)
        [[0, 1], [2], [3, 4, 5]]

        Args:
            sizes_bytes: bytes of each gradient, in the order in which they become ready.
            bucket_bytes: size at which a group is closed, >= 1.

        Returns:
            The positions of each group; every position in exactly one. The last group may be
            smaller.
        """
        groups: list[list[int]] = []
        room = 0
        for position, size in enumerate(sizes_bytes):
            if room <= 0:
                groups.append([])
                room = bucket_bytes
            groups[-1].append(position)
            room -= size
        return groups


SOLVER = Threshold()

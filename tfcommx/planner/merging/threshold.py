"""Which gradients travel together: pure functions from sizes to groups.

Merging saves start-ups and costs overlap: a bucket leaves when its last gradient is ready.
"""

from __future__ import annotations

from collections.abc import Sequence


def by_size(sizes_bytes: Sequence[int], bucket_bytes: int) -> list[list[int]]:
    """Group consecutive positions until a group holds at least `bucket_bytes`.

        sizes  4 4 9 1 2 2, bucket_bytes 8  ->  [0 1] [2] [3 4 5]

    Args:
        sizes_bytes: bytes of each gradient, in the order in which they become ready.
        bucket_bytes: size at which a group is closed, >= 1.

    Returns:
        The positions of each group; every position in exactly one. The last group may be smaller.
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

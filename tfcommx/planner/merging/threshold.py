"""Merging by size: a bucket is closed as soon as it is large enough.

Gradients a to f become ready one after another, of 4 4 9 1 2 2 bytes; bucket_bytes is 8:

    backward pass   |  a  |  b  |  c  |  d  |  e  |  f  |
    sent                         [a b]   [c]               [d e f]

The last bucket may be smaller, and is sent after the backward pass. Horovod's tensor fusion does
the same with what is ready within a cycle.

Source: MGS-SGD of Shi et al., "Communication-Efficient Distributed Deep Learning with Merged
Gradient Sparsification on GPUs" (2020), section V-D, merges up to 8,192 entries so.
"""

from __future__ import annotations

from tfcommx.planner.merging.base import Groups, Prices
from tfcommx.terms import Profile


def threshold(profile: Profile, prices: Prices) -> Groups:
    """Group consecutive positions until a group holds at least `prices.bucket_bytes`.

    The last group may be smaller.
    """
    groups: Groups = []
    room = 0
    for position, row in enumerate(profile.variables):
        if room <= 0:
            groups.append([])
            room = prices.bucket_bytes
        groups[-1].append(position)
        room -= prices.entry_bytes * row.size
    return groups

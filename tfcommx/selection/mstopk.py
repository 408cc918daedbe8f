"""Rule `mstopk`: all above a band that holds the k-th largest magnitude, and a random run of it.

The band is 1/4096 wide, relative to its magnitude: what is chosen differs from the exact top k only
in there.

**Source:** Shi et al., Towards Scalable Distributed Training of Deep Learning on Public Cloud
Clusters, 2021, Algorithm 1; we find the thresholds by counting in bins, in one pass, instead of by
a binary search.
"""

from __future__ import annotations

from tfcommx.selection.native import NativeSelector

RULE = NativeSelector("mstopk")

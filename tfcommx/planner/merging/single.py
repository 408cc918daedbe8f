"""Everything in one bucket, after the backward pass: TopK-SGD.

    compute   |  a  |  b  |  c  | select abc |
    port                                     |  message abc  |

Source: Aji and Heafield, "Sparse Communication for Distributed Gradient Descent" (2017); TopK-SGD
of Shi et al., "Communication-Efficient Distributed Deep Learning with Merged Gradient
Sparsification on GPUs" (2020), equation 4 and figure 1(b).
"""

from __future__ import annotations

from tfcommx.planner.merging.base import Groups, Prices
from tfcommx.terms import Profile


def single(profile: Profile, prices: Prices) -> Groups:
    """Put all positions into one group."""
    return [list(range(len(profile.variables)))] if profile.variables else []

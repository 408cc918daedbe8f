"""Every gradient in a bucket of its own: P-SGD, and with a selection LAGS-SGD.

    compute   |  a  | select a |  b  | select b |  c  | select c |
    port                       |   message a   | message b |     | message c |

Source: wait-free backpropagation of Zhang et al., "Poseidon" (2017), and of Awan et al., "S-Caffe"
(2017); LAGS-SGD of Shi et al., "Layer-Wise Adaptive Gradient Sparsification" (2020); both in Shi
et al., "Communication-Efficient Distributed Deep Learning with Merged Gradient Sparsification on
GPUs" (2020), equations 5 to 9 and figures 1(a) and 1(c).
"""

from __future__ import annotations

from tfcommx.planner.merging.base import Groups, Prices
from tfcommx.terms import Profile


def each(profile: Profile, prices: Prices) -> Groups:
    """Put each position into its own group."""
    return [[position] for position in range(len(profile.variables))]

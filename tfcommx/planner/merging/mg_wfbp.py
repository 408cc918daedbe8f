"""MG-WFBP: a gradient joins the next one if waiting for it takes less than a latency term.

Bucket a could be sent at `start`, but b is ready less than a latency term later, so both wait; c
comes too late:

    backward pass   |  a  | b |           c          |
    port                  | start
                              |  message ab  |       |  message c  |

Selection is not counted.

Source: Shi et al., "MG-WFBP: Efficient Data Communication for Distributed Synchronous SGD
Algorithms" (2019), Algorithm 1: layer l is merged into layer l - 1 if tau_b(l-1) + t_b(l-1) -
tau_c(l) < a. In one pass, because a decision needs only what came before it.
"""

from __future__ import annotations

from tfcommx.planner.merging.base import Groups, Prices, ready_times
from tfcommx.terms import Profile


def mg_wfbp(profile: Profile, prices: Prices) -> Groups:
    """Merge each group with the next gradient if that one is ready in less than a latency.

    **Cost:** two prices for each gradient.
    """
    ready, startup = ready_times(profile), prices.startup_s
    groups: Groups = []
    port_free, size = 0.0, 0
    for position, row in enumerate(profile.variables):
        if not groups or ready[position] - max(port_free, ready[position - 1]) >= startup:
            if groups:
                port_free = max(port_free, ready[position - 1]) + prices.message_s(size)
            groups.append([])
            size = 0
        groups[-1].append(position)
        size += row.size
    return groups

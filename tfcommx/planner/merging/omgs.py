"""OMGS: a group waits for the next gradient if both, selected and sent together, end earlier.

Group a is selected and waits for the port; merging it with b saves a latency term, if the selection
of both ends before the port is free or soon after (Q5) and b alone would wait anyway (Q3):

    compute       |  a  | select a |  b  | select b |
    port    ... before ...             | message a  | message b |

    compute       |  a  |  b  |   select ab   |
    port    ... before ...                    | message ab |

The paper calls the result optimal; it is so for two neighbours, not for a whole step
(tests/planner/merging/test_omgs.py has an example). `optimal` is.

Source: Shi et al., "Communication-Efficient Distributed Deep Learning with Merged Gradient
Sparsification on GPUs" (2020), Algorithm 1 (FindMergedLayers), equations 23 to 25. The times of the
layers still to come enter no decision, so one pass gives what the printed algorithm does by
recomputing all timestamps after each merge. Nothing selected or sent takes no time, as equation 13
has it (AGPM(0) of the listing would be alpha), and line 10 restarts at the group's own timestamp,
as in the authors' code.
"""

from __future__ import annotations

from tfcommx.planner.merging.base import Groups, Prices, ready_times
from tfcommx.terms import Profile


def omgs(profile: Profile, prices: Prices) -> Groups:
    """Merge each group with the next gradient if conditions Q3 and Q5 hold.

    The selection is priced by `prices.selection_s`: gamma rho d log d (equation 10) or a
    measured curve.

    **Cost:** five prices for each gradient.
    """
    ready, startup = ready_times(profile), prices.startup_s
    groups: Groups = []
    # Of the group that is still open: entries, and when its last gradient is ready.
    size, computed = 0, 0.0
    port_free = 0.0
    for position, row in enumerate(profile.variables):
        takes = ready[position] - (ready[position - 1] if position else 0.0)
        if groups:
            selected = prices.selection_s(size)
            sent = max(port_free, computed + selected)
            # Q3 and Q5 of the paper
            alone = computed + takes + selected + prices.selection_s(row.size)
            merged = computed + takes + prices.selection_s(size + row.size)
            if alone < sent + prices.message_s(size) and sent + startup > merged:
                groups[-1].append(position)
                size, computed = size + row.size, computed + takes
                continue
            port_free = sent + prices.message_s(size)
            computed += selected
        groups.append([position])
        size, computed = row.size, computed + takes
    return groups

"""Merging in one pass over the gradients: single, each, threshold, MG-WFBP and OMGS."""

from tfcommx.core import Profile
from tfcommx.planner.merging.merging import Groups, Prices, ready_times


def single(profile: Profile, prices: Prices) -> Groups:
    """Put all positions into one group, sent after the backward pass: TopK-SGD.

        compute   |  a  |  b  |  c  | select abc |
        port                                     |  message abc  |

    Source: Aji and Heafield, "Sparse Communication for Distributed Gradient Descent" (2017);
    TopK-SGD of Shi et al., "Communication-Efficient Distributed Deep Learning with Merged Gradient
    Sparsification on GPUs" (2020), equation 4 and figure 1(b).
    """
    return [list(range(len(profile.variables)))] if profile.variables else []


def each(profile: Profile, prices: Prices) -> Groups:
    """Put each position into its own group: P-SGD, and with a selection LAGS-SGD.

        compute   |  a  | select a |  b  | select b |  c  | select c |
        port                       |   message a   | message b |     | message c |

    Source: wait-free backpropagation of Zhang et al., "Poseidon" (2017), and of Awan et al.,
    "S-Caffe" (2017); LAGS-SGD of Shi et al., "Layer-Wise Adaptive Gradient Sparsification" (2020);
    both in Shi et al., "Communication-Efficient Distributed Deep Learning with Merged Gradient
    Sparsification on GPUs" (2020), equations 5 to 9 and figures 1(a) and 1(c).
    """
    return [[position] for position in range(len(profile.variables))]


def threshold(profile: Profile, prices: Prices) -> Groups:
    """Group consecutive positions until a group holds at least `prices.bucket_bytes`.

    Gradients a to f become ready one after another, of 4 4 9 1 2 2 bytes; bucket_bytes is 8:

        backward pass   |  a  |  b  |  c  |  d  |  e  |  f  |
        sent                         [a b]   [c]               [d e f]

    The last bucket may be smaller, and is sent after the backward pass. Horovod's tensor fusion
    does the same with the gradients that are ready within a cycle.

    Source: MGS-SGD of Shi et al., "Communication-Efficient Distributed Deep Learning with Merged
    Gradient Sparsification on GPUs" (2020), section V-D, closes its groups so at 8,192 entries.
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


def mg_wfbp(profile: Profile, prices: Prices) -> Groups:
    """Merge each group with the next gradient if that one is ready in less than a latency: MG-WFBP.

    Bucket a could be sent at `start`, but b is ready less than a latency term later, so both wait;
    c is ready too late:

        backward pass   |  a  | b |           c          |
        port                  | start
                                  |  message ab  |       |  message c  |

    Selection is not counted.

    Source: Shi et al., "MG-WFBP: Efficient Data Communication for Distributed Synchronous SGD
    Algorithms" (2019), Algorithm 1: layer l is merged into layer l - 1 if tau_b(l-1) + t_b(l-1) -
    tau_c(l) < a. In one pass, because a decision depends only on earlier gradients.

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


def omgs(profile: Profile, prices: Prices) -> Groups:
    """Merge each group with the next gradient if both, sent together, end earlier: OMGS.

    Group a is selected and waits for the port; merging it with b saves a latency term, if the
    selection of both ends before the port is free or soon after (Q5) and b alone would wait anyway
    (Q3):

        compute       |  a  | select a |  b  | select b |
        port    ... before ...             | message a  | message b |

        compute       |  a  |  b  |   select ab   |
        port    ... before ...                    | message ab |

    The paper calls the result optimal; it is so for two neighbours, not for a whole step
    (tests/planner/merging/test_omgs.py has an example). `optimal` is.

    Source: Shi et al., "Communication-Efficient Distributed Deep Learning with Merged Gradient
    Sparsification on GPUs" (2020), Algorithm 1 (FindMergedLayers), equations 23 to 25. The times of
    later layers enter no decision, so one pass has the result of the printed algorithm without
    recomputing all timestamps after each merge. Nothing selected or sent takes no time, as equation
    13 has it (AGPM(0) of the listing would be alpha), and line 10 restarts at the group's own
    timestamp, as in the authors' code.

    The selection is priced by `prices.selection_s`: gamma rho d log d (equation 10) or a
    measured curve.

    **Cost:** five prices for each gradient.
    """
    ready, startup = ready_times(profile), prices.startup_s
    groups: Groups = []
    # The open group's entries, and the time at which its last gradient is ready.
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

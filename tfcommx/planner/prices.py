"""Prepares the input of merging solvers: prices of a group of gradients, and ready times."""

import dataclasses
import functools
from collections.abc import Callable, Sequence

from tfcommx.core import Bucket, Links, Piece, PlanError, Profile, Topology, VariableProfile
from tfcommx.planner.merging.merging import Prices
from tfcommx.routes.route import SELECT
from tfcommx.simulator.assumptions import Assumptions
from tfcommx.simulator.step import stages_of

# Defaults of a bucket's size. A step of two ranks took .89 to 1.04 of plain Horovod's with 4 MiB,
# but 1.13 to 1.22 with 32 MiB, because that bucket held the whole model and hid nothing
# (docs/laboratory/exchange.md)
LEAST_BUCKET_BYTES = 4 * 2**20
FEW_BUCKETS, MOST_BUCKETS, MOST_FUSED_BUCKETS = 4, 16, 64
# How much longer all buckets may take than one that holds everything, one after the other
MOST_LATENCY = 0.2


def prices_of(
    make_bucket: Callable[[int], Bucket], topology: Topology, links: Links, assumptions: Assumptions
) -> Prices:
    """Price groups of a stream of gradients as the simulator does.

    A selection in the middle of a route, such as HiTopKComm's, is counted as part of its message.
    """

    @functools.cache
    def split(entries: int) -> tuple[float, float]:
        """Return the seconds of the selection, or compression, before a message, and the rest."""
        stages = stages_of(make_bucket(entries), topology, links, assumptions)
        # It is first, too, if the route's first collective is in a group of one rank
        before = stages[0].seconds if stages and stages[0].resource == SELECT else 0.0
        return before, sum(stage.seconds for stage in stages) - before

    return Prices(
        message_s=lambda entries: split(entries)[1],
        selection_s=lambda entries: split(entries)[0],
        selection_on=assumptions.selection_on,
        entry_bytes=make_bucket(1).entry_bytes,
    )


def default_bucket_bytes(prices: Prices | None, stream_bytes: int, fused: bool) -> int:
    """Return the size of buckets that suits a stream of gradients, if the user requests none.

    A smaller bucket hides more behind the backward pass, a larger one pays its latency less often.

    Args:
        prices: of the stream; None if the price of merged gradients is not that of their entries,
            as with a compression: then only the number of buckets is limited.
        stream_bytes: of all its gradients, >= 0.
        fused: whether the engine fuses the route's waiting buckets.

    **Source:** simulated steps of ResNet-50, BERT-Large and GPT-2 on 2 to 64 nodes:
    docs/laboratory/exchange.md.
    """
    # The number of buckets is limited, because each takes part in the engine's negotiation. Where
    # Horovod fuses waiting buckets, small ones cost nothing else
    if fused:
        return max(LEAST_BUCKET_BYTES, stream_bytes // MOST_FUSED_BUCKETS)
    size = max(LEAST_BUCKET_BYTES, stream_bytes // MOST_BUCKETS)
    # Doubled until latency no longer makes all buckets much slower than a single one
    while prices is not None and size * FEW_BUCKETS < stream_bytes:
        one_by_one_s = prices.message_s(size // prices.entry_bytes) * stream_bytes / size
        at_once_s = prices.message_s(stream_bytes // prices.entry_bytes)
        if one_by_one_s <= (1 + MOST_LATENCY) * at_once_s:
            break
        size *= 2
    return size


def sub_profile(
    variables: Sequence[tuple[str, tuple[int, ...], str]], profile: Profile | None
) -> Profile:
    """Return the profile of some gradients in backward order; of their sizes if there is none.

    Args:
        variables: path, or name of a piece, then shape and dtype of each.

    **Raises:** PlanError for a profile of another model, naming a variable.
    """
    if profile is None:
        rows = tuple(VariableProfile(*variable) for variable in variables)
        return Profile.of_sizes("these gradients", rows)
    measured, timed = {variable.name: variable for variable in profile.variables}, []
    for name, shape, dtype in variables:
        path = Piece.of(name).path
        row = measured.get(path)
        if row is None or (path == name and row.shape != tuple(shape)):
            problem = "does not have it" if row is None else f"has {row.shape}"
            raise PlanError(
                f"A profile of this model is required. The model has {path!r} of shape "
                f"{tuple(shape)}; the profile of {profile.model!r} {problem}. Measure this model."
            )
        timed.append(VariableProfile(name, shape, dtype, row.ready_s, row.ready_spread_s))
    return dataclasses.replace(profile, variables=tuple(timed))

"""Finds the schemes that lose least within a budget of bytes between nodes.

    loses nothing    16 bits    int8    int4    int2    int1    selection: 10 % ... .1 %
    0                3e-6       4e-5    .014    .118    .363    .56        ... .99

Below each kind stands the share of the squares that one exchange of normally distributed entries
does not deliver. Error feedback delivers it later. The first kind that fits is taken, because late
entries cost accuracy; docs/explanation/routes.md derives the numbers.

All of it follows from `wire_bytes`, and nothing from times.
"""

import bisect
import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

from tfcommx.core import NOISY, PLAIN, Piece, Plan, PlanError, Scheme, Topology
from tfcommx.planner.choose import on_dense_routes, on_sparse_routes
from tfcommx.planner.plan import Gradient, make_plan
from tfcommx.planner.predict import bytes_between

# Wires of dense routes by kind, the least lossy first
KINDS = ((PLAIN,), ("float16", "bfloat16"), ("int8",), ("int4",), ("int2",), ("int1",))
# Rule and format of selected entries. Fewer than LEAST of them at once take hundreds of steps.
RULE, WIRE = "mstopk", "elias/int4"
# Densities are whole numbers of these steps
STEP, LEAST, MOST = 1e-4, 10, 1000


class SentBytes(NamedTuple):
    """Some gradients and a cluster, which with a scheme determine its bytes."""

    # In forward order
    gradients: Sequence[Gradient]
    topology: Topology

    def between(self, scheme: Scheme) -> float:
        """Return the bytes that a rank sends to other nodes in a step, as the mean over ranks."""
        return bytes_between(make_plan(self.gradients, {"*": scheme}, self.topology))

    def percent(self, sent: Scheme | float) -> str:
        """Return a scheme's bytes, or any, in percent of plain Horovod's, which must send some."""
        amount = self.between(sent) if isinstance(sent, Scheme) else sent
        share = 100 * amount / self.between(Scheme())
        return f"{share:.2g} %" if share < 99.5 else f"{share:.0f} %"

    def fewest(self, wire: str) -> Scheme:
        """Return the scheme that writes all entries in a format and sends the fewest bytes."""
        form = Scheme(wire=wire, merging="single")
        return min(on_dense_routes([form], self.topology, messages=False), key=self.between)


def least_lossy(auto: Scheme, sent: SentBytes, has_momentum: bool = False) -> list[Scheme]:
    """Return the schemes of the first kind of which some fit the budget: those that fit.

    Routes of messages are left out: between nodes with equal slots none sends fewer bytes than
    "torus", and counting theirs, block by block, takes seconds.

    >>> sent = SentBytes([Gradient("w", (1024, 512), "float32")], Topology(4, 1))
    >>> [(scheme.route, scheme.wire) for scheme in least_lossy(Scheme("auto", budget=0.15), sent)]
    [('asa', 'int4')]

    Args:
        has_momentum: gradients go through a momentum, with which 2 and 1 bits diverge.

    Returns:
        At least one, for any merging that fits, too.

    **Ranks:** a pure function, so equal on every rank. **Cost:** some tens of plans, without times.
    **Raises:** PlanError if nothing fits.
    """
    assert auto.budget is not None
    limit = auto.budget * sent.between(Scheme())
    base = Scheme(bucket_bytes=auto.bucket_bytes, block_bytes=auto.block_bytes, merging="single")
    tried: list[Scheme] = []
    for wires in KINDS:
        if has_momentum and wires[0] in NOISY:
            continue
        forms = [dataclasses.replace(base, wire=wire) for wire in wires]
        tried += (kind := on_dense_routes(forms, sent.topology, messages=False))
        if fitting := [scheme for scheme in kind if sent.between(scheme) <= limit]:
            return fitting

    def selecting(steps: int) -> list[Scheme]:
        # The torus needs two levels, and equal numbers of ranks on the nodes
        by_node = sent.topology.slots > 1 and not sent.topology.uneven
        form = Scheme(
            "allgather",
            RULE,
            round(steps * STEP, 4),
            dense_route="torus" if by_node else "allreduce",
            dense_below=auto.dense_below,
            bucket_bytes=auto.bucket_bytes,
            seed=auto.seed,
            wire=WIRE,
            dense_wire="float16",
        )
        return on_sparse_routes(form, sent.topology, messages=False)

    def fits(steps: int) -> bool:
        return any(sent.between(scheme) <= limit for scheme in selecting(steps))

    if not fits(LEAST):
        raise PlanError(_nothing_fits(auto.budget, sent, [*tried, *selecting(LEAST)]))
    # By halving, because bytes only rise with the density
    beyond = bisect.bisect_left(range(LEAST, MOST + 1), True, key=lambda steps: not fits(steps))
    densest = selecting(LEAST + beyond - 1)
    return [scheme for scheme in densest if sent.between(scheme) <= limit]


def _nothing_fits(budget: float, sent: SentBytes, tried: Sequence[Scheme]) -> str:
    least = min(tried, key=sent.between)
    selected = f", {least.selection} {least.density:g}" if least.selection != "all" else ""
    # OneBitAdam sends its momentum as int1, LowBitSGD as int2
    adam, sgd = (sent.percent(sent.fewest(wire)) for wire in ("int1", "int2"))
    return (
        f"Some way to send gradients must fit `budget`. Received {budget=} on "
        f"{sent.topology.nodes} x {sent.topology.slots} nodes x slots, where {least.route}"
        f"{selected}, {least.wire} sends the fewest bytes: {sent.percent(least)} of plain "
        f"Horovod's between nodes. Take a larger budget: at {adam} cx.optimizers.OneBitAdam, and "
        f"at {sgd} LowBitSGD, send every entry of their momentum."
    )


def fewer_bytes(plan: Plan, gradients: Sequence[Gradient]) -> str | None:
    """Name the low-bit sum by which a plan's selected variables send fewer bytes and lose less.

    Each node gathers the selected entries of all, so bytes grow with the number of nodes.

    Returns:
        A few sentences, or None: nothing is selected, or it sends no more than 4 bits an entry.

    **Ranks:** a pure function, so equal on every rank. **Cost:** some plans, without times; nothing
    without a selection.
    """
    selects = [bucket for bucket in plan.buckets if bucket.selection != "all"]
    paths = {Piece.of(name).path for bucket in selects for name in bucket.variables}
    if not paths:
        return None
    sent = SentBytes([gradient for gradient in gradients if gradient.path in paths], plan.topology)
    between = bytes_between(dataclasses.replace(plan, buckets=tuple(selects)))
    # Not in 2 or 1 bits, which diverge behind a momentum that this plan does not know of
    codes = sent.fewest("int4")
    if between <= sent.between(codes):
        return None
    adam, sgd = (sent.percent(sent.fewest(wire)) for wire in ("int1", "int2"))
    return (
        f"{selects[0].route} selects entries by {selects[0].selection}, and every node gathers "
        f"those of all {plan.topology.nodes}: {sent.percent(between)} of plain Horovod's bytes "
        f"between nodes. Scheme({codes.route!r}, wire='int4') sends every entry in "
        f"{sent.percent(codes)}, and loses less. Fewer bytes: cx.optimizers.OneBitAdam ({adam}), "
        f"LowBitSGD ({sgd})."
    )

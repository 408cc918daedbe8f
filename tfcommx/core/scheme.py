"""Scheme: how gradients travel, as a user asks for it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass

from tfcommx.core.checks import check_name, check_number, check_whole, is_member, name_members
from tfcommx.core.errors import PlanError
from tfcommx.core.wire_formats import DENSE_WIRES, NARROW, PLAIN, WIRES

# Gradients are summed as they are, or by selected entries.
NO_COMPRESSION = "none"

# In place of a route: the optimizer tries several schemes, and keeps the fastest.
AUTO = "auto"

# Densities of the first epochs; deep gradient compression (DGC) then stays at 0.001.
DGC_WARM_UP = (0.25, 0.063, 0.015, 0.004)

# The remedy in messages. It also works with a Horovod that was built elsewhere: see
# launch/horovodrun.py.
MPI_LAUNCH = "tfcommx run --mpi ... (or horovodrun --mpi, or mpirun)"

# Fields that are numbers or None -> their range
_NUMBERS = {
    "density": "in (0, 1]",
    "momentum": "in [0, 1)",
    "clip_norm": "> 0",
    "budget": "in (0, 1]",
}
# Fields that are whole numbers or None -> the least one
_WHOLE = {"dense_below": 0, "bucket_bytes": 1, "seed": None, "block_bytes": 8}


@dataclass(frozen=True)
class Scheme:
    """How gradients travel: a user's request, for all variables or those that match a pattern.

    >>> scheme = Scheme("hitopk", "mstopk", density=0.01)
    >>> scheme.wire
    'plain'
    """

    # Route of the exchange; a name of the table in tfcommx.routes, or "auto".
    route: str = "allreduce"
    # Which entries travel; a name of the table in tfcommx.selection.
    selection: str = "all"
    # Entries sent / entries, in (0, 1]; 1 with selection "all".
    density: float = 1.0
    # The route of variables that a sparse scheme leaves dense.
    dense_route: str = "allreduce"
    # Entries, >= 0; smaller variables and one-dimensional ones are sent dense, because they are
    # cheap and sensitive.
    dense_below: int = 1024
    # With merging "threshold", gradients are merged into buckets of about this size, >= 1. A bucket
    # travels when its last gradient is ready, so a larger one hides less behind the backward pass;
    # a smaller one pays the latency of its collectives more often. None: by the route, see
    # `planner.prices.default_bucket_bytes`.
    bucket_bytes: int | None = None
    # Seed of the rules that choose at random; each bucket and step draws its own numbers.
    seed: int = 0
    # How entries are written, one of WIRES; "plain": pair32 on sparse routes, the gradient's own
    # dtype on dense ones. "float16", "bfloat16", and on asa and torus codes of 8, 4, 2 or 1 bits
    # ("int8" ... "int1") are for gradients in float32, also of bfloat16 variables. float16 ones
    # travel as they are in place of bfloat16, and in codes as others; float64 ones always travel as
    # they are. In front of an optimizer with momentum 2 and 1 bits diverge, because momentum
    # amplifies the noise of so few levels. On sparse routes also "module:MEMBER".
    wire: str = PLAIN
    # The same for variables that a sparse scheme leaves dense.
    dense_wire: str = PLAIN
    # How the torus sums among peers; with MPI also a route of messages.
    peer_route: str = "allreduce"
    # Bytes of a block on routes of messages, >= 8; None: as the links say.
    block_bytes: int | None = None
    # In [0, 1), replaces the optimizer's own and is corrected for the residual.
    # 0: none.
    momentum: float = 0.0
    # > 0, of all gradients together; each rank clips its own before they are accumulated.
    clip_norm: float | None = None
    # Which gradients travel together, so that they share a latency term; a name of the table in
    # tfcommx.planner.merging.
    merging: str = "threshold"
    # Compression to shorter vectors, which a dense route sums in place of gradients; a name of the
    # table in tfcommx.compression, such as "powersgd/4", or "module:MEMBER".
    compression: str = NO_COMPRESSION
    # With route "auto": at most this share of the bytes that plain Horovod sends between nodes, in
    # (0, 1]; None: no limit. Of all that fits, "auto" takes the kind that loses least, because a
    # budget limits the load of the network, and not the loss that the user accepts: lossless,
    # then 16 bits, int8, int4, int2, int1, and last the most selected entries. Among schemes of
    # that kind the fastest counts. 2 and 1 bits are left out in front of a momentum. On one node,
    # where nothing travels between nodes, it changes nothing.
    budget: float | None = None

    def __post_init__(self) -> None:
        self._check_numbers()
        name_members(*(getattr(self, field.name) for field in dataclasses.fields(self)))
        self._check_names()
        if not is_member(self.wire):
            check_name("wire format", self.wire, WIRES)
        check_name("wire format", self.dense_wire, (PLAIN, *DENSE_WIRES), "of `dense_wire`")
        self._check_momentum_and_clipping()
        self._check_compression()
        self._check_budget()

    def _check_names(self) -> None:
        # The tables check the names when a plan is made, because this package knows none of them
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if isinstance(field.default, str) and not isinstance(value, str):
                raise PlanError(
                    f"`{field.name}` must be a name, a string. Received {field.name}={value!r}. "
                    f"Leave it out for the default, {field.default!r}."
                )

    def _check_budget(self) -> None:
        plain = (AUTO, "all", PLAIN, PLAIN, NO_COMPRESSION)
        asked = (self.route, self.selection, self.wire, self.dense_wire, self.compression)
        if self.budget is not None and asked != plain:
            raise PlanError(
                'Scheme("auto", budget=...) chooses how gradients travel by the cluster. Received '
                f"budget={self.budget} with route={self.route!r}, selection={self.selection!r}, "
                f"wire={self.wire!r}, dense_wire={self.dense_wire!r} and "
                f"compression={self.compression!r}. Leave the budget out, or all of these."
            )

    def _check_compression(self) -> None:
        if self.compression != NO_COMPRESSION and (self.selection != "all" or self.wire != PLAIN):
            raise PlanError(
                "A compression sends its own vectors in place of all entries. Received "
                f"compression={self.compression!r} with selection={self.selection!r} and "
                f"wire={self.wire!r}. Leave these out, or the compression."
            )

    def _check_numbers(self) -> None:
        """Check the numbers, and make NumPy's numbers Python's, which JSON can write."""
        for field in dataclasses.fields(self):
            name, value = field.name, getattr(self, field.name)
            if value is None and field.default is None:
                continue
            if name in _NUMBERS:
                value = check_number(name, value, _NUMBERS[name], PlanError)
            elif name in _WHOLE:
                value = check_whole(name, value, _WHOLE[name], PlanError)
            object.__setattr__(self, name, value)
        if self.selection == "all" and self.density != 1:
            raise PlanError(
                "Selection 'all' sends every entry: its density is 1. Received "
                f"density={self.density}. Choose a rule such as 'mstopk', or leave density out."
            )

    def _check_momentum_and_clipping(self) -> None:
        if self.momentum and self.dense_wire in NARROW:
            raise PlanError(
                "Variables that stay dense get their momentum from the sum over the ranks, and 16 "
                f"or fewer bits keep residuals on each. Received momentum={self.momentum} with "
                f"dense_wire={self.dense_wire!r}. Leave `dense_wire` out, or give the momentum to "
                "the Keras optimizer."
            )
        if self.selection == "all" and (self.momentum or self.clip_norm is not None):
            raise PlanError(
                "`momentum` and `clip_norm` of a scheme correct for what waits in a residual: "
                "they need a sparse route and a selection other than 'all'. Received "
                f"route={self.route!r}, momentum={self.momentum}, clip_norm={self.clip_norm}. "
                "Give them to the Keras optimizer (momentum, global_clipnorm)."
            )

    def warm_up(self, densities: Iterable[float] = DGC_WARM_UP) -> dict[int, Scheme]:
        """Return schemes of rising sparsity, one an epoch, then this one, for SwitchScheme.

        >>> sorted(Scheme("hitopk", "mstopk", 0.01).warm_up([0.25, 0.05]))
        [0, 1, 2]

        Args:
            densities: of the first epochs, each in (0, 1].

        Returns:
            Epoch, from 0 -> Scheme.

        **Raises:** PlanError for a density outside (0, 1].
        **Source:** Lin et al., "Deep Gradient Compression" (2018), section 3.3.
        """
        ladder = [dataclasses.replace(self, density=density) for density in densities]
        return dict(enumerate([*ladder, self]))

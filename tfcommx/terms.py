"""The nouns of tfcommx: who takes part, what a user asks for, what is done bucket by bucket.

All are frozen and checked when they are made, so that a bad setting is refused before any
collective starts.
"""

from __future__ import annotations

import dataclasses
import difflib
import itertools
import json
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from numbers import Integral, Real
from pathlib import Path
from typing import Any, NamedTuple

GROUPS = ("world", "node", "peers")
OPERATIONS = ("average", "sum")
PLAIN = "plain"  # the wire format of a dense route that sends the gradient's own dtype
VALUE_DTYPES = ("float32", "float16", "bfloat16")  # of values on the wire
SPARSE_WIRES = (
    "pair32",
    "pair16/float16",
    "pair16/bfloat16",
    *(f"block16/{dtype}" for dtype in VALUE_DTYPES),
)
WIRES = (PLAIN, *VALUE_DTYPES, *SPARSE_WIRES)
LAST_STEPS = ("dense", "pairs")
UPDATES = ("all", "root")
DGC_WARM_UP = (0.25, 0.063, 0.015, 0.004)  # densities of the first epochs; DGC then stays at 0.001
# entries of a piece of a variable; two of them and the padding fit int32 indices
LARGEST = 2**30 - 2**20


class PlanError(ValueError):
    """A scheme, plan or topology that cannot be carried out; nothing has been sent yet."""


def check_name(what: str, name: str, known: Iterable[str]) -> str:
    """Return `name` if it is known, else refuse it and name the nearest known one."""
    names = sorted(known)
    if name in names:
        return name
    near = difflib.get_close_matches(str(name), names, n=1, cutoff=0.5)
    hint = f"Did you mean {near[0]!r}? " if near else ""
    raise PlanError(f"Unknown {what} {name!r}. {hint}Known: {', '.join(names)}.")


def check_whole(what: str, value: Any) -> int:
    """Return a whole number, such as NumPy's or 1e9, as Python's own; refuse anything else."""
    if isinstance(value, bool) or not (
        isinstance(value, Integral) or (isinstance(value, float) and value.is_integer())
    ):
        raise PlanError(f"`{what}` must be a whole number. Received {value!r}.")
    return int(value)


def _number(value: Any) -> Any:
    """Return a number, such as NumPy's, as Python's own; anything else as it is."""
    if isinstance(value, bool) or not isinstance(value, Real):
        return value
    return int(value) if isinstance(value, Integral) else float(value)


@dataclass(frozen=True)
class Topology:
    """m nodes of n processes; rank r is slot r % n of node r // n.

    Groups: `world` is all ranks, `node` the n ranks of one node, `peers` the m ranks with the same
    slot. Where nodes have unequal numbers of slots, `uneven` lists (host, slots): only one-level
    routes work then.
    """

    # >= 1
    nodes: int
    # Processes per node, >= 1; the largest number where the nodes differ
    slots: int
    # Empty when all nodes have equally many slots
    uneven: tuple[tuple[str, int], ...] = ()

    def __post_init__(self) -> None:
        if self.nodes < 1 or self.slots < 1:
            raise PlanError(
                f"A topology needs nodes >= 1 and slots >= 1. Received nodes={self.nodes}, "
                f"slots={self.slots}."
            )

    @property
    def size(self) -> int:
        """Number of ranks."""
        return sum(slots for _, slots in self.uneven) if self.uneven else self.nodes * self.slots

    def group(self, name: str, rank: int) -> tuple[int, ...]:
        """Return the ranks, ascending, of the group `name` that `rank` belongs to."""
        check_name("group", name, GROUPS)
        if name == "world":
            return tuple(range(self.size))
        self.require_even(f"the group {name!r}")
        if name == "node":
            first = rank // self.slots * self.slots
            return tuple(range(first, first + self.slots))
        return tuple(range(rank % self.slots, self.size, self.slots))

    def node_of(self, rank: int) -> int:
        """Return the number of the node that holds `rank`."""
        ends = itertools.accumulate(slots for _, slots in self.uneven)
        return (
            next(node for node, end in enumerate(ends) if rank < end)
            if self.uneven
            else rank // self.slots
        )

    def require_even(self, what: str) -> None:
        """Refuse `what` (a phrase for the message) where the nodes have unequal numbers of
        slots.
        """
        if self.uneven:
            hosts = ", ".join(f"{host}:{slots}" for host, slots in self.uneven)
            raise PlanError(
                f"Equally many slots on every node are required for {what}. Received {hosts}. "
                "Launch equally many processes per host, or use a one-level route (allreduce, "
                "allgather)."
            )

    @staticmethod
    def of_hosts(hosts: list[str]) -> Topology:
        """Make the topology from the host of every rank, in rank order; ranks of a host must be
        consecutive.
        """
        counts: dict[str, int] = {}
        for rank, host in enumerate(hosts):
            if rank and host != hosts[rank - 1] and host in counts:
                raise PlanError(
                    f"Consecutive ranks are required on each host. Received {hosts}: rank {rank} "
                    f"returns to {host!r}. "
                    "Launch by slot (horovodrun's default), or give node_size."
                )
            counts[host] = counts.get(host, 0) + 1
        sizes = set(counts.values())
        uneven = () if len(sizes) == 1 else tuple(counts.items())
        return Topology(len(counts), max(sizes), uneven)


@dataclass(frozen=True)
class Link:
    """One kind of connection: a message of b bytes takes alpha + b * beta seconds, reducing b bytes
    takes b * gamma.
    """

    # Seconds before the first byte arrives, >= 0
    alpha_s: float
    # Seconds per byte sent, > 0
    beta_s_per_byte: float
    # Seconds per byte reduced, >= 0
    gamma_s_per_byte: float = 0.0

    def __post_init__(self) -> None:
        if self.alpha_s < 0 or self.beta_s_per_byte <= 0 or self.gamma_s_per_byte < 0:
            raise PlanError(
                "A link needs alpha_s >= 0, beta_s_per_byte > 0, gamma_s_per_byte >= 0. "
                f"Received {self}."
            )


class Links(NamedTuple):
    """The two kinds of link of a cluster, and what was tuned to them."""

    # Between ranks of one node
    inside: Link
    # Between nodes
    between: Link
    # Of the linear pipeline: fills the pipe soon. From 64 KB on (the paper's size) Open MPI shakes
    # hands per block over TCP.
    block_bytes: int = 49152

    def to_dict(self) -> dict[str, Any]:
        """Return what JSON can write."""
        return {
            **self._asdict(),
            "inside": dataclasses.asdict(self.inside),
            "between": dataclasses.asdict(self.between),
        }

    @staticmethod
    def from_dict(found: Mapping[str, Any]) -> Links:
        """Read what `to_dict` returned."""
        links = Links(Link(**found["inside"]), Link(**found["between"]), found["block_bytes"])
        numbers = [*dataclasses.astuple(links.inside), *dataclasses.astuple(links.between)]
        if (
            not all(math.isfinite(number) for number in numbers)
            or not isinstance(links.block_bytes, int)
            or links.block_bytes < 8
        ):
            raise ValueError(
                f"finite numbers, and block_bytes an integer >= 8, are required. Received {links}"
            )
        return links

    @staticmethod
    def read(path: str | Path) -> Links:
        """Read what `tfcommx probe` wrote. **Raises:** PlanError where the file is missing or says
        something else.
        """
        try:
            return Links.from_dict(json.loads(Path(path).read_text())["links"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise PlanError(
                "A file of links, as `horovodrun ... tfcommx probe` writes it, is required on "
                f"every node. Received {path}: "
                f"{type(error).__name__}: {error}."
            ) from error


# One dash too few in what Horovod 0.28 adds by itself keeps Open MPI 5 from starting; these words
# take its place.
MPI_LAUNCH = 'horovodrun --mpi --binding-args="--bind-to none --map-by slot" ... (or mpirun)'

# Before anything was measured: NVLink or shared memory inside, 10 Gbit/s Ethernet between. Only
# their ratio matters to a plan.
NOMINAL = Links(inside=Link(5e-6, 1e-10, 1e-11), between=Link(5e-5, 8e-10, 1e-11))


class Traffic(NamedTuple):
    """Bytes that one rank sends, as the mean over the ranks."""

    # To ranks of its own node
    inside: float
    # To ranks of other nodes
    between: float


class Sparse(NamedTuple):
    """k selected entries of a flat vector; the indices are unique and in [0, size)."""

    # int32 [k]
    indices: Any
    # Float [k]
    values: Any
    # Length of the vector that they were selected from
    size: int


@dataclass(frozen=True)
class Scheme:
    """How gradients travel: what a user asks for, for all variables or for those that match a
    pattern.
    """

    # Who sends to whom; a name of the table in tfcommx.exchange
    route: str = "allreduce"
    # Which entries travel; a name of the table in tfcommx.selection
    selection: str = "all"
    # Entries sent / entries, in (0, 1]; 1 for selection "all"
    density: float = 1.0
    # The route of variables that a sparse scheme leaves dense
    dense_route: str = "allreduce"
    # Entries; smaller variables, and one-dimensional ones, are sent dense: they are cheap and
    # sensitive
    dense_below: int = 1024
    # Gradients are merged into buckets of about this size: one start-up cost for many
    bucket_bytes: int = 32 * 2**20
    # Of the rules that choose at random; each bucket and step draws its own numbers
    seed: int = 0
    # How entries are written, one of WIRES; "plain": pair32 on sparse routes, dense ones as they
    # are
    wire: str = PLAIN
    # Of the torus, among peers; with MPI also a route of messages
    peer_route: str = "allreduce"
    # Of the linear pipeline, >= 8; None: as the links say
    block_bytes: int | None = None
    # In [0, 1), corrected for what waits in the residual; in place of the optimizer's own. 0: none
    momentum: float = 0.0
    # > 0, of all gradients together; each rank clips its own before they are accumulated
    clip_norm: float | None = None

    def __post_init__(self) -> None:
        # NumPy's numbers become Python's, which JSON can write
        for field in dataclasses.fields(self):
            object.__setattr__(self, field.name, _number(getattr(self, field.name)))
        if not isinstance(self.density, int | float) or not 0 < self.density <= 1:
            raise PlanError(
                f"`density` must be in (0, 1]. Received density={self.density!r}. Use 1 to send "
                "everything."
            )
        if self.selection == "all" and self.density != 1:
            raise PlanError(
                "Selection 'all' sends every entry: its density is 1. Received "
                f"density={self.density}. "
                "Choose a rule such as 'mstopk', or leave density out."
            )
        for name, least in (("dense_below", 0), ("bucket_bytes", 1), ("seed", None)):
            value = getattr(self, name)
            if (
                not isinstance(value, int)
                or isinstance(value, bool)
                or (least is not None and value < least)
            ):
                raise PlanError(
                    f"`{name}` must be an integer{'' if least is None else f' >= {least}'}. "
                    f"Received {name}={value!r}."
                )
        if self.block_bytes is not None and (
            not isinstance(self.block_bytes, int) or self.block_bytes < 8
        ):
            raise PlanError(
                "`block_bytes` must be an integer >= 8, one entry of the widest dtype, or None. "
                f"Received {self.block_bytes!r}. 49152 is usual."
            )
        check_name("wire format", self.wire, WIRES)
        if not isinstance(self.momentum, int | float) or not 0 <= self.momentum < 1:
            raise PlanError(
                f"`momentum` must be in [0, 1). Received momentum={self.momentum!r}. 0.9 is "
                "usual, 0 is none."
            )
        if self.clip_norm is not None and (
            not isinstance(self.clip_norm, int | float) or not self.clip_norm > 0
        ):
            raise PlanError(
                f"`clip_norm` must be > 0. Received clip_norm={self.clip_norm!r}. Leave it out "
                "to clip nothing."
            )
        if self.selection == "all" and (self.momentum or self.clip_norm is not None):
            raise PlanError(
                "`momentum` and `clip_norm` of a scheme correct for what waits in a residual: "
                "they need a sparse route and a "
                f"selection other than 'all'. Received route={self.route!r}, "
                f"momentum={self.momentum}, "
                f"clip_norm={self.clip_norm}. Give them to the Keras optimizer (momentum, "
                "global_clipnorm)."
            )

    def warm_up(self, densities: Iterable[float] = DGC_WARM_UP) -> dict[int, Scheme]:
        """Return epoch (from 0) -> Scheme: one density an epoch, then this scheme for good;
        SwitchScheme takes it.

        **Raises:** PlanError for a density outside (0, 1].
        **Source:** Lin et al., Deep Gradient Compression, 2018, section 3.3.
        """
        ladder = [dataclasses.replace(self, density=density) for density in densities]
        return dict(enumerate([*ladder, self]))


class Piece(NamedTuple):
    """A stretch of a variable that is too long for one bucket; a plan lists it as
    `path[start:stop]`, like a variable.
    """

    path: str
    start: int
    # None: the whole variable
    stop: int | None

    @staticmethod
    def of(name: str) -> Piece:
        """Read a name of a plan."""
        found = re.fullmatch(r"(.*)\[(\d+):(\d+)\]", name)
        return Piece(found[1], int(found[2]), int(found[3])) if found else Piece(name, 0, None)

    @property
    def name(self) -> str:
        return self.path if self.stop is None else f"{self.path}[{self.start}:{self.stop}]"


@dataclass(frozen=True)
class Bucket:
    """Variables whose gradients travel together as one flat vector, in backward order."""

    # Unique in its plan; names the collectives
    name: str
    # Variable paths; of one that is cut, the names of its pieces
    variables: tuple[str, ...]
    # Entries of each variable
    sizes: tuple[int, ...]
    # Of the flat vector: float16, float32 or float64
    dtype: str
    route: str
    selection: str = "all"
    # Entries that one rank selects; None on dense routes
    k: int | None = None
    # Zeros appended so that the route can cut the vector in equal shards
    padding: int = 0
    seed: int = 0
    # How entries are written, one of WIRES
    wire: str = PLAIN
    # Of the linear pipeline
    block_bytes: int = 49152
    # Of the torus, among peers
    peer_route: str = "allreduce"
    # Of routes of messages: allreduce, or reduce where rank 0 alone updates the weights
    collective: str = "allreduce"
    # Of hitopk: what travels in the node at the end, the merged shard or the peers' pairs
    last_step: str = "dense"
    # In [0, 1): before the selection, or on dense routes of the sum over the ranks
    momentum: float = 0.0
    # Of the gradients of all buckets with the same, on each rank
    clip_norm: float | None = None

    @property
    def size(self) -> int:
        """Entries of the variables, without padding."""
        return sum(self.sizes)

    @property
    def entry_bytes(self) -> int:
        """Bytes of one entry of the flat vector."""
        return {"float16": 2, "float32": 4, "float64": 8}[self.dtype]

    @property
    def padded(self) -> int:
        """Entries of the flat vector, with padding."""
        return self.size + self.padding


@dataclass(frozen=True)
class Plan:
    """What is done with each variable's gradient: an ordered tuple of buckets, each variable in
    exactly one.

    Made once before training and the same on every rank.
    """

    buckets: tuple[Bucket, ...]
    topology: Topology
    # Over ranks: average or sum
    operation: str = "average"
    # Who applies the gradients: all ranks, or the root, rank 0, which broadcasts the weights after
    # each step
    update: str = "all"
    # Where all update: steps after which rank 0's weights are broadcast all the same; 0: never
    broadcast_every: int = 0

    def __post_init__(self) -> None:
        check_name("operation", self.operation, OPERATIONS)
        check_name("update", self.update, UPDATES)
        object.__setattr__(self, "broadcast_every", _number(self.broadcast_every))
        if not isinstance(self.broadcast_every, int) or self.broadcast_every < 0:
            raise PlanError(
                f"`broadcast_every` must be an integer >= 0. Received {self.broadcast_every!r}. "
                "The paper has 5."
            )
        if self.update == "root" and self.broadcast_every:
            raise PlanError(
                "With update='root' the weights are broadcast after every step. "
                f"Received broadcast_every={self.broadcast_every}. Leave it out."
            )
        if self.update == "root" and any(bucket.momentum for bucket in self.buckets):
            raise PlanError(
                "With update='root' only rank 0 has the sums that momentum is made of. Received "
                "a scheme with momentum. "
                "Give it to the Keras optimizer."
            )
        seen: dict[str, str] = {}
        for bucket in self.buckets:
            for path in bucket.variables:
                if path in seen:
                    raise PlanError(
                        f"Each variable must be in one bucket. {path!r} is in {seen[path]} and "
                        f"{bucket.name}."
                    )
                seen[path] = bucket.name

    def to_json(self) -> str:
        """Write the plan as JSON, one bucket a line: diffable."""
        head = json.dumps(
            {
                "topology": dataclasses.asdict(self.topology),
                "operation": self.operation,
                "update": self.update,
                "broadcast_every": self.broadcast_every,
            }
        )
        rows = ",\n  ".join(json.dumps(dataclasses.asdict(bucket)) for bucket in self.buckets)
        return f'{head[:-1]}, "buckets": [\n  {rows}\n]}}\n'

    @staticmethod
    def from_json(text: str) -> Plan:
        """Read what `to_json` wrote."""
        read = json.loads(text)
        topology = Topology(
            read["topology"]["nodes"],
            read["topology"]["slots"],
            tuple((host, slots) for host, slots in read["topology"]["uneven"]),
        )
        buckets = tuple(
            Bucket(
                **{
                    key: tuple(value) if isinstance(value, list) else value
                    for key, value in row.items()
                }
            )
            for row in read["buckets"]
        )
        return Plan(buckets, topology, read["operation"], read["update"], read["broadcast_every"])


def first_difference(here: Any, there: Any, where: str = "plan") -> str | None:
    """Say where two plans (or parts of them) first differ; None when they are equal."""
    if dataclasses.is_dataclass(here) and type(here) is type(there):
        here = {field.name: getattr(here, field.name) for field in dataclasses.fields(here)}
        there = {field.name: getattr(there, field.name) for field in dataclasses.fields(there)}
    if isinstance(here, Mapping) and isinstance(there, Mapping):
        pairs = [(f"{where}.{key}", here.get(key), there.get(key)) for key in {**here, **there}]
    elif isinstance(here, tuple) and isinstance(there, tuple):
        pairs = [(f"{where}[{i}]", a, b) for i, (a, b) in enumerate(zip(here, there, strict=False))]
        pairs.append((f"the length of {where}", len(here), len(there)))
    else:
        return None if here == there else f"{where}: {here!r} against {there!r}"
    return next((found for name, a, b in pairs if (found := first_difference(a, b, name))), None)

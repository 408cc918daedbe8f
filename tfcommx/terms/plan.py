"""Bucket and Plan: what is done with each gradient, bucket by bucket."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from tfcommx.terms.checks import PlanError, check_name
from tfcommx.terms.scheme import PLAIN
from tfcommx.terms.topology import Topology

OPERATIONS = ("average", "sum")


LAST_STEPS = ("dense", "pairs")


# entries of a piece of a variable; two of them and the padding fit int32 indices
LARGEST = 2**30 - 2**20


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

    def __post_init__(self) -> None:
        check_name("operation", self.operation, OPERATIONS)
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
            {"topology": dataclasses.asdict(self.topology), "operation": self.operation}
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
        return Plan(buckets, topology, read["operation"])


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

"""Plan: the buckets in which the gradients of all variables travel."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from tfcommx.core.bucket import Bucket, Piece, RouteOptions
from tfcommx.core.checks import check_name, check_number, check_whole, require_named_members
from tfcommx.core.errors import PlanError
from tfcommx.core.files import reading
from tfcommx.core.topology import Topology
from tfcommx.core.wire_formats import ENTRY_BYTES

OPERATIONS = ("average", "sum")

# (name of a route, field -> value) -> the route's options
ReadOptions = Callable[[str, Mapping[str, Any]], RouteOptions]


@dataclass(frozen=True)
class Plan:
    """Buckets in order, each variable in exactly one.

    A plan is made once before training, and is the same on every rank.
    """

    # Buckets in the order in which their last gradients become ready.
    buckets: tuple[Bucket, ...]
    # Topology of the ranks that carry out the plan.
    topology: Topology
    # Reduction over the ranks: "average" or "sum".
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

    @property
    def paths_with_momentum(self) -> set[str]:
        """Paths of the variables that have velocities."""
        moving = (bucket for bucket in self.buckets if bucket.momentum)
        return {Piece.of(name).path for bucket in moving for name in bucket.variables}

    @property
    def paths_with_compression(self) -> set[str]:
        """Paths of the variables that are compressed."""
        compressing = (bucket for bucket in self.buckets if bucket.compresses)
        return {name for bucket in compressing for name in bucket.variables}

    @property
    def entries(self) -> dict[str, int]:
        """Path -> number of entries of each variable, in the order of the buckets."""
        entries: dict[str, int] = {}
        for bucket in self.buckets:
            for name, size in zip(bucket.variables, bucket.sizes, strict=True):
                path = Piece.of(name).path
                entries[path] = entries.get(path, 0) + size  # A bucket may have only a piece
        return entries

    @property
    def paths(self) -> set[str]:
        """Paths of the plan's variables."""
        return set(self.entries)

    def to_json(self) -> str:
        """Return the plan as JSON, one bucket per line, which makes plans easy to compare."""
        head = json.dumps(
            {"topology": dataclasses.asdict(self.topology), "operation": self.operation}
        )
        rows = ",\n  ".join(json.dumps(dataclasses.asdict(bucket)) for bucket in self.buckets)
        return f'{head[:-1]}, "buckets": [\n  {rows}\n]}}\n'

    @staticmethod
    def from_json(text: str, read_options: ReadOptions) -> Plan:
        """Parse the result of `to_json`; `routes.read_plan` does so with all routes' options.

        **Raises:** PlanError for anything else.
        """
        remedy = "Make it again: `tfcommx plan`."
        with reading("A plan of `tfcommx plan`", f"{text[:60]!r}", remedy, PlanError):
            read = json.loads(text)
            topology = Topology(
                read["topology"]["nodes"],
                read["topology"]["slots"],
                tuple((host, slots) for host, slots in read["topology"]["uneven"]),
            )
            buckets = tuple(_bucket(row, read_options) for row in read["buckets"])
            return Plan(buckets, topology, read["operation"])


def _bucket(row: Mapping[str, Any], read_options: ReadOptions) -> Bucket:
    names = (row.get(name) for name in ("route", "selection", "wire", "compression"))
    # First, because `read_options` imports the module of a route that the file names
    require_named_members("A plan", *names, *row["options"].values())
    fields = {
        **row,
        "variables": tuple(row["variables"]),
        "sizes": tuple(row["sizes"]),
        "shapes": tuple(map(tuple, row.get("shapes", ()))),  # Older plans have none
        "options": read_options(row["route"], row["options"]),
    }
    bucket = Bucket(**fields)
    _check(bucket)
    return bucket


def _check(bucket: Bucket) -> None:
    """Refuse numbers that no bucket of `to_json` has, as in a file that was edited.

    **Raises:** ConfigurationError.
    """
    for name in ("name", "route", "selection", "wire", "compression"):
        _require(isinstance(getattr(bucket, name), str), bucket, name, "text")
    check_name("dtype", bucket.dtype, ENTRY_BYTES)
    names, sizes, shapes = bucket.variables, bucket.sizes, bucket.shapes
    _require(all(isinstance(name, str) for name in names), bucket, "variables", "a list of paths")
    for size in sizes:
        check_whole("sizes", size, least=0)
    _require(len(sizes) == len(names), bucket, "sizes", f"{len(names)} numbers")
    fits = not shapes or [math.prod(shape) for shape in shapes] == list(sizes)
    _require(fits, bucket, "shapes", f"shapes of {list(sizes)} entries")
    if bucket.k is not None:
        check_whole("k", bucket.k, least=1)
        # At least 1, because k is 1 even in a bucket without entries
        _require(bucket.k <= max(1, bucket.padded), bucket, "k", f"at most {bucket.padded}")
    check_whole("padding", bucket.padding, least=0)
    check_whole("seed", bucket.seed)
    check_number("momentum", bucket.momentum, "in [0, 1)")
    if bucket.clip_norm is not None:
        check_number("clip_norm", bucket.clip_norm, "> 0")


def _require(holds: bool, bucket: Bucket, field: str, wanted: str) -> None:
    if not holds:
        raise PlanError(
            f"`{field}` of the bucket {bucket.name!r} must be {wanted}. Received "
            f"{getattr(bucket, field)!r:.80}. Make the plan again: `tfcommx plan`."
        )


def first_difference(first: Any, second: Any, where: str = "plan") -> str | None:
    """Describe the first difference of two plans, or of parts of them; None if they are equal.

    >>> first_difference((1, 2), (1, 3), where="sizes")
    'sizes[1]: 2 against 3'
    """
    if dataclasses.is_dataclass(first) and type(first) is type(second):
        first, second = vars(first), vars(second)
    if isinstance(first, Mapping) and isinstance(second, Mapping):
        pairs = [(f"{where}.{key}", first.get(key), second.get(key)) for key in {**first, **second}]
    elif isinstance(first, tuple) and isinstance(second, tuple):
        pairs = [
            (f"{where}[{i}]", a, b) for i, (a, b) in enumerate(zip(first, second, strict=False))
        ]
        # After the parts in common, whose first difference says more than two numbers
        pairs.append((f"the length of {where}", len(first), len(second)))
    else:
        return None if first == second else f"{where}: {first!r} against {second!r}"
    return next(
        (difference for name, a, b in pairs if (difference := first_difference(a, b, name))), None
    )

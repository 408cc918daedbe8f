"""GradientState: the state of one rank's gradients between steps, by variable.

    executor --export--> GradientState --load--> executor of another plan, or of the same
                              |
                              +--> sums of several plans; a file; other numbers of ranks

    residuals       unsent gradients and rounding errors of narrow formats: each rank's own, with a
                    conserved sum over the ranks
    velocities      the momentum of a scheme: also with a conserved sum
    compressions    states of compressions, equal on all ranks
    steps           taken so far under the variable's plan
    rates           exponent of the highest or the recent learning rate, see `rates`

Rank 0 holds the state that is equal on all ranks: velocities and residuals of dense buckets, and
compressions. This keeps sums exact, because a share on each rank would be rounded. With the plan
and the ranks of its export a state is restored to the bit; otherwise its sum over the ranks is
conserved.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass, field, fields, replace
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np

from tfcommx.collectives.comm import Comm
from tfcommx.core import Bucket, Piece, Plan

# Variable path -> float32 [its size], or [entries of its compression's state]
Vectors = dict[str, Any]
T = TypeVar("T")


# Without equality, because a comparison of two arrays is an array
@dataclass(frozen=True, eq=False)
class GradientState:
    """The state by variable path. Residuals and velocities of zeros are left out."""

    residuals: Vectors = field(default_factory=dict)
    velocities: Vectors = field(default_factory=dict)
    compressions: Vectors = field(default_factory=dict)
    steps: dict[str, int] = field(default_factory=dict)
    rates: dict[str, int] = field(default_factory=dict)

    def __add__(self, other: GradientState) -> GradientState:
        """Add the states of two plans or ranks; `other` is the later one.

        >>> states = [GradientState({"w": np.float32([n, n])}, steps={"w": n}) for n in (1, 2)]
        >>> total = sum(states, GradientState())
        >>> total.residuals["w"].tolist(), total.steps
        ([3.0, 3.0], {'w': 2})
        """
        return GradientState(
            add_vectors(self.residuals, other.residuals),
            # Residuals and velocities are addends of a sum. Of two compression states the later one
            # counts, because their sum would be the state of neither; the most steps count, because
            # seeds of random selections must not repeat under the next plan
            add_vectors(self.velocities, other.velocities),
            self.compressions | other.compressions,
            _highest(self.steps, other.steps),
            _highest(self.rates, other.rates),
        )

    def times(self, factor: float) -> GradientState:
        """Return the state with residuals and velocities multiplied by a factor."""
        return replace(
            self,
            residuals=scaled(self.residuals, factor),
            velocities=scaled(self.velocities, factor),
        )

    def of(self, variables: Set[str]) -> GradientState:
        parts = (getattr(self, kind.name) for kind in fields(self))
        return GradientState(
            *({path: by_path[path] for path in by_path if path in variables} for by_path in parts)
        )

    @property
    def variables(self) -> set[str]:
        """The paths of all variables with any state."""
        return set().union(*(getattr(self, kind.name) for kind in fields(self)))


def without(by_path: Mapping[str, T], variables: Set[str]) -> dict[str, T]:
    """Return the entries of all other variables.

    >>> without({"w": 1, "b": 2}, {"w"})
    {'b': 2}
    """
    return {path: part for path, part in by_path.items() if path not in variables}


def add_vectors(earlier: Vectors, later: Vectors) -> Vectors:
    """Return the sums, variable by variable; a missing vector counts as zeros."""
    return earlier | {path: earlier.get(path, np.float32(0)) + part for path, part in later.items()}


def scaled(vectors: Vectors, factor: float) -> Vectors:
    return {path: part * np.float32(factor) for path, part in vectors.items()}


def _highest(earlier: dict[str, int], later: dict[str, int]) -> dict[str, int]:
    return earlier | {
        path: max(earlier.get(path, number), number) for path, number in later.items()
    }


class Stretch(NamedTuple):
    """A stretch of a variable that lies in a shard of a bucket's flat vector."""

    path: str
    # The stretch's entries in the variable, and in the shard
    of_variable: slice
    of_shard: slice


def stretches(bucket: Bucket, shard: slice) -> list[Stretch]:
    """Return the stretches of variables in a shard of a bucket; none contains padding."""
    stretches_of_shard, before = [], 0
    for piece, size in zip(map(Piece.of, bucket.variables), bucket.sizes, strict=True):
        first, last = max(before, shard.start), min(before + size, shard.stop)
        if first < last:
            start = piece.start - before
            stretches_of_shard.append(
                Stretch(
                    piece.path,
                    slice(start + first, start + last),
                    slice(first - shard.start, last - shard.start),
                )
            )
        before += size
    return stretches_of_shard


class Executor(Protocol):
    """Exchanges the gradients of a set of variables; keeps their state between steps."""

    comm: Comm

    @property
    def plan(self) -> Plan:
        """The plan, or the main one of several."""

    @property
    def plans(self) -> list[Plan]:
        """The plans that take turns: usually one."""

    def exchange(self, gradients: Mapping[str, Any]) -> dict[str, Any]:
        """Return the average (or sum) over all ranks of each gradient. **Ranks:** all."""

    def follow_rate(self, rate: Any) -> None:
        """Record the step's learning rate, a float scalar, before `exchange`."""

    def export(self, variables: Set[str] | None = None) -> GradientState:
        """Return a copy of this rank's state of these variables; None: of all."""

    def load(self, state: GradientState) -> GradientState:
        """Add a state of any plan before the first step; return the part that does not fit here.

        **Ranks:** all, outside of traced code.
        """

    def clear(self, variables: Set[str]) -> None:
        """Set the residuals and velocities of these variables to 0. Outside of traced code."""

    def steps_taken(self) -> int:
        """Return the number of steps so far, equal on all ranks. Outside of traced code."""

    def dense_bytes_between_nodes(self) -> float:
        """Return the bytes plain Horovod would have sent between nodes for the steps so far."""

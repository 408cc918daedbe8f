"""Facts that must be equal on all ranks, compared when the ranks next exchange objects.

    rank 0   DataCache states its samples         gather_objects -> equal: they are forgotten
    rank 1         DataCache states its samples   gather_objects -> unequal: ConfigurationError

Stating a fact exchanges nothing. A data set can therefore be opened at any time, and by a single
rank without making the others wait. The digests travel with the next objects that all ranks
exchange. This is before the first step of a training, when the plans of all ranks are compared.
"""

import functools
import hashlib
import operator
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

from tfcommx.core import ConfigurationError, told_apart

# Largest number of facts that wait; the oldest, which only one rank has stated, are dropped
MOST = 64
# Number of differences that an error names
NAMED = 3


class Facts(NamedTuple):
    """Facts of a rank that must be equal on all ranks."""

    # Kind of the facts, such as "samples"; only facts of the same kind are compared
    kind: str
    # Name of the facts on this rank, for messages
    name: str
    # Item -> value, in the order in which differences are named
    values: Mapping[str, str]
    # Remedy if they differ; a sentence
    remedy: str

    @property
    def digest(self) -> str:
        """SHA-256 of kind and values, hexadecimal; equal for equal facts."""
        return hashlib.sha256(repr((self.kind, sorted(self.values.items()))).encode()).hexdigest()


def differences(first: Facts, second: Facts) -> list[tuple[str, str, str]]:
    """Return (item, value in `first`, value in `second`) of each item that differs.

    >>> three, four = (Facts("samples", "", {"cat": n}, "") for n in ("3 files", "4 files"))
    >>> differences(three, four)
    [('cat', '3 files', '4 files')]
    """
    items = dict.fromkeys([*first.values, *second.values])
    pairs = [
        (item, first.values.get(item, "missing"), second.values.get(item, "missing"))
        for item in items
    ]
    return [row for row in pairs if row[1] != row[2]]


class Comparisons:
    """Facts that this rank has stated and that were not compared yet."""

    def __init__(self) -> None:
        self._stated: list[Facts] = []

    def state(self, facts: Facts) -> None:
        """State facts that must be equal on all ranks. **Ranks:** any; nothing is exchanged."""
        self._stated = [*self._stated[1 - MOST :], facts]

    def forget(self) -> None:
        """Forget the facts that were not compared yet."""
        self._stated = []

    def digests(self) -> list[tuple[str, str]]:
        """Return (kind, digest) of the facts that were not compared yet."""
        return [(facts.kind, facts.digest) for facts in self._stated]

    def settle(
        self,
        rank: int,
        everyone: Sequence[list[tuple[str, str]]],
        gather: Callable[[Any], list[Any]],
    ) -> None:
        """Compare the facts of all ranks; forget equal ones.

        Facts that only some ranks have stated so far wait for the other ranks.

        Args:
            everyone: `digests` of all ranks, in rank order.
            gather: returns the arguments of all ranks, in rank order; called on all ranks or none.

        **Ranks:** all. **Raises:** ConfigurationError, on every rank, if a rank has facts that rank
        0 lacks, and lacks facts of the same kind that rank 0 has.
        """
        if not any(everyone):
            return
        # Equal on all ranks, so that all call `gather` below, or none
        counts = [Counter(digests) for digests in everyone]
        for digest in functools.reduce(operator.and_, counts).elements():
            del self._stated[self.digests().index(digest)]
        for other_rank, count in enumerate(counts):
            lacking, added = counts[0] - count, {kind for kind, _ in count - counts[0]}
            for kind in [kind for kind, _ in lacking if kind in added][:1]:
                own_facts = [facts for facts in self._stated if facts.kind == kind]
                self.forget()  # One error is enough
                rows = [(*facts[:2], dict(facts.values), facts.remedy) for facts in own_facts]
                gathered = gather(rows if rank in (0, other_rank) else [])
                roots, others_facts = (
                    [Facts(*row) for row in gathered[at]] for at in (0, other_rank)
                )
                _refuse(roots, other_rank, others_facts)


def _beyond(stated: Sequence[Facts], reference: Sequence[Facts]) -> list[Facts]:
    """Return the facts in `stated` that are missing in `reference`, or less frequent there."""
    more = Counter(facts.digest for facts in stated)
    more -= Counter(facts.digest for facts in reference)
    return [facts for facts in stated if facts.digest in more]


def _refuse(roots: Sequence[Facts], rank: int, others_facts: Sequence[Facts]) -> NoReturn:
    """Raise the difference between facts of `rank` and the most similar facts of rank 0."""
    facts = _beyond(others_facts, roots)[0]
    root = min(
        _beyond(roots, others_facts), key=lambda candidate: len(differences(candidate, facts))
    )
    rows = differences(root, facts)
    named = "; ".join(
        f"{item}: {expected} on rank 0, {received} on rank {rank}"
        for item, expected, received in rows[:NAMED]
    )
    remaining = f"; and {len(rows) - NAMED} more" if len(rows) > NAMED else ""
    texts = dict.fromkeys(text for row in rows for text in row)
    raise ConfigurationError(
        f"Every rank must have the same {facts.kind}. Received {root.name} on rank 0 and "
        f"{facts.name} on rank {rank}, which differ in {named}{remaining}.{told_apart(texts)} "
        f"{facts.remedy}"
    )

"""Facts that must be equal on all ranks, compared when the ranks next exchange objects.

    rank 0   DataCache states its samples       gather_objects -> equal: nothing happens rank 1
    DataCache states its samples  gather_objects -> unequal: ConfigurationError, on every rank

To state a fact exchanges nothing, so that a data set can be opened at any time, and one that a
single rank opens for itself makes no rank wait. The digests travel with the next objects that all
ranks exchange anyway: before the first step of a training, because every rank's plan is compared
there.
"""

from __future__ import annotations

import functools
import hashlib
import operator
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

from tfcommx.core import ConfigurationError

# Facts that wait to be compared, at most; the oldest are dropped, which one rank alone has stated
MOST = 64
# Differences that an error names
NAMED = 3


class Facts(NamedTuple):
    """What a rank knows of something that all ranks must have equally."""

    # Of facts: only those of one kind are compared, such as "samples"
    kind: str
    # For people: which ones they are on this rank
    name: str
    # Item -> value, in the order in which differences are named
    values: Mapping[str, str]
    # What to do if they differ; a sentence
    remedy: str

    @property
    def digest(self) -> str:
        """SHA-256 of kind and values, hexadecimal: equal for equal facts."""
        return hashlib.sha256(repr((self.kind, sorted(self.values.items()))).encode()).hexdigest()


def differences(one: Facts, other: Facts) -> list[tuple[str, str, str]]:
    """Return (item, value in `one`, value in `other`) of each item that differs.

    >>> cats, more = (Facts("samples", "", {"cat": n}, "") for n in ("3 files", "4 files"))
    >>> differences(cats, more)
    [('cat', '3 files', '4 files')]
    """
    items = dict.fromkeys([*one.values, *other.values])
    pairs = [
        (item, one.values.get(item, "missing"), other.values.get(item, "missing")) for item in items
    ]
    return [row for row in pairs if row[1] != row[2]]


class Comparisons:
    """The facts that this rank has stated, and that were not compared yet."""

    def __init__(self) -> None:
        self._stated: list[Facts] = []

    def state(self, facts: Facts) -> None:
        """State facts that must be equal on all ranks. **Ranks:** any; nothing is exchanged."""
        self._stated = [*self._stated[1 - MOST :], facts]

    def forget(self) -> None:
        """Forget what was not compared yet."""
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
        """Compare what all ranks have stated; forget what is equal.

        What only some ranks have stated so far waits for the others.

        Args:
            rank: this process's.
            everyone: `digests` of all ranks, in rank order.
            gather: returns what all ranks give it, in rank order; called on all ranks or none.

        **Ranks:** all. **Raises:** ConfigurationError, on every rank, if a rank has facts that rank
        0 lacks, and lacks facts of the same kind that rank 0 has.
        """
        if not any(everyone):
            return
        counts = [Counter(digests) for digests in everyone]
        for digest in functools.reduce(operator.and_, counts).elements():
            del self._stated[self.digests().index(digest)]
        for other, count in enumerate(counts):
            lacking, added = counts[0] - count, {kind for kind, _ in count - counts[0]}
            for kind in [kind for kind, _ in lacking if kind in added][:1]:
                own = [facts for facts in self._stated if facts.kind == kind]
                self.forget()  # One error is enough
                rows = [(*facts[:2], dict(facts.values), facts.remedy) for facts in own]
                gathered = gather(rows if rank in (0, other) else [])
                roots, theirs = ([Facts(*row) for row in gathered[at]] for at in (0, other))
                _refuse(roots, other, theirs)


def _beyond(some: Sequence[Facts], others: Sequence[Facts]) -> list[Facts]:
    """Return the facts in `some` that are not in `others`, or less often."""
    known, beyond = Counter(facts.digest for facts in others), []
    for facts in some:
        known[facts.digest] -= 1
        if known[facts.digest] < 0:
            beyond.append(facts)
    return beyond


def _refuse(roots: Sequence[Facts], rank: int, theirs: Sequence[Facts]) -> NoReturn:
    """Raise how facts of `rank` differ from those of rank 0 that are most like them."""
    facts = _beyond(theirs, roots)[0]
    root = min(_beyond(roots, theirs), key=lambda one: len(differences(one, facts)))
    rows = differences(root, facts)
    named = "; ".join(
        f"{item}: {there} on rank 0, {here} on rank {rank}" for item, there, here in rows[:NAMED]
    )
    more = f"; and {len(rows) - NAMED} more" if len(rows) > NAMED else ""
    raise ConfigurationError(
        f"Every rank must have the same {facts.kind}. Received {root.name} on rank 0 and "
        f"{facts.name} on rank {rank}, which differ in {named}{more}. {facts.remedy}"
    )

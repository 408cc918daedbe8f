"""How many ranks of the next generation run on which hosts."""

from __future__ import annotations

from collections.abc import Iterable

from tfcommx.comm.allocation import Host

# Hosts in a line
SHOWN = 6


def slots_of(hosts: Iterable[Host]) -> int:
    """Return how many ranks these hosts take."""
    return sum(host.slots for host in hosts)


def place(offered: Iterable[Host], before: Iterable[Host], most: int | None) -> list[Host]:
    """Return the hosts of the next generation, with a slot for every rank to start there.

    Hosts of the generation before come first, in their order, so that rank 0 stays where it is.

    Args:
        offered: hosts that may be used, with their slots.
        before: hosts of the generation before.
        most: ranks at most; None: any number.

    >>> place([Host("new", 2), Host("a", 2), Host("b", 2)], [Host("a", 2)], 3)
    [Host(name='a', slots=2), Host(name='new', slots=1)]
    """
    names = [host.name for host in before]
    first = {name: number for number, name in enumerate(names)}
    chosen: list[Host] = []
    for host in sorted(offered, key=lambda host: first.get(host.name, len(first))):
        free = host.slots if most is None else min(host.slots, most - slots_of(chosen))
        if free > 0:
            chosen.append(Host(host.name, free))
    return chosen


def in_words(hosts: Iterable[Host]) -> str:
    """Return hosts as -H has them; of many the first ones.

    >>> in_words([Host("node0", 2), Host("node1", 1)])
    'node0:2,node1:1'
    """
    words = [f"{host.name}:{host.slots}" for host in hosts]
    more = f",... ({len(words)} hosts)" if len(words) > SHOWN else ""
    return ",".join(words[:SHOWN]) + more

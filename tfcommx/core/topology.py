"""Topology: the nodes of a cluster, their slots, and the groups of ranks."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from tfcommx.core.checks import check_name, check_whole
from tfcommx.core.errors import PlanError

GROUPS = ("world", "node", "peers")


@dataclass(frozen=True)
class Topology:
    """m nodes with n processes each; rank r is slot r % n of node r // n.

    Groups: `world` is all ranks, `node` the n ranks of one node, `peers` the m ranks with the same
    slot.

    >>> topology = Topology(nodes=2, slots=3)
    >>> topology.size, topology.group("node", rank=4), topology.group("peers", rank=4)
    (6, (3, 4, 5), (1, 4))
    """

    # Number of nodes, >= 1.
    nodes: int
    # Processes per node, >= 1; the largest number if the nodes differ.
    slots: int
    # (host, slots) of every node if nodes have unequal numbers of slots; then only one-level routes
    # work. Empty if all nodes have the same number.
    uneven: tuple[tuple[str, int], ...] = ()

    def __post_init__(self) -> None:
        # NumPy's numbers become Python's, because plans are written as JSON
        for name in ("nodes", "slots"):
            object.__setattr__(self, name, check_whole(name, getattr(self, name)))
        if self.nodes < 1 or self.slots < 1:
            raise PlanError(
                f"A topology needs nodes >= 1 and slots >= 1. Received nodes={self.nodes}, "
                f"slots={self.slots}."
            )

    @property
    def size(self) -> int:
        """Number of ranks."""
        return sum(slots for _, slots in self.uneven) if self.uneven else self.nodes * self.slots

    @property
    def slots_by_node(self) -> tuple[int, ...]:
        """Number of ranks on each node."""
        return tuple(slots for _, slots in self.uneven) or (self.slots,) * self.nodes

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
        if not self.uneven:
            return rank // self.slots
        ends = itertools.accumulate(self.slots_by_node)
        return next(node for node, end in enumerate(ends) if rank < end)

    def position_of(self, rank: int) -> tuple[int, int]:
        """Return (node, slot) of a rank.

        >>> Topology(nodes=2, slots=3).position_of(4)
        (1, 1)

        **Raises:** PlanError for a rank that the topology does not have.
        """
        if not 0 <= rank < self.size:
            raise PlanError(
                f"`rank` must be in [0, {self.size}). Received rank={rank}. Pass the rank that "
                "the launcher gave."
            )
        node = self.node_of(rank)
        return node, rank - sum(self.slots_by_node[:node])

    def require_even(
        self, feature: str, otherwise: str = "use a one-level route (allreduce, allgather)"
    ) -> None:
        """Refuse `feature`, a phrase for the message, if the nodes have unequal numbers of slots.

        Args:
            otherwise: the other remedy, beside equal numbers.

        **Raises:** PlanError that names the hosts.
        """
        if self.uneven:
            hosts = ", ".join(f"{host}:{slots}" for host, slots in self.uneven)
            raise PlanError(
                f"Equally many slots on every node are required for {feature}. Received {hosts}. "
                f"Launch equally many processes per host, or {otherwise}."
            )

    @staticmethod
    def of_hosts(hosts: list[str]) -> Topology:
        """Make the topology from the host of every rank, in rank order.

        >>> Topology.of_hosts(["red", "red", "blue", "blue"])
        Topology(nodes=2, slots=2, uneven=())

        **Raises:** PlanError if the ranks of a host are not consecutive.
        """
        counts: dict[str, int] = {}
        for rank, host in enumerate(hosts):
            # The groups of a rank follow from its number alone, see `group`
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

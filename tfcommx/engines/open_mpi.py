"""Open MPI 5: `tuned` collectives by ranks and bytes, HAN for several slots; and Open MPI to 4.0.

An allreduce takes, by the number of ranks and the bytes of the vector:

    recursive doubling   log2(p) exchanges of the whole vector
    Rabenseifner         halving: 1/2, 1/4, ... of the vector to ranks 1, 2, ... away; then back
    ring                 2 (p - 1) exchanges of 1/p
    segmented ring       the same, in pieces
    nonoverlapping       a reduce to one rank, then a broadcast, both in a tree

Over several nodes of several slots HAN is selected, because it has a higher priority (35 against
30). It cuts the vector into segments of 64 KiB, and each of them passes four tasks:

    reduce inside | reduce between | broadcast between | broadcast inside

Source: open-mpi/ompi, release 5.0: ompi/mca/coll/tuned/coll_tuned_decision_fixed.c
(`ompi_coll_tuned_allreduce_intra_dec_fixed` and those of reduce_scatter, allgatherv and alltoallv,
which Horovod calls for an all-to-all), ompi/mca/coll/base/coll_base_alltoallv.c and
ompi/mca/coll/han/coll_han_allreduce.c (`mca_coll_han_allreduce_intra`). Rabenseifner,
"Optimization of Collective Reduction Operations" (2004). Where we differ: HAN's two tasks between
nodes are counted one after the other. They are started together, but 16 MB on 4 nodes of 2 took
the time of five times the vector through a port, which is their sum, and not of three times, which
is the longer one (the rows of MPI in the notes on the platform).

`OpenMpi1` is Open MPI up to 4.0: an allreduce below 10,000 bytes is recursive doubling, and a
longer one is a ring. The ring of more than 1 MB a rank uses segments, which do not change its
price. It exists for papers of that time; version 4.1 introduced the table of `OpenMpi`.

Source: open-mpi/ompi, releases 1.2 to 4.0: coll_tuned_decision_fixed.c
(`ompi_coll_tuned_allreduce_intra_dec_fixed`, "based on MX results from the Grig cluster").
"""

import math

from tfcommx.core import Link, Links, Topology, cost
from tfcommx.engines.engine import Engine

# Segment of HAN, coll_han_allreduce_segsize
SEGMENT_BYTES = 2**16
# Ranks below -> [(bytes below, algorithm), ...]; the last rows apply to all larger values
DOUBLING, RING, RABENSEIFNER, TREE = "doubling", "ring", "rabenseifner", "tree"
ALWAYS = math.inf
ALL_REDUCE: tuple[tuple[float, tuple[tuple[float, str], ...]], ...] = (
    (
        4,
        (
            (8, RING),
            (4096, DOUBLING),
            (8192, RING),
            (16384, DOUBLING),
            (262144, RING),
            (ALWAYS, RABENSEIFNER),
        ),
    ),
    (8, ((16, RING), (8192, DOUBLING), (ALWAYS, RABENSEIFNER))),
    (16, ((8192, DOUBLING), (ALWAYS, RABENSEIFNER))),
    (32, ((64, RING), (4096, DOUBLING), (ALWAYS, RABENSEIFNER))),
    (64, ((128, RING), (ALWAYS, RABENSEIFNER))),
    (128, ((262144, DOUBLING), (ALWAYS, RABENSEIFNER))),
    (256, ((131072, TREE), (262144, DOUBLING), (ALWAYS, RABENSEIFNER))),
    (512, ((4096, TREE), (ALWAYS, RABENSEIFNER))),
    (2048, ((2048, TREE), (16384, DOUBLING), (ALWAYS, RABENSEIFNER))),
    (4096, ((2048, TREE), (4096, RING), (16384, DOUBLING), (ALWAYS, RABENSEIFNER))),
    (ALWAYS, ((2048, TREE), (16384, RING), (32768, DOUBLING), (ALWAYS, RABENSEIFNER))),
)
# Numbers of ranks whose all-to-all sends all messages at once; others exchange in pairs
LINEAR = (range(4, 64), range(128, 256))
ALWAYS_LINEAR = 1024


class OpenMpi(Engine):
    """Prices of the algorithms that Open MPI 5 selects by bytes and ranks."""

    name = "open_mpi"

    def all_reduce(self, total_bytes: float, topology: Topology, links: Links) -> float:
        """Price an allreduce by HAN, if it supports this topology, otherwise by `tuned`."""
        if topology.size == 1:
            return 0.0
        # HAN leaves nodes with unequal numbers of ranks to `tuned`
        if 1 < topology.nodes < topology.size and not topology.uneven:
            return self._han(total_bytes, topology, links)
        chosen = decide(total_bytes, topology.size)
        if chosen == RING:
            return super().all_reduce(total_bytes, topology, links)
        if chosen == TREE:
            link = self.doubling(topology, links)[-1]
            return cost.spanning_tree("allreduce", total_bytes, topology.size, link)
        price = doubling_seconds if chosen == DOUBLING else _rabenseifner
        return price(total_bytes, topology.size, self.doubling(topology, links))

    def reduce_scatter(self, total_bytes: float, topology: Topology, links: Links) -> float:
        """Price recursive halving, which Open MPI uses for most sizes that are not tiny."""
        if topology.size == 1:
            return 0.0
        hops = self.doubling(topology, links)
        return _halving(total_bytes, hops) + _uneven(total_bytes, topology, hops)

    def all_gather(self, own_bytes: float, topology: Topology, links: Links) -> float:
        """Price Bruck's log2(p) exchanges for short vectors, and a ring for long ones."""
        if topology.size == 1:
            return 0.0
        if own_bytes >= 262144 or topology.size == 2:
            return super().all_gather(own_bytes, topology, links)
        hop = self.flat_ring(topology, links)
        steps = math.ceil(math.log2(topology.size))
        return steps * hop.alpha_s + (topology.size - 1) * own_bytes * hop.beta_s_per_byte

    def all_to_all(self, total_bytes: float, topology: Topology, links: Links) -> float:
        """Price `linear`, which sends all at once, or `pairwise`, in rounds, by ranks only."""
        ranks = topology.size
        if ranks == 1 or ranks >= ALWAYS_LINEAR or any(ranks in interval for interval in LINEAR):
            return self.all_at_once(total_bytes, topology, links)
        sizes = links.slowest(topology).alpha_s
        return sizes + super().all_to_all(total_bytes, topology, links)

    def _han(self, total_bytes: float, topology: Topology, links: Links) -> float:
        """Price the segments of HAN: as many rounds as segments, and three to fill the pipe."""
        segments = max(1, math.ceil(total_bytes / SEGMENT_BYTES))
        size = total_bytes / segments
        slots, nodes = topology.size // topology.nodes, topology.nodes
        levels = math.ceil(math.log2(nodes))
        port = self.port(links, 1)
        up = levels * _message(port, size, adds=True)
        # libnbc broadcasts to few ranks from the root only, and to more in a binomial tree
        down = _message(port, size * (nodes - 1 if nodes <= 4 else levels))
        deep = math.ceil(math.log2(slots))
        inside = deep * (_message(links.inside, size, adds=True) + _message(links.inside, size))
        return segments * max(up + down, inside) + up + down + inside


def decide(total_bytes: float, ranks: int) -> str:
    """Return the algorithm of an allreduce.

    >>> decide(1000, 8), decide(1e6, 8)
    ('doubling', 'rabenseifner')
    """
    sizes = next(rows for below, rows in ALL_REDUCE if ranks < below)
    return next(algorithm for below, algorithm in sizes if total_bytes < below)


def _message(link: Link, size: float, adds: bool = False) -> float:
    gamma = link.gamma_s_per_byte if adds else 0.0
    return link.alpha_s + size * (link.beta_s_per_byte + gamma)


def doubling_seconds(total_bytes: float, ranks: int, hops: list[Link]) -> float:
    """Price recursive doubling; ranks beyond a power of two send first, and receive last."""
    beyond = 0.0
    if ranks > 1 << len(hops):
        beyond = _message(hops[0], total_bytes, adds=True) + _message(hops[0], total_bytes)
    return beyond + sum(_message(hop, total_bytes, adds=True) for hop in hops)


def _rabenseifner(total_bytes: float, ranks: int, hops: list[Link]) -> float:
    """Price recursive halving, and the reverse exchanges to gather."""
    halves = [total_bytes / (2 << step) for step in range(len(hops))]
    gather = sum(_message(hop, size) for hop, size in zip(hops, halves, strict=True))
    beyond = 0.0
    if ranks > 1 << len(hops):
        # Two ranks halve a vector between them, one continues with both halves, and sends the sum
        half = _message(hops[0], total_bytes / 2)
        beyond = 2 * half + total_bytes / 2 * hops[0].gamma_s_per_byte
        beyond += _message(hops[0], total_bytes)
    return _halving(total_bytes, hops) + gather + beyond


def _halving(total_bytes: float, hops: list[Link]) -> float:
    return sum(_message(hop, total_bytes / (2 << step), adds=True) for step, hop in enumerate(hops))


def _uneven(total_bytes: float, topology: Topology, hops: list[Link]) -> float:
    """Price the ranks beyond a power of two: they send their vector, and receive a part."""
    if topology.size == 1 << len(hops):
        return 0.0
    part = total_bytes / topology.size
    return _message(hops[0], total_bytes, adds=True) + _message(hops[0], part)


ENGINE = OpenMpi()


# Bytes below which an allreduce is recursive doubling
SHORT_BYTES = 10_000


class OpenMpi1(Engine):
    """Prices of the older selection; every collective but an allreduce is a ring."""

    name = "open_mpi_1"

    def all_reduce(self, total_bytes: float, topology: Topology, links: Links) -> float:
        """Price recursive doubling for a short vector, and a ring for a long one."""
        if topology.size == 1:
            return 0.0
        if total_bytes < SHORT_BYTES:
            return doubling_seconds(total_bytes, topology.size, self.doubling(topology, links))
        return super().all_reduce(total_bytes, topology, links)


ENGINE_1 = OpenMpi1()

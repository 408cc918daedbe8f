"""Flat sparse all-gather: every rank selects from its whole gradient and sends its pairs to every
other rank.

Source: Renggli et al., "SparCML" (2019); named NaiveAG in Shi et al. (2021), section 5.3, and
priced by its equation 3.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tfcommx import cost
from tfcommx.terms import Bucket, Links, Sparse, Topology, Traffic
from tfcommx.wire import codec


def shard(bucket: Bucket, topology: Topology, rank: int) -> tuple[int, int]:
    """Every rank selects from, and keeps the residual of, the whole vector."""
    return 0, bucket.padded


def run(flat: Any, bucket: Bucket, comm: Any, select: Callable[[Any], Sparse]) -> Any:
    """Return the sum over all ranks of what each selected, as a dense vector. **Ranks:** all.
    **Cost:** one collective.
    """
    pairs = comm.all_gather(codec.encode(select(flat), bucket.wire), "world", bucket.name)
    return codec.merge(pairs, bucket.k, bucket.padded, bucket.wire)


def wire_bytes(bucket: Bucket, topology: Topology) -> Traffic:
    """Return what one rank sends in a step: its pairs go to p - 1 ranks around the ring, which
    leaves each node once.
    """
    sent = (topology.size - 1) * codec.size_bytes(bucket.k, bucket.padded, bucket.wire)
    return cost.ring_traffic(sent, "world", topology)


def seconds(bucket: Bucket, topology: Topology, links: Links) -> float:
    """Return the price, equation 3 for values and indices together (the paper counts 4 bytes of
    each, in two collectives).
    """
    link = links.between if topology.nodes > 1 else links.inside
    return cost.all_gather(
        codec.size_bytes(bucket.k, bucket.padded, bucket.wire), topology.size, link
    )

"""Horovod's own allreduce: the identity of the routes."""

from __future__ import annotations

from typing import Any

from tfcommx import cost
from tfcommx.terms import Bucket, Links, Topology, Traffic


def shard(bucket: Bucket, topology: Topology, rank: int) -> tuple[int, int]:
    """Every rank keeps what it owes of the whole vector."""
    return 0, bucket.padded


def run(flat: Any, bucket: Bucket, comm: Any, select: None = None, group: str = "world") -> Any:
    """Return the sum of `flat` over a group. **Ranks:** all of it. **Cost:** one collective, 2 (p -
    1)/p of the vector sent.
    """
    return comm.allreduce(flat, group, bucket.name)


def run_list(parts: list[Any], bucket: Bucket, comm: Any, average: bool) -> list[Any]:
    """Return the sum or average of each tensor over all ranks, by the engine's own merging: never
    slower than plain Horovod.
    """
    return comm.allreduce_list(parts, bucket.name, average)


def wire_bytes(bucket: Bucket, topology: Topology) -> Traffic:
    """Return what one rank sends in a step, as the mean over the ranks: a ring leaves each node
    once.
    """
    sent = 2 * (topology.size - 1) / topology.size * bucket.padded * bucket.entry_bytes
    return cost.ring_traffic(sent, "world", topology)


def seconds(bucket: Bucket, topology: Topology, links: Links) -> float:
    """Return the price: a ring over all ranks runs at the pace of its slowest link."""
    link = links.between if topology.nodes > 1 else links.inside
    return cost.all_reduce(bucket.padded * bucket.entry_bytes, topology.size, link)

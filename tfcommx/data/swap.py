"""Samples that change nodes between two epochs: sent from memory to memory, into the places of those that left.

    node 0: a b c d      node 1: e f g h        before
    node 0: a b c g      node 1: e f d h        after: d and g crossed, each into the other's place
"""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
import tensorflow as tf

from tfcommx.data import order
from tfcommx.data.augment import unpack
from tfcommx.data.slab import RECORD, Slab, pack, record_bytes
from tfcommx.terms import Topology

ROUND_BYTES = 64 * 2**20  # sent to one node at once: bounds the memory, and counts stay below 2^31 on any engine


class Transport(Protocol):
    """What is needed of a communicator."""

    def alltoall(self, tensor: Any, group: str, name: str) -> Any:
        """Cut uint8 [m * n] into m shards, one for each rank of my slot, in the order of the nodes; return those for me."""
        ...

    def gather_objects(self, item: Any) -> list[Any]:
        """Return every rank's item."""
        ...


def swap(slab: Slab, transport: Transport, topology: Topology, rank: int, seed: int, fraction: float, epoch: int) -> int:
    """Send this rank's share of the samples that leave its node for `epoch`, and put what arrives into their places.

    Returns: the samples that arrived. What no slab held is read from disk or source when its turn comes.
    **Ranks:** all, with equal slots, while no rank reads the slab: between the dataset of one epoch and that of the next.
    **Cost:** each sample that moves is copied three times and sent once, fraction * (1 - 1 / nodes) of the part.
    """
    node, slot = order.place(topology, rank)
    slots = order.slots_of(topology)
    before, after = (order.parts(slab.count, slots, seed, number, fraction) for number in (epoch - 1, epoch))
    queues = [np.intersect1d(before[node], part, assume_unique=True)[slot :: slots[node]].tolist() for part in after]
    queues[node] = []
    free: dict[int, list[int]] = {}  # bytes of a record -> where samples were that have been sent
    arrived = 0
    while True:
        shards = [_take(slab, queue, free) for queue in queues]
        longest = max(transport.gather_objects(max(map(len, shards))))  # all ranks are here: nobody reads any more
        if longest == 0:
            return arrived
        sent = np.zeros((len(shards), longest), np.uint8)
        for row, shard in zip(sent, shards, strict=True):
            row[: len(shard)] = np.frombuffer(shard, np.uint8)
        received = transport.alltoall(tf.constant(sent.reshape(-1)), "peers", "tfcommx_swap")
        for row in np.asarray(received).reshape(sent.shape):
            at = 0
            while at + RECORD <= longest and row[at + 16 : at + 24].view(np.int64)[0]:  # an empty record ends the shard
                pixels, label = unpack(row, at)
                size = record_bytes(pixels.nbytes)
                place = free[size].pop() if free.get(size) else None
                arrived += slab.put(int(row[at : at + 8].view(np.int64)[0]), label, pixels, place)
                at += size


def _take(slab: Slab, queue: list[int], free: dict[int, list[int]]) -> bytes:
    """Take samples from the queue and out of the slab; return their records, about ROUND_BYTES."""
    records: list[bytes] = []
    size = 0
    while queue and size < ROUND_BYTES:
        sample = queue.pop()
        if (got := slab.get(sample)) is not None and slab.intact(sample):
            records.append(pack(sample, got[1], got[0]))
            size += len(records[-1])
            free.setdefault(len(records[-1]), []).append(int(slab.index[sample]))
        if not slab.unreadable(sample):
            slab.forget(sample)
    return b"".join(records)

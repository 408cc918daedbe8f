"""Samples that change nodes between two epochs: sent from memory to memory, into the places of
those that left.

    node 0: a b c d      node 1: e f g h        before
    node 0: a b c g      node 1: e f d h        after: d and g crossed, each into the other's place

Pictures differ in size: each takes the smallest place that is large enough, and leaves the rest of
it. What lies between samples is a place too, and neighbours have become one by the next swap, so
that the memory stays what it was, within a tenth.
"""

from __future__ import annotations

import bisect
import warnings
from typing import Any, Protocol

import numpy as np
import tensorflow as tf

from tfcommx.data.cache import order
from tfcommx.data.cache.batches import unpack
from tfcommx.data.cache.slab import RECORD, Slab, pack, record_bytes
from tfcommx.terms import Topology

# sent by a rank at once, to all nodes together: bounds the memory, and counts stay below 2^31 on
# any engine
ROUND_BYTES = 64 * 2**20


class Transport(Protocol):
    """What is needed of a communicator."""

    def alltoall(self, tensor: Any, group: str, name: str) -> Any:
        """Cut uint8 [m * n] into m shards, one for each rank of my slot, in the order of the nodes;
        return those for me.
        """
        ...

    def gather_objects(self, item: Any) -> list[Any]:
        """Return every rank's item."""
        ...


def swap(
    slab: Slab,
    transport: Transport,
    topology: Topology,
    rank: int,
    seed: int,
    fraction: float,
    epoch: int,
) -> int:
    """Send this rank's share of the samples that leave its node for `epoch`, and put what arrives
    into their places.

    Returns: the samples that arrived. What no slab held is read from disk or source when its turn
    comes.
    **Ranks:** all, with equal slots, while no rank reads the slab: between the dataset of one epoch
    and that of the next.
    **Cost:** each sample that moves is copied three times and sent once, fraction * (1 - 1 / nodes)
    of the part.
    """
    node, slot = order.place(topology, rank)
    slots = order.slots_of(topology)
    before, after = (
        order.parts(slab.count, slots, seed, number, fraction) for number in (epoch - 1, epoch)
    )
    queues = [
        np.intersect1d(before[node], part, assume_unique=True)[slot :: slots[node]].tolist()
        for part in after
    ]
    queues[node] = []
    transport.gather_objects(None)  # all ranks are here: nobody reads or fills any more
    # each rank of a node has its own, and later the places of those that it has sent
    free = slab.holes()[slot :: slots[node]]
    transport.gather_objects(None)  # all have looked: now samples may leave
    arrived, lost = 0, 0
    while True:
        shards = [_take(slab, queue, free, ROUND_BYTES // len(queues)) for queue in queues]
        longest = max(transport.gather_objects(max(map(len, shards))))
        if longest == 0:
            break
        sent = np.zeros((len(shards), longest), np.uint8)
        for row, shard in zip(sent, shards, strict=True):
            row[: len(shard)] = np.frombuffer(shard, np.uint8)
        received = transport.alltoall(tf.constant(sent.reshape(-1)), "peers", "tfcommx_swap")
        for row in np.asarray(received).reshape(sent.shape):
            at = 0
            # an empty record ends the shard
            while at + RECORD <= longest and row[at + 16 : at + 24].view(np.int64)[0]:
                pixels, label = unpack(row, at)
                size = record_bytes(pixels.nbytes)
                kept = slab.put(
                    int(row[at : at + 8].view(np.int64)[0]), label, pixels, _place(free, size)
                )
                arrived, lost, at = arrived + kept, lost + (not kept), at + size
    if lost:
        warnings.warn(
            "Samples that came from other nodes found no room in the slab: they are read from "
            "the disk level or the source in every "
            "epoch. Give the node more memory, or raise `memory_bytes`.",
            stacklevel=3,
        )
    return arrived


def _place(free: list[tuple[int, int]], size: int) -> int | None:
    """Take `size` bytes out of the smallest free place that has as many; None where none has."""
    found = bisect.bisect_left(free, (size, 0))
    if found == len(free):
        return None
    room, at = free.pop(found)
    if room > size:
        bisect.insort(free, (room - size, at + size))
    return at


def _take(slab: Slab, queue: list[int], free: list[tuple[int, int]], enough: int) -> bytes:
    """Take samples from the queue and out of the slab; return their records, `enough` bytes and
    less than one more record.
    """
    records: list[bytes] = []
    size = 0
    while queue and size < enough:
        sample = queue.pop()
        if (got := slab.get(sample)) is not None and slab.intact(sample):
            records.append(pack(sample, got[1], got[0]))
            size += len(records[-1])
            bisect.insort(free, (len(records[-1]), int(slab.index[sample])))
        if not slab.unreadable(sample):
            slab.forget(sample)
    return b"".join(records)

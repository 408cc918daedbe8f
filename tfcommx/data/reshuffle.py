"""Move samples between nodes before an epoch, from one node's memory to another's.

They are stored in the space of the samples that were sent away:

    node 0: a b c d      node 1: e f g h        before
    node 0: a b c g      node 1: e f d h        after: d and g moved, each into the other's space

Pictures differ in size. Each takes the smallest hole that is large enough, and leaves the rest of
it. Free space between samples is a hole too, and adjacent holes are joined at the next reshuffle.
The memory therefore keeps its size within a tenth.
"""

import bisect
import warnings

import numpy as np
import tensorflow as tf

from tfcommx.collectives.comm import Comm
from tfcommx.core import Topology
from tfcommx.data import order
from tfcommx.data.slab import Slab
from tfcommx.data.sources.decode import is_record, pack, record_bytes, sample_of, unpack

# Bytes that a rank sends in one message, to all nodes together: bounds the memory, and keeps counts
# below 2^31 on any engine
ROUND_BYTES = 64 * 2**20


def reshuffle(
    slab: Slab, comm: Comm, topology: Topology, rank: int, seed: int, fraction: float, epoch: int
) -> int:
    """Exchange the samples that change their node for `epoch`; return the number of stored ones.

    Samples that no slab holds are read from disk or source when their batch is loaded.

    **Ranks:** all, with equal slots, while no rank reads the slab: between the dataset of one epoch
    and that of the next.
    **Cost:** each sample that moves is copied three times and sent once, fraction * (1 - 1 / nodes)
    of the part.
    """
    queues = _leaving(slab.count, topology, rank, seed, fraction, epoch)
    node, slot = topology.position_of(rank)
    slots = topology.slots_by_node[node]
    comm.gather_objects(None)  # A barrier: after it no rank reads or fills
    # Each rank of a node has separate holes, and later those of the samples that it has sent
    free = slab.holes()[slot::slots]
    comm.gather_objects(None)  # A barrier: after it all have their holes, and samples may leave
    arrived, lost = 0, 0
    while True:
        shards = [_take(slab, queue, free, ROUND_BYTES // len(queues)) for queue in queues]
        # All ranks continue until the last has sent everything, with padded shards of one length,
        # because an alltoall needs all ranks and cuts buffers into equal shards
        longest = max(comm.gather_objects(max(map(len, shards))))
        if longest == 0:
            break
        sent = np.zeros((len(shards), longest), np.uint8)
        for row, shard in zip(sent, shards, strict=True):
            row[: len(shard)] = np.frombuffer(shard, np.uint8)
        received = comm.alltoall(tf.constant(sent.reshape(-1)), "peers", "tfcommx_reshuffle")
        for row in np.asarray(received).reshape(sent.shape):
            stored, refused = _keep(slab, row, free)
            arrived, lost = arrived + stored, lost + refused
    if lost:
        warnings.warn(
            "Samples that came from other nodes found no room in the slab: they are read from the "
            "disk level or the source in every epoch. Give the node more memory, or raise "
            "`memory_bytes`.",
            stacklevel=3,
        )
    return arrived


def _leaving(
    count: int, topology: Topology, rank: int, seed: int, fraction: float, epoch: int
) -> list[list[int]]:
    """Return for each node the samples that this rank sends to it before `epoch`."""
    node, slot = topology.position_of(rank)
    slots = topology.slots_by_node
    before, after = (
        order.parts(count, slots, seed, number, fraction) for number in (epoch - 1, epoch)
    )
    queues = [
        np.intersect1d(before[node], part, assume_unique=True)[slot :: slots[node]].tolist()
        for part in after
    ]
    queues[node] = []
    return queues


def _keep(slab: Slab, records: np.ndarray, free: list[tuple[int, int]]) -> tuple[int, int]:
    """Store the records of uint8 [n] in the slab; return the numbers that did and did not fit."""
    stored, refused, at = 0, 0, 0
    while is_record(records, at):  # Zeros end the shard
        pixels, label = unpack(records, at)
        size = record_bytes(pixels.nbytes)
        if slab.put(sample_of(records, at), label, pixels, _take_hole(free, size)):
            stored += 1
        else:
            refused += 1
        at += size
    return stored, refused


def _take_hole(free: list[tuple[int, int]], size: int) -> int | None:
    """Take `size` bytes of the smallest hole that has as many; return their offset, or None."""
    # Holes are sorted by size, so the first one that fits is the smallest
    position = bisect.bisect_left(free, (size, 0))
    if position == len(free):
        return None
    room, at = free.pop(position)
    if room > size:
        bisect.insort(free, (room - size, at + size))
    return at


def _take(slab: Slab, queue: list[int], free: list[tuple[int, int]], enough: int) -> bytes:
    """Remove samples from the queue and from the slab.

    Returns:
        Their records: at least `enough` bytes unless the queue ends before, and less than one
        record more than that.
    """
    records: list[bytes] = []
    size = 0
    while queue and size < enough:
        sample = queue.pop()
        # A damaged sample is not sent, because the receiver would give it a new CRC and serve it
        if (got := slab.get(sample)) is not None and slab.intact(sample):
            records.append(pack(sample, got[1], got[0]))
            size += len(records[-1])
            bisect.insort(free, (len(records[-1]), int(slab.index[sample])))
        if not slab.unreadable(sample):
            slab.forget(sample)
    return b"".join(records)

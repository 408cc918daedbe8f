"""Alltoall, local sum, all-gather: no arithmetic in the collectives, so entries may travel narrower
than they are added.

    rank 0  [a0 a1 a2]                [a0 b0 c0]  A = a0+b0+c0           [A B C]
    rank 1  [b0 b1 b2]   -alltoall->  [a1 b1 c1]  B = a1+b1+c1  -gather-> [A B C]
    rank 2  [c0 c1 c2]                [a2 b2 c2]  C = a2+b2+c2           [A B C]

Entries travel in the bucket's wire dtype; sums are made in float32 (float64 vectors on the plain
wire: in float64). A finite number that float16 cannot hold arrives as the largest that it can: loss
scaling looks at gradients before the exchange, and would not see an Inf that is made in it.

Source: Ma et al., "Theano-MPI: a Theano-based Distributed Training Framework" (2016), section 3.2;
with the wire dtype float16 it is the paper's ASA16.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tfcommx import cost
from tfcommx.terms import PLAIN, Bucket, Links, Topology, Traffic


def shard(bucket: Bucket, topology: Topology, rank: int) -> tuple[int, int]:
    """Every rank keeps what it owes of the whole vector."""
    return 0, bucket.padded


def run(flat: Any, bucket: Bucket, comm: Any, select: None = None) -> Any:
    """Return the sum of `flat` over all ranks, in its own dtype.

    **Ranks:** all; the result has the same bits on all: the owner of a shard, too, uses what it
    sent.
    **Cost:** two collectives.
    """
    ranks = comm.topology.size
    if ranks == 1:
        return flat
    parts = _unpacked(
        comm.alltoall(_packed(flat, bucket), "world", f"{bucket.name}/alltoall"), bucket
    )
    total, *others = [tf.cast(part, _sum_dtype(bucket)) for part in tf.split(parts, ranks)]
    for other in others:
        total += other
    return tf.cast(
        _unpacked(
            comm.all_gather(_packed(total, bucket), "world", f"{bucket.name}/gather"), bucket
        ),
        flat.dtype,
    )


def wire_bytes(bucket: Bucket, topology: Topology) -> Traffic:
    """Return what one rank sends in a step: (p - 1)/p of the vector straight to its owners, then
    its shard in a ring.
    """
    sent = (topology.size - 1) / topology.size * bucket.padded * _wire_dtype(bucket).size
    steps = (
        cost.alltoall_traffic(sent, "world", topology),
        cost.ring_traffic(sent, "world", topology),
    )
    return Traffic(*map(sum, zip(*steps, strict=True)))


def seconds(bucket: Bucket, topology: Topology, links: Links) -> float:
    """Return the price: p - 1 messages of a shard each, the sum, an all-gather; the slots of a node
    share its link.

    The paper gives no formula: this is the alpha-beta-gamma model's.
    """
    ranks, total = topology.size, bucket.padded * _wire_dtype(bucket).size
    link = links.between if topology.nodes > 1 else links.inside
    leaving = cost.alltoall_traffic((ranks - 1) / ranks * total, "world", topology)
    alltoall = (
        leaving.inside * links.inside.beta_s_per_byte
        + leaving.between * topology.slots * links.between.beta_s_per_byte
    )
    added = (ranks - 1) / ranks * bucket.padded * _sum_dtype(bucket).size * link.gamma_s_per_byte
    return (
        (ranks - 1) * link.alpha_s + alltoall + added + cost.all_gather(total / ranks, ranks, link)
    )


def _wire_dtype(bucket: Bucket) -> tf.DType:
    return tf.as_dtype(bucket.dtype if bucket.wire == PLAIN else bucket.wire)


def _sum_dtype(bucket: Bucket) -> tf.DType:
    return tf.float64 if _wire_dtype(bucket) == tf.float64 else tf.float32


def _packed(entries: tf.Tensor, bucket: Bucket) -> tf.Tensor:
    """Write entries for the wire. Horovod has no bfloat16 and NCCL no 16-bit integers: its bits
    travel as float16's.
    """
    dtype = _wire_dtype(bucket)
    if dtype == tf.float16 and entries.dtype != dtype:
        entries = tf.where(
            tf.math.is_finite(entries), tf.clip_by_value(entries, dtype.min, dtype.max), entries
        )
    written = tf.cast(entries, dtype)
    return tf.bitcast(written, tf.float16) if written.dtype == tf.bfloat16 else written


def _unpacked(written: tf.Tensor, bucket: Bucket) -> tf.Tensor:
    return (
        tf.bitcast(written, _wire_dtype(bucket)) if _wire_dtype(bucket) == tf.bfloat16 else written
    )

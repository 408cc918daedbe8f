"""HiTopKComm: sums inside the node, selected entries between nodes.

         node 0                      node 1
    slot 0     slot 1           slot 0     slot 1
    [a b]      [c d]            [e f]      [g h]        gradients, two halves each
     a+c        b+d              e+g        f+h         1. reduce-scatter in the node
     top(a+c)   top(b+d)         top(e+g)   top(f+h)    2. select; the rest is the residual
     top(a+c) + top(e+g)         the same               3. all-gather of pairs among peers, merged
    [both halves]                [both halves]          4. all-gather in the node

Source: Shi et al., "Towards Scalable Distributed Training of Deep Learning on Public Cloud
Clusters" (2021), section 3.2, Algorithm 2. It drops the entries that are not selected; we keep them
in a residual, on the shard where the selection is made. It gathers values and indices by two
collectives, we by one. It ends with an all-gather of dense shards, while its equation 10 prices one
of pairs: `last_step` has both.
"""

import dataclasses
from dataclasses import dataclass

from tfcommx import engines
from tfcommx.core import Bucket, Links, RouteOptions, Topology, Traffic, check_name
from tfcommx.routes.route import (
    SELECT,
    Codec,
    Comm,
    Select,
    SparseRoute,
    Stage,
    Tensor,
    slot_part,
)
from tfcommx.wire import formats

LAST_STEPS = ("dense", "pairs")


@dataclass(frozen=True)
class HitopkOptions(RouteOptions):
    """The options of hitopk."""

    # Content of the last all-gather in the node: "dense", the merged shard, or "pairs", the peers'
    # pairs. `cheapest` decides by price
    last_step: str = "dense"

    def __post_init__(self) -> None:
        check_name("last step", self.last_step, LAST_STEPS)


class Hitopk(SparseRoute[HitopkOptions]):
    """Slot j selects from, and keeps the residual of, the j-th of n parts of its node's sum."""

    name = "hitopk"
    levels = 2
    shards = "slots"
    options_type = HitopkOptions

    def cheapest(
        self, bucket: Bucket[HitopkOptions], topology: Topology, links: Links
    ) -> Bucket[HitopkOptions]:
        """Return the bucket with the cheaper last step; "dense" if both cost the same.

        **Ranks:** a pure function, so equal on every rank.
        """
        choices = [
            dataclasses.replace(bucket, options=HitopkOptions(last_step))
            for last_step in LAST_STEPS
        ]
        return min(choices, key=lambda choice: _last_seconds(choice, topology, links))

    def shard(
        self, bucket: Bucket[HitopkOptions], topology: Topology, rank: int
    ) -> tuple[int, int]:
        """Return the part of the rank's slot."""
        return slot_part(bucket, topology, rank)

    def run(
        self, flat: Tensor, bucket: Bucket[HitopkOptions], comm: Comm, codec: Codec, select: Select
    ) -> Tensor:
        """Return the sum over all nodes of the selected entries, as a dense vector.

        **Ranks:** all. **Cost:** three collectives.
        """
        slots, wire = comm.topology.slots, bucket.wire
        length = bucket.padded // slots
        part = comm.reduce_scatter(flat, "node", f"{bucket.name}/scatter")
        # The slots of a node select from different shards of its sum, so no entry leaves it twice
        words = codec.encode(select(part), wire)
        pairs = comm.all_gather(words, "peers", f"{bucket.name}/pairs")
        if bucket.options.last_step == "dense":
            merged = codec.merge(pairs, bucket.selected, length, wire)
            return comm.all_gather(merged, "node", f"{bucket.name}/gather")
        pairs = comm.all_gather(pairs, "node", f"{bucket.name}/gather")
        return codec.merge(pairs, bucket.selected, length, wire, shards=slots)

    def wire_bytes(self, bucket: Bucket[HitopkOptions], topology: Topology) -> Traffic:
        """Count the bytes that one rank sends: k entries to m - 1 peers, two steps in its node.

        In the node: (n - 1)/n of the vector, then n - 1 times its merged shard or its m buffers of
        pairs.
        """
        n, total, pairs = topology.slots, bucket.padded_bytes, _pairs_bytes(bucket, topology)
        last = total / n if bucket.options.last_step == "dense" else topology.nodes * pairs
        return Traffic((n - 1) / n * total + (n - 1) * last, float((topology.nodes - 1) * pairs))

    def seconds(self, bucket: Bucket[HitopkOptions], topology: Topology, links: Links) -> float:
        """Return the price, equations 7 to 10.

        The n slots of a node share its link to the others; the paper assumes a separate stream for
        each. Equations 9 and 10 count 4 bytes an entry, its value alone; here its index counts too.
        Additions, which the paper does not count, and equation 8, the selection, are priced at the
        link's gamma per byte.
        """
        return sum(stage.seconds for stage in self.stages(bucket, topology, links))

    def stages(
        self, bucket: Bucket[HitopkOptions], topology: Topology, links: Links
    ) -> list[Stage]:
        """Split the price: inside the node, the selection, between peers, inside the node."""
        n, total, engine = topology.slots, bucket.padded_bytes, engines.of(links)
        sent_bytes, peers = _pairs_bytes(bucket, topology), Topology(topology.nodes, 1)
        return [
            Stage("inside", engine.reduce_scatter(total, Topology(1, n), links)),
            Stage(SELECT, total / n * links.inside.gamma_s_per_byte),
            Stage("between", engine.all_gather(sent_bytes, peers, engine.shared_port(links, n))),
            Stage("inside", _last_seconds(bucket, topology, links)),
        ]


def _last_seconds(bucket: Bucket[HitopkOptions], topology: Topology, links: Links) -> float:
    """Return the price of step 4."""
    n, m, pairs = topology.slots, topology.nodes, _pairs_bytes(bucket, topology)
    if bucket.options.last_step == "dense":
        merged, sent_bytes = 1, bucket.padded_bytes / n
    else:  # The received pairs are sent (equation 10), and n shards are merged
        merged, sent_bytes = n, m * pairs
    gather = engines.of(links).all_gather(sent_bytes, Topology(1, n), links)
    return gather + merged * m * pairs * links.inside.gamma_s_per_byte


def _pairs_bytes(bucket: Bucket[HitopkOptions], topology: Topology) -> int:
    return formats.size_bytes(bucket.selected, bucket.padded // topology.slots, bucket.wire)


ROUTE = Hitopk()

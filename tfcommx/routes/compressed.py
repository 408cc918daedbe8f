"""Prices of a dense route that sums the vectors of a compression in place of a bucket's entries.

Not a row of the table: `routes.of` wraps any dense route in one if a bucket compresses.
"""

import dataclasses

from tfcommx import compression
from tfcommx.core import NO_COMPRESSION, Bucket, Links, Topology, Traffic
from tfcommx.routes.route import SELECT, Route, Stage

# Passes of error feedback over the gradients: copies, the residual, the search for NaN. On an idle
# core they take 24 ms for ResNet-50, as long as PowerSGD's own four, because those multiply
# matrices
FEEDBACK_PASSES = 9


def vectors(bucket: Bucket, route: Route, topology: Topology) -> list[Bucket]:
    """Return a bucket for each vector that is sent in place of the entries, in order."""
    lengths = compression.get(bucket.compression).sums(bucket.shapes)
    names = [f"{bucket.name}/sum{number}" for number in range(len(lengths))]
    return [
        dataclasses.replace(
            bucket,
            name=name,
            variables=(name,),
            sizes=(length,),
            shapes=(),
            padding=route.padding(length, bucket.wire, topology),
            compression=NO_COMPRESSION,
        )
        for name, length in zip(names, lengths, strict=True)
    ]


class CompressedRoute(Route):
    """The prices of a dense route for a bucket that compresses.

    `runtime.bucket_runner` runs the dense route itself, once for each vector.
    """

    def __init__(self, route: Route) -> None:
        self.name, self.levels, self.messages = route.name, route.levels, route.messages
        self._route = route

    def wire_bytes(self, bucket: Bucket, topology: Topology) -> Traffic:
        """Count the bytes of all vectors that one rank sends, as the mean over the ranks."""
        sent = [self._route.wire_bytes(vector, topology) for vector in self._of(bucket, topology)]
        return Traffic(*map(sum, zip(*sent, strict=True)))

    def port_bytes(self, bucket: Bucket, topology: Topology) -> float:
        """Count the bytes of all vectors through the busiest port of a node."""
        return sum(self._route.port_bytes(v, topology) for v in self._of(bucket, topology))

    def seconds(self, bucket: Bucket, topology: Topology, links: Links) -> float:
        """Return the price of the sums, which run one after another."""
        return sum(self._route.seconds(v, topology, links) for v in self._of(bucket, topology))

    def stages(self, bucket: Bucket, topology: Topology, links: Links) -> list[Stage]:
        """Split the price: the computation of the compression, then each sum.

        Its passes over the gradients and those of error feedback are priced as additions; its
        computation between two sums is counted before the first.
        """
        passes = compression.get(bucket.compression).passes() + FEEDBACK_PASSES
        computes = Stage(SELECT, passes * bucket.padded_bytes * links.inside.gamma_s_per_byte)
        sums = [self._route.stages(v, topology, links) for v in self._of(bucket, topology)]
        return [computes, *(stage for stages in sums for stage in stages)]

    def _of(self, bucket: Bucket, topology: Topology) -> list[Bucket]:
        return vectors(bucket, self._route, topology)

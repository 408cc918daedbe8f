"""What a bucket does after its last gradient, stage by stage, and how long each stage takes.

A route prices its messages on an idle network. What the engine adds to each collective, and what a
selection takes, is added here and nowhere else; the waiting is `step`'s.
"""

from __future__ import annotations

from tfcommx import routes
from tfcommx.routes.base import SELECT, Stage
from tfcommx.simulator.assumptions import IDEAL, Assumptions
from tfcommx.terms import Bucket, Links, Topology


def stages_of(
    bucket: Bucket, topology: Topology, links: Links, assumptions: Assumptions = IDEAL
) -> list[Stage]:
    """Return what a bucket does after its last gradient, one after another, without waiting.

    The prices are the route's own; the selection takes what the assumptions say; each collective
    takes the engine's time besides.
    """
    found = []
    engine_s = links.engine_s if assumptions.engine_s is None else assumptions.engine_s
    for stage in routes.of(bucket).stages(bucket, topology, links):
        if stage.resource == SELECT:
            selects = selection_seconds(bucket, topology, links, assumptions)
            seconds = stage.seconds if bucket.compresses else selects
            found.append(Stage(SELECT, seconds))
        elif stage.seconds > 0:  # A group of one rank has no collective
            found.append(Stage(stage.resource, stage.seconds + engine_s))
    return found


def selection_seconds(
    bucket: Bucket, topology: Topology, links: Links, assumptions: Assumptions
) -> float:
    """Return what one rank needs to select from its part of a bucket."""
    start, stop = routes.get(bucket.route).shard(bucket, topology, 0)
    if assumptions.selection is not None:
        return assumptions.selection(stop - start)
    return (stop - start) * bucket.entry_bytes * links.inside.gamma_s_per_byte

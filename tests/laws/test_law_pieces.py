"""Variables that are too long for one bucket travel in pieces."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf
from laws_helpers import (
    SHAPES,
    SPARSE,
    gradients,
    name_of,
    scheme,
)

from tfcommx import routes
from tfcommx.collectives.comm import Comm
from tfcommx.collectives.threads import ThreadComm
from tfcommx.core import Piece, Scheme, Topology
from tfcommx.planner.plan import Gradient, make_plan
from tfcommx.runtime.executor import PlanExecutor
from tfcommx.runtime.gradient_state import GradientState


@pytest.mark.parametrize("topology", [Topology(2, 2), Topology(3, 1)], ids=name_of)
@pytest.mark.parametrize("route", SPARSE)
def test_variables_too_long_for_one_bucket_travel_in_pieces(route: str, topology: Topology) -> None:
    """Nothing is lost, shapes come back, each piece sends its share.

    The limit is 2^30 entries; here it is 100.
    """
    given = [Gradient(path, shape, "float32") for path, shape in SHAPES.items()]
    plan = make_plan(given, {"*": scheme(route, "exact", 0.1)}, topology, "sum", largest=100)
    names = [name for bucket in plan.buckets for name in bucket.variables]
    assert (
        len(names) == 5 + 6 + 1
        and "first/kernel[0:81]" in names
        and routes.read_plan(plan.to_json()) == plan
    )
    assert all(bucket.size < 200 and bucket.k for bucket in plan.buckets if bucket.route == route)

    def work(comm: Comm) -> tuple[dict, list]:
        running = PlanExecutor(plan, comm)
        result = running.exchange(
            {path: tf.constant(value) for path, value in gradients(comm.rank, 0).items()}
        )
        kept = running.export().residuals
        again = PlanExecutor(plan, comm)
        again.load(GradientState(kept))
        same = again.export().residuals
        return {path: value.numpy() for path, value in result.items()}, [kept, same]

    ends = ThreadComm.run(topology, work)
    # The residuals, and those that an equal plan imported
    for kind in (0, 1):
        for path, shape in SHAPES.items():
            stays = np.zeros(shape, np.float32).ravel()
            for _, kept in ends:
                for name, part in kept[kind].items():
                    piece = Piece.of(name)
                    if piece.path == path:
                        stays[piece.start : piece.stop] += part
            came = sum(gradients(rank, 0)[path] for rank in range(topology.size))
            assert ends[0][0][path].shape == shape
            np.testing.assert_array_equal(ends[0][0][path].ravel() + stays, came.ravel())


def test_pieces_go_on_whole_and_the_other_way_around() -> None:
    given, topology = [Gradient("long", (25, 20), "float32")], Topology(2, 1)
    cut, whole = (
        make_plan(
            given,
            {"*": Scheme("allgather", "exact", 0.1, dense_below=0)},
            topology,
            "sum",
            largest=largest,
        )
        for largest in (100, 10**6)
    )
    dense = make_plan(given, {"*": Scheme()}, topology, "sum")
    assert len(cut.buckets) == 5

    def work(comm: Comm) -> float:
        value = tf.constant(
            np.random.default_rng(comm.rank).integers(1, 99, (25, 20)).astype(np.float32)
        )
        sent, residuals = 0.0, {}
        for plan in (cut, whole, cut, dense):
            running = PlanExecutor(plan, comm)
            running.load(GradientState(residuals))
            sent += float(tf.reduce_sum(running.exchange({"long": value})["long"]))
            residuals = running.export().residuals
        assert not residuals
        return sent

    total = 4 * sum(
        np.random.default_rng(rank).integers(1, 99, (25, 20)).sum() for rank in range(2)
    )
    assert ThreadComm.run(topology, work) == [total, total]

"""HiTopKComm against Algorithm 2 of its paper in NumPy, with residuals over two steps."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import tensorflow as tf

from tfcommx.collectives.comm import Comm
from tfcommx.collectives.threads import ThreadComm
from tfcommx.core import Plan, Scheme, Topology
from tfcommx.planner.plan import Gradient, make_plan
from tfcommx.routes.hitopk import LAST_STEPS, HitopkOptions
from tfcommx.runtime.executor import PlanExecutor

SHAPE = (50, 48)


def gradient_of(rank: int, step: int) -> np.ndarray:
    """Return integers over 64, whose sums are exact; a few magnitudes are equal."""
    numbers = np.random.default_rng([rank, step]).integers(-9999, 10_000, SHAPE)
    return (numbers / 64).astype(np.float32)


def algorithm_2(gradients: np.ndarray, residuals: np.ndarray, k: int) -> np.ndarray:
    """Return the sum over m nodes of the k largest entries of each of n shards of a node's sum.

    Args:
        gradients: float32 [m, n, d].
        residuals: float32 [m, d], which the entries that are not sent replace.
    """
    nodes, slots, size = gradients.shape
    total = np.zeros(size, np.float32)
    for node in range(nodes):
        summed = gradients[node].sum(axis=0) + residuals[node]
        for slot in range(slots):
            start, stop = slot * size // slots, (slot + 1) * size // slots
            # The first of equal magnitudes, as rule `exact` chooses
            largest = start + np.argsort(-np.abs(summed[start:stop]), kind="stable")[:k]
            total[largest] += summed[largest]
            summed[largest] = 0
        residuals[node] = summed
    return total


def exchanged(plan: Plan) -> list[list[np.ndarray]]:
    """Return the sums of two steps on each rank."""

    def work(comm: Comm) -> list[np.ndarray]:
        running = PlanExecutor(plan, comm)
        return [
            running.exchange({"w": tf.constant(gradient_of(comm.rank, step))})["w"].numpy()
            for step in range(2)
        ]

    return ThreadComm.run(plan.topology, work)


@pytest.mark.parametrize("last_step", LAST_STEPS)
@pytest.mark.parametrize("topology", [Topology(3, 4), Topology(2, 2), Topology(4, 1)])
def test_it_is_algorithm_2(topology: Topology, last_step: str) -> None:
    scheme = Scheme("hitopk", "exact", density=0.05)
    plan = make_plan([Gradient("w", SHAPE, "float32")], {"*": scheme}, topology, "sum")
    (bucket,) = plan.buckets
    assert bucket.k == 0.05 * 2400 / topology.slots
    bucket = dataclasses.replace(bucket, options=HitopkOptions(last_step))
    found = exchanged(dataclasses.replace(plan, buckets=(bucket,)))
    residuals = np.zeros((topology.nodes, 2400), np.float32)
    for step in range(2):
        flat = [gradient_of(rank, step).ravel() for rank in range(topology.size)]
        gradients = np.reshape(flat, (topology.nodes, topology.slots, 2400))
        expected = algorithm_2(gradients, residuals, bucket.selected).reshape(SHAPE)
        for totals in found:
            np.testing.assert_array_equal(totals[step], expected)


def test_with_one_rank_a_node_it_is_the_flat_all_gather() -> None:
    """NaiveAG in the paper."""
    plans = [
        make_plan(
            [Gradient("w", SHAPE, "float32")],
            {"*": Scheme(route, "exact", density=0.05)},
            Topology(3, 1),
            "sum",
        )
        for route in ("hitopk", "allgather")
    ]
    one, other = map(exchanged, plans)
    np.testing.assert_array_equal(one, other)

"""Strategies: updates of the root alone, and broadcasts from time to time."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from laws_helpers import (
    ROUNDED,
    RULES,
    SCHEMES,
    SHAPES,
    every_topology,
    gradients,
    plan_for,
    scheme,
    with_topologies,
)

from tfcommx import routes
from tfcommx.collectives.comm import Comm
from tfcommx.collectives.threads import ThreadComm
from tfcommx.core import Plan, Scheme, Topology, cost
from tfcommx.planner.plan import Gradient, make_plan
from tfcommx.routes.messages import MessageRoute
from tfcommx.runtime.executor import PlanExecutor
from tfcommx.strategies import Rebroadcast, Root, Strategy, Synchronous, Update

SYNCHRONOUS = Synchronous()
# Strategies do not see which rule selects
OTHER_RULES = [one for one in SCHEMES if one.selection not in ("all", RULES[0])]
ON_ALL_ROUTES = [one for one in SCHEMES if one not in OTHER_RULES]


def train(
    plan: Plan, steps: int, drift: int = -1, strategy: Strategy = SYNCHRONOUS
) -> list[list[dict[str, np.ndarray]]]:
    """Take steps of momentum on every rank; return the weights by rank and step.

    After step `drift` each rank adds its number to its weights.
    """

    def work(comm: Comm) -> list[dict[str, np.ndarray]]:
        run, log = strategy.start(PlanExecutor(plan, comm)), []
        weights = {path: tf.Variable(tf.ones(shape)) for path, shape in SHAPES.items()}
        momentum = {path: tf.zeros(shape) for path, shape in SHAPES.items()}
        for step in range(steps):
            result = run.exchange(
                {path: tf.constant(value) for path, value in gradients(comm.rank, step).items()}
            )

            def apply(result: dict[str, tf.Tensor] = result) -> None:
                for path in SHAPES:
                    momentum[path] = 0.5 * momentum[path] + result[path]
                    weights[path].assign_sub(0.1 * momentum[path])

            run.update(Update(apply, list(result.values()), weights))
            for path in SHAPES if step == drift else ():
                weights[path].assign_add(tf.fill(SHAPES[path], float(comm.rank)))
            log.append({path: variable.numpy() for path, variable in weights.items()})
        return log

    return ThreadComm.run(plan.topology, work)


@with_topologies(ON_ALL_ROUTES + ROUNDED, Topology(1, 2), OTHER_RULES)
def test_a_root_that_updates_alone_gives_all_ranks_the_same_weights(
    scheme: Scheme, topology: Topology
) -> None:
    """Algorithm 2: the bits of an update on all ranks, also after weights have moved apart."""
    plain = train(plan_for(scheme, topology), steps=3)
    plan = plan_for(scheme, topology, reduce_to_root=True)
    for log in train(plan, steps=3, drift=1, strategy=Root()):
        for step in (0, 2):
            for path in SHAPES:
                assert log[step][path].tobytes() == plain[0][step][path].tobytes()


@with_topologies(ON_ALL_ROUTES, Topology(2, 2), OTHER_RULES + ROUNDED)
def test_weights_that_moved_apart_come_together_at_the_next_broadcast(
    scheme: Scheme, topology: Topology
) -> None:
    """Algorithm 3, a broadcast every 2 steps: apart after step 1, together again after step 3."""
    plain = train(plan_for(scheme, topology), steps=5)
    for rank, log in enumerate(
        train(plan_for(scheme, topology), steps=5, drift=1, strategy=Rebroadcast(every=2))
    ):
        for path in SHAPES:
            assert log[0][path].tobytes() == plain[0][0][path].tobytes()
            np.testing.assert_allclose(log[2][path], plain[0][2][path] + rank, rtol=1e-5, atol=1e-4)
            assert log[3][path].tobytes() == plain[0][3][path].tobytes()
            assert log[4][path].tobytes() == plain[0][4][path].tobytes()


@every_topology
@pytest.mark.parametrize("route", routes.ROUTES)
def test_bytes_of_a_step_that_the_root_updates(route: str, topology: Topology) -> None:
    plan = plan_for(scheme(route), topology, reduce_to_root=True)

    def work(comm: Comm) -> Any:
        run = Root().start(PlanExecutor(plan, comm))
        result = run.exchange(
            {path: tf.constant(value) for path, value in gradients(comm.rank, 0).items()}
        )
        weights = {path: tf.Variable(tf.ones(shape)) for path, shape in SHAPES.items()}
        run.update(Update(lambda: None, list(result.values()), weights))
        return comm.traffic()

    expected = np.zeros(2)
    for bucket in plan.buckets:
        chosen = routes.get(bucket.route)
        expected += chosen.wire_bytes(bucket, topology)
        expected += (
            chosen._traffic("broadcast", bucket, topology)
            if isinstance(chosen, MessageRoute)
            else cost.broadcast_traffic(bucket.padded_bytes, topology)
        )
    np.testing.assert_allclose(
        np.mean(ThreadComm.run(topology, work), axis=0), expected, rtol=1e-12
    )


def test_variables_without_entries_make_no_collective() -> None:
    """By Root with accumulation rank 1's graph lacked it, and rank 0 waited for rank 1 forever."""
    gradient = Gradient("none", (0, 4), "float32")
    plan = make_plan([gradient], {"*": Scheme()}, Topology(2, 1), reduce_to_root=True)

    def work(comm: Any) -> tuple[Any, Any]:
        running = PlanExecutor(plan, comm)
        before, none = dict(comm._turns), tf.zeros(gradient.shape)
        run = Root().start(running)
        result = run.exchange({"none": none})
        run.update(Update(lambda: None, [], {"none": tf.Variable(none)}))
        assert result["none"].shape == gradient.shape
        return before, comm._turns

    for before, after in ThreadComm.run(Topology(2, 1), work):
        assert before == after

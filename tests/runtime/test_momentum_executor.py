"""MomentumExecutor: the gradients that a bucket of momenta waits for, and when it is sent."""

from __future__ import annotations

import numpy as np
import tensorflow as tf

from tfcommx.collectives.comm import Comm
from tfcommx.collectives.threads import ThreadComm
from tfcommx.core import Plan, Scheme, Topology
from tfcommx.planner.automatic import PlanRequest
from tfcommx.planner.plan import Gradient
from tfcommx.runtime.executor import PlanExecutor
from tfcommx.runtime.phased import LearningPhase, MomentumExecutor

NAMES = ("first", "second", "third")


def before(operation: tf.Operation) -> set[tf.Operation]:
    """Return all operations that must run before this one."""
    found: set[tf.Operation] = set()
    waiting = [operation]
    while waiting:
        one = waiting.pop()
        sources = {*(tensor.op for tensor in one.inputs), *one.control_inputs}
        waiting += sources - found
        found |= sources
    return found


def plan_of_momenta(comm: Comm) -> Plan:
    """Return a plan with a bucket of one bit for each variable."""
    gradients = [Gradient(name, (64, 64), "float32") for name in NAMES]
    scheme = Scheme("asa", wire="int1", merging="each")
    return PlanRequest(gradients, comm.topology).plan({"*": scheme})


def test_a_bucket_waits_for_no_gradient_of_another() -> None:
    """So it travels while the backward pass computes the others."""

    def work(comm: Comm) -> list[set[str]]:
        momenta = plan_of_momenta(comm)
        frozen_at = tf.Variable(0, dtype=tf.int64)
        executor = MomentumExecutor(momenta, None, LearningPhase("int4", frozen_at), comm)

        @tf.function
        def step(*parts: tf.Tensor) -> dict[str, tf.Tensor]:
            return executor.exchange(dict(zip(NAMES, parts, strict=True)))

        graph = step.get_concrete_function(*3 * [tf.TensorSpec([64, 64])]).graph
        given = {tensor.op: number for number, tensor in enumerate(graph.inputs)}
        exchanges = [one for one in graph.get_operations() if one.type == "If"]
        return [
            {NAMES[given[one]] for one in before(exchange) if given.get(one, 9) < len(NAMES)}
            for exchange in exchanges
        ]

    for waits in ThreadComm.run(Topology(2, 1), work):
        assert sorted(map(sorted, waits)) == [["first"], ["second"], ["third"]]


def test_momenta_are_sent_as_soon_as_the_moments_are_frozen() -> None:
    """Also if that is the first step. They are sent in one bit, gradients in four."""

    def work(comm: Comm) -> None:
        momenta = plan_of_momenta(comm)
        given = {name: tf.random.stateless_normal([64, 64], [comm.rank, 1]) for name in NAMES}
        in_one_bit = PlanExecutor(momenta, comm).exchange(given)["first"]
        for frozen_at in (0, 1):
            learning = LearningPhase("int4", tf.Variable(frozen_at, dtype=tf.int64))
            executor = MomentumExecutor(momenta, None, learning, comm)
            sent = executor.exchange(given)["first"]
            assert np.array_equal(sent, in_one_bit) == (frozen_at > 0)
            assert executor.steps_taken() == 1
            assert executor.dense_bytes_between_nodes() == 4 * 3 * 64 * 64
            executor.clear({"second"})
            assert executor.export().residuals.keys() == {"first", "third"}

    ThreadComm.run(Topology(2, 1), work)

"""MomentumExecutor: the gradients that a bucket of momenta waits for."""

from __future__ import annotations

import tensorflow as tf

from tfcommx.collectives.comm import Comm
from tfcommx.collectives.threads import ThreadComm
from tfcommx.core import Scheme, Topology
from tfcommx.planner.automatic import PlanRequest
from tfcommx.planner.plan import Gradient
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


def test_a_bucket_waits_for_no_gradient_of_another() -> None:
    """So it travels while the backward pass computes the others."""

    def work(comm: Comm) -> list[set[str]]:
        gradients = [Gradient(name, (64, 64), "float32") for name in NAMES]
        scheme = Scheme("asa", wire="int1", merging="each")
        momenta = PlanRequest(gradients, comm.topology).plan({"*": scheme})
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

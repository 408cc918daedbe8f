"""The steps of our optimizers keep everything large on a GPU."""

from __future__ import annotations

from typing import Any

import keras
import pytest
import tensorflow as tf
from drawing import case
from gpu_placement import by_the_host, without_gpu_kernel

import tfcommx as cx
from tfcommx.collectives.comm import Comm


@pytest.mark.parametrize(
    "kind",
    [
        case(kind, kept=kind in ("LowBitLARS", "OneBitAdam"))
        for kind in ("LowBitLARS", "LowBitSGD", "OneBitAdam", "OneBitLAMB", "LARS", "LAMB")
    ],
)
def test_nothing_large_would_leave_a_gpu_in_a_step(comm: Comm, kind: str) -> None:
    """On a GPU LowBitLARS copied its random numbers to the host, 4 bytes for each weight."""
    options: dict[str, Any] = {"dense_below": 8} if "Bit" in kind else {}
    optimizer = cx.DistributedOptimizer(getattr(cx.optimizers, kind)(0.1, **options))
    variable = keras.Variable(tf.ones([64, 64]))
    optimizer.build([variable])

    @tf.function(autograph=False)
    def step(gradient: tf.Tensor) -> None:
        optimizer.apply([gradient], [variable])

    graph = step.get_concrete_function(tf.TensorSpec([64, 64])).graph
    assert not by_the_host(graph)
    # The guard's message, where replicas differ
    assert without_gpu_kernel(graph) <= {"PyFunc"}

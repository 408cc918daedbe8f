"""Optimizers that send momenta where the learning rate jumps, as at warm restarts."""

from __future__ import annotations

import math

import keras
import numpy as np
import pytest
import tensorflow as tf
from sent_momenta import gradients, new_weights, wrap

import tfcommx as cx
from tfcommx.collectives.comm import Comm
from tfcommx.collectives.threads import ThreadComm
from tfcommx.core import Scheme, Topology

STEPS, RATE = 30, 0.05


@pytest.mark.extended
@pytest.mark.parametrize(
    ("low_bit", "plain"),
    [
        (cx.optimizers.LowBitSGD, keras.optimizers.SGD),
        (cx.optimizers.LowBitLARS, cx.optimizers.LARS),
    ],
)
def test_the_first_step_of_another_cycle_is_no_longer_than_that_of_the_mean_gradient(
    low_bit: type, plain: type
) -> None:
    """Of CosineDecayRestarts, it was a hundred times as long with LowBitSGD.

    At a cycle's end the rate is much smaller than that of the steps that the momentum has summed
    up, so residuals of momentum over rate are as large as hundreds of gradients.
    """

    def length(kind: type, scheme: Scheme) -> float:
        def work(comm: Comm) -> float:
            optimizer, weights = wrap(kind(RATE, 0.9), comm, scheme), new_weights()[:1]
            for step in range(STEPS + 1):
                share = 0.5 * (1 + math.cos(math.pi * (step % STEPS) / STEPS))
                optimizer.learning_rate = RATE * share
                before = weights[0].numpy()
                optimizer.apply([tf.constant(gradients(comm.rank, step)[0])], weights)
            return float(np.linalg.norm(weights[0].numpy() - before))

        return ThreadComm.run(Topology(2, 1), work)[0]

    expected = length(plain, Scheme())
    assert length(low_bit, Scheme("asa", wire="int2")) < 2 * expected

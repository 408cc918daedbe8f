"""The rank whose state all others get, named in a way in which it cannot be meant."""

from __future__ import annotations

import keras
import numpy as np
import pytest

import tfcommx as cx
from tfcommx.collectives.comm import Comm


@pytest.mark.parametrize(
    "wrong", [pytest.param("none of the ranks", marks=pytest.mark.one_rank), "its own"]
)
def test_a_root_that_no_rank_can_be_is_refused_before_anything_is_sent(
    comm: Comm, wrong: str
) -> None:
    """The first was an IndexError, the second an error of Horovod in the midst of the broadcast."""
    if wrong == "its own" and comm.topology.size == 1:
        return
    root = comm.rank if wrong == "its own" else comm.topology.size
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile(cx.DistributedOptimizer(keras.optimizers.SGD(0.1)), "mse", jit_compile=False)
    with pytest.raises(cx.ConfigurationError, match="`root`"):
        model.fit(
            np.ones((4, 2)), np.ones(4), verbose=0, callbacks=[cx.callbacks.BroadcastState(root)]
        )
    with pytest.raises(cx.ConfigurationError, match="`root`"):
        cx.broadcast_variables(model.weights, root)

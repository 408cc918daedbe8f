"""Uses of Keras around the training loop, wrapped, on ranks."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
from drawing import case, extended
from training_kinds import KINDS, Trainer, Weights, require_conservation

import tfcommx as cx
from tfcommx.collectives.comm import Comm

# In `make test`; others differ from them only in their gradients
KEPT = {
    "plain": ("odd_variables",),
    "sparse": ("many_layers", "two_optimizers_of_one_layer"),
    "momentum": ("gradients_that_are_none_at_times",),
}


def trained(name: str, trainer: Trainer) -> Weights:
    """Return the weights of one kind after each step."""
    with warnings.catch_warnings():  # Keras warns of variables without gradients
        warnings.simplefilter("ignore")
        return KINDS[name].train(trainer)


@pytest.mark.parametrize(
    ("scheme", "name"),
    [
        extended(scheme, name)
        if name in KEPT[scheme][1:]
        else case(scheme, name, kept=name in KEPT[scheme])
        for scheme in KEPT
        for name in KINDS
    ],
)
def test_ranks_agree_after_each_step_and_lose_nothing(comm: Comm, scheme: str, name: str) -> None:
    trainer, tolerance = Trainer(comm, scheme), KINDS[name].tolerance
    rows = trained(name, trainer)
    assert any(map(np.any, map(np.not_equal, rows[0], rows[-1])))
    for number, everyone in enumerate(
        comm.gather_objects([value.tobytes() for value in row]) for row in rows
    ):
        assert all(weights == everyone[0] for weights in everyone), f"after step {number + 1}"
    narrow = tolerance is not None and tolerance > 1e-3
    require_conservation(comm, trainer.ledgers, 1e-2 if narrow else 1e-5)
    if scheme != "plain" or tolerance is None:
        return
    with cx.allow_plain_optimizers():
        expected = trained(name, Trainer(comm, scheme, joint=True))
    for number, (row, other) in enumerate(zip(rows, expected, strict=True)):
        for value, reference in zip(row, other, strict=True):
            close = np.allclose(
                value.astype("float64"), reference.astype("float64"), rtol=tolerance, atol=tolerance
            )
            assert close, f"after step {number + 1}"

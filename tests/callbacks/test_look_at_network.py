"""ChooseAgain measures messages between nodes, so on one node it measures nothing."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from tfcommx import callbacks
from tfcommx.callbacks import choose_again
from tfcommx.core import Topology
from tfcommx.optim.automatic import ExpectedRun


@pytest.mark.parametrize(("nodes", "measured"), [(1, 0), (2, 1)])
def test_messages_are_measured_between_nodes_only(
    nodes: int, measured: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On one machine `auto` said twice that the network had changed."""
    requested = SimpleNamespace(is_chosen=True, expected_run=ExpectedRun())
    comm = SimpleNamespace(topology=Topology(nodes, 2), gather_objects=lambda mine: [mine])
    calls: list[SimpleNamespace] = []
    replaced = {
        "wrapped_optimizers": lambda model: [None],
        "exchanger_in": lambda optimizer: SimpleNamespace(requested=requested, runs={}),
        "steps_of": lambda optimizer: 0,
        "fastest_message": lambda comm: calls.append(comm) or 0.002,
    }
    for name, value in replaced.items():
        monkeypatch.setattr(choose_again, name, value)
    monkeypatch.setattr(choose_again.process, "current", lambda: comm)
    chooses = callbacks.ChooseAgain()
    chooses.set_model(None)
    chooses.on_train_begin()
    chooses._look(1.0)
    assert calls == [comm] * measured

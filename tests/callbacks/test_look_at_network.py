"""ChooseAgain measures messages between nodes: on one node none, after a change three in a row.

A plan that sends few bytes hides a faster network: its steps take as long.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from tfcommx import callbacks
from tfcommx.callbacks import choose_again
from tfcommx.core import Topology
from tfcommx.optim.automatic import ExpectedRun


class Run:
    """A running plan of one bucket."""

    def __init__(self, keeps_residual: bool) -> None:
        plan = SimpleNamespace(buckets=[SimpleNamespace(keeps_residual=keeps_residual)])
        self.executor = SimpleNamespace(plans=[plan])


class Network:
    """A network, and ChooseAgain on it: seconds of a message, and of the measurement of one."""

    def __init__(
        self, nodes: int, monkeypatch: pytest.MonkeyPatch, keeps_residual: bool = False
    ) -> None:
        self.message, self.measuring, self.time = 0.002, 0.1, 0.0
        self.measured: list[SimpleNamespace] = []
        self.said: list[str] = []
        self.comm = SimpleNamespace(topology=Topology(nodes, 2), gather_objects=lambda mine: [mine])
        requested = SimpleNamespace(is_chosen=True, expected_run=ExpectedRun(), schemes={})
        exchanger = SimpleNamespace(
            requested=requested, runs={"w": Run(keeps_residual)}, switch=lambda schemes: None
        )
        replaced = {
            "wrapped_optimizers": lambda model: [None],
            "exchanger_in": lambda optimizer: exchanger,
            "steps_of": lambda optimizer: 0,
            "fastest_message": self.fastest_message,
            "time": SimpleNamespace(perf_counter=lambda: self.time),
            "announce": lambda comm, text: self.said.append(text),
            "links_of": lambda comm, again: None,
            "trace_again": lambda model: None,
        }
        for name, value in replaced.items():
            monkeypatch.setattr(choose_again, name, value)
        monkeypatch.setattr(choose_again.process, "current", lambda: self.comm)
        self.chooses = callbacks.ChooseAgain()
        self.chooses.set_model(None)
        self.chooses.on_train_begin()

    def fastest_message(self, comm: SimpleNamespace) -> float:
        self.measured.append(comm)
        self.time += self.measuring
        return self.message

    def look(self, *means: float) -> None:
        for mean in means:
            self.chooses._look(mean)


@pytest.mark.parametrize(("nodes", "measured"), [(1, 0), (2, 1)])
def test_messages_are_measured_between_nodes_only(
    nodes: int, measured: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On one machine `auto` said twice that the network had changed."""
    network = Network(nodes, monkeypatch)
    network.look(1.0, 1.0)
    assert network.measured == [network.comm] * measured


def test_a_change_is_confirmed_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """At 20 Mbit/s a measurement takes 4 s, so three of them took 6 minutes of slow steps."""
    network = Network(2, monkeypatch)
    network.look(0.02, 0.02, 0.02)
    network.message, network.measuring = 0.1, 4.0
    network.look(0.2, 0.2)
    assert not network.said
    network.look(0.2, 0.2)
    assert len(network.said) == 1 and "chosen again" in network.said[0]
    # Another cause of slower steps is looked for in 2 % of the time only
    times = len(network.measured)
    network.look(0.02, 0.5, 0.5, 0.5)
    assert len(network.measured) == times


@pytest.mark.parametrize("hides", [True, False])
def test_a_faster_network_is_noticed_though_steps_take_as_long(
    hides: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A selection stayed when the network became 1000 times faster, 15 % slower than Horovod."""
    network = Network(2, monkeypatch, keeps_residual=hides)
    network.look(*[0.2] * 8)
    assert (len(network.measured) > choose_again.USUAL_MESSAGES) == hides
    network.message = 0.004  # Slower messages do not matter where steps are not
    network.look(*[0.2] * 4)
    assert not network.said
    network.message = 0.0005
    network.look(*[0.2] * 6)
    assert len(network.said) == hides

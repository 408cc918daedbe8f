"""Where the ranks of a benchmark are: by options, and on a virtual cluster that is up."""

from __future__ import annotations

import sys
from typing import Any

import pytest
from launching import ROOT

sys.path.insert(0, str(ROOT / "scripts"))
from bench import ranks, virtual_cluster
from bench.registry import BENCHMARKS


def places(*words: str) -> list[ranks.Place]:
    return ranks.places(ranks.parser().parse_args(words), BENCHMARKS["routes"])


def test_a_cluster_that_is_up_has_its_own_nodes_and_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    """A record's note named 4 nodes of 2 at 200mbit, whatever cluster was up."""

    def state(name: str) -> dict[str, Any]:
        return {"nodes": 3, "slots": 1, "rate": "66mbit", "rate_mbit": 66.0}

    monkeypatch.setattr(virtual_cluster, "state", state)
    (place,) = places("--cluster", "mine")
    assert [host.name for host in place.hosts] == ["node0", "node1", "node2"] and place.size == 3
    assert "3 nodes of 1" in place.note() and "66mbit" in place.note()
    for option in ("--nodes", "--slots", "--rate"):
        with pytest.raises(SystemExit, match=option):
            places("--cluster", "mine", option, "2")


def test_a_cluster_that_is_not_up_is_refused() -> None:
    with pytest.raises(SystemExit, match="'absent'"):
        places("--cluster", "absent")


def test_each_number_of_nodes_has_a_launch_at_each_rate() -> None:
    found = places("--nodes", "2", "4", "--rates", "none", "50mbit")
    assert [(place.size, place.cluster and place.cluster.rate) for place in found] == [
        (4, None), (4, "50mbit"), (8, None), (8, "50mbit"),
    ]  # fmt: skip

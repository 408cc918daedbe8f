"""Requests that differ between ranks are refused on all of them, before anything is exchanged."""

from __future__ import annotations

import re
from typing import Any

import pytest

from tfcommx.collectives.comm import Comm
from tfcommx.collectives.threads import ThreadComm
from tfcommx.core import NOMINAL, Link, PlanError, Profile, Scheme, Topology, VariableProfile
from tfcommx.optim.automatic import ExpectedRun, executor_for
from tfcommx.planner.automatic import PlanRequest
from tfcommx.planner.plan import Gradient
from tfcommx.strategies import Synchronous

LAYER = Gradient("layer/kernel", (8, 8), "float32")


def profile(seconds: float) -> Profile:
    row = VariableProfile(LAYER.path, LAYER.shape, ready_s=seconds)
    return Profile("one layer", (row,), seconds / 2, seconds, batch=32)


@pytest.mark.parametrize(
    ("what", "ones", "others"),
    [
        ("scheme", {}, {"schemes": {"*": Scheme("auto", bucket_bytes=2**20)}}),
        ("links", {}, {"links": NOMINAL}),
        ("links", {"links": NOMINAL}, {"links": NOMINAL._replace(inside=Link(1.0, 1.0))}),
        ("profile", {"profile": profile(1.0)}, {"profile": profile(1.5)}),
    ],
)
def test_the_difference_is_named(what: str, ones: dict[str, Any], others: dict[str, Any]) -> None:
    def work(comm: Comm) -> str:
        mine = {"schemes": {"*": Scheme("auto")}, "links": None, "profile": None}
        mine |= others if comm.rank == 2 else ones
        asked = PlanRequest([LAYER], comm.topology, "average", mine["links"], mine["profile"])
        with pytest.raises(PlanError) as refused:
            executor_for(mine["schemes"], asked, comm, Synchronous(), ExpectedRun())
        return str(refused.value)

    for said in ThreadComm.run(Topology(3, 1), work):
        assert re.search(rf"(?s)`{what}`.*[Rr]ank 0\b.*rank 2\b", said), said


def test_equal_requests_pass() -> None:
    def work(comm: Comm) -> int:
        asked = PlanRequest([LAYER], comm.topology, "average", NOMINAL, profile(1.0))
        plan = executor_for({"*": Scheme()}, asked, comm, Synchronous(), ExpectedRun()).plan
        return len(plan.buckets)

    assert ThreadComm.run(Topology(3, 1), work) == [1] * 3

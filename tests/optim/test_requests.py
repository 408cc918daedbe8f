"""Requests that differ between ranks are refused on all of them, before anything is exchanged."""

from __future__ import annotations

import re
from typing import Any

import pytest

from tfcommx.collectives.comm import Comm
from tfcommx.collectives.threads import ThreadComm
from tfcommx.core import NOMINAL, Link, PlanError, Profile, Scheme, Topology, VariableProfile
from tfcommx.runtime.executor import agree_on_settings
from tfcommx.strategies import Root, Synchronous


def profile(seconds: float) -> Profile:
    row = VariableProfile("layer/kernel", (8, 8), ready_s=seconds)
    return Profile("one layer", (row,), seconds / 2, seconds, batch=32)


@pytest.mark.parametrize(
    ("what", "ones", "others"),
    [
        ("strategy", {}, {"strategy": Root()}),
        ("scheme", {}, {"scheme": {"*": Scheme("auto", bucket_bytes=2**20)}}),
        ("links", {}, {"links": NOMINAL}),
        ("links", {"links": NOMINAL}, {"links": NOMINAL._replace(inside=Link(1.0, 1.0))}),
        ("profile", {"profile": profile(1.0)}, {"profile": profile(1.5)}),
    ],
)
def test_the_difference_is_named(what: str, ones: dict[str, Any], others: dict[str, Any]) -> None:
    def work(comm: Comm) -> str:
        mine = {"strategy": Synchronous(), "scheme": {"*": Scheme("auto")}}
        mine |= {"links": None, "profile": None} | (others if comm.rank == 2 else ones)
        with pytest.raises(PlanError) as refused:
            agree_on_settings(comm, **mine)
        return str(refused.value)

    for said in ThreadComm.run(Topology(3, 1), work):
        assert re.search(rf"(?s)`{what}`.*[Rr]ank 0\b.*rank 2\b", said), said


def test_equal_requests_pass() -> None:
    def work(comm: Comm) -> None:
        agree_on_settings(comm, scheme={"*": Scheme()}, links=NOMINAL, profile=profile(1.0))

    assert ThreadComm.run(Topology(3, 1), work) == [None] * 3

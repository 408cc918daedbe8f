"""A selection that sends more bytes than a low-bit sum would is named in the log, once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import keras
import pytest

from tfcommx.collectives.comm import Comm
from tfcommx.collectives.threads import ThreadComm
from tfcommx.core import Link, Links, Scheme, Topology
from tfcommx.keras_internals.names import VariableNames
from tfcommx.optim.automatic import ExpectedRun
from tfcommx.optim.requested_plan import ExchangeSettings, RequestedPlan
from tfcommx.planner.plan import Gradient, make_plan
from tfcommx.strategies import strategy_of

FOUR = Topology(4, 1)
# 40 % of plain Horovod's bytes on four nodes
HEAVY = Scheme("allgather", "mstopk", 0.1, wire="pair32")
LIGHT = Scheme("allgather", "mstopk", 0.01, wire="elias/int4")
SLOW = Links(Link(1e-6, 1e-7), Link(1e-6, 1e-7))
KERNEL = Gradient("kernel", (300, 300), "float32")


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TFCOMMX_CACHE", str(tmp_path / "kept"))


def advice(caplog: pytest.LogCaptureFixture, *schemes: Scheme, **settings: Any) -> list[str]:
    """Return the advice to an optimizer that exchanges by these schemes, one after the other."""

    def work(comm: Comm) -> None:
        variable = keras.Variable(keras.ops.zeros(KERNEL.shape), name=KERNEL.path)
        known = ExchangeSettings(links=SLOW, **settings)
        requested = RequestedPlan(comm, schemes[0], known, VariableNames())
        requested.expected_run = ExpectedRun(399)  # "auto" takes the best prediction at once
        for number, scheme in enumerate(schemes):
            if number:
                requested.replace(scheme)
            requested.executor_of([variable])

    ThreadComm.run(FOUR, work)
    return [one for one in caplog.messages if "OneBitAdam" in one]


def test_it_is_said_once_and_by_rank_0(caplog: pytest.LogCaptureFixture) -> None:
    (said,) = advice(caplog, LIGHT, HEAVY, Scheme("allreduce"), HEAVY)
    assert "40 %" in said and "Scheme('asa', wire='int4')" in said


def test_a_plan_that_was_given_counts_as_named(caplog: pytest.LogCaptureFixture) -> None:
    assert advice(caplog, Scheme(), plan=make_plan([KERNEL], {"*": HEAVY}, FOUR))


@pytest.mark.parametrize(
    ("scheme", "settings"),
    [
        (LIGHT, {}),
        (Scheme("auto", "mstopk", 0.1, wire="pair32"), {}),
        (HEAVY, {"strategy": strategy_of("root")}),
    ],
    ids=["few bytes", "auto", "another strategy"],
)
def test_nothing_is_said(
    caplog: pytest.LogCaptureFixture, scheme: Scheme, settings: dict[str, Any]
) -> None:
    assert advice(caplog, scheme, **settings) == []

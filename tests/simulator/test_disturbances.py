"""A slow node and ports of varying rate: by hand, against drawn rates, and laws of all routes."""

from __future__ import annotations

import itertools
import random
import statistics
from collections.abc import Callable

import pytest

from tfcommx import routes
from tfcommx.core import (
    NOMINAL,
    Bucket,
    Calibration,
    EngineSettings,
    Link,
    Links,
    Plan,
    Profile,
    Scheme,
    Topology,
    VariableProfile,
)
from tfcommx.core.links import not_falling
from tfcommx.planner.predict import Prediction, Setting
from tfcommx.simulator.assumptions import IDEAL, Assumptions, disturbed_links, slowest_rate
from tfcommx.simulator.step import simulate

# 2 ranks: an allreduce of b bytes is 2 alpha + b beta = 2 + b
LINKS = Links(inside=Link(1, 1, 0), between=Link(1, 1, 0))
CLUSTER = Topology(4, 2)


def profile(update_s: float = 0.0) -> Profile:
    rows = [
        VariableProfile(name, (300, 100), ready_s=ready, update_s=update_s)
        for name, ready in (("a", 2e-3), ("b", 4e-3), ("c", 9e-3))
    ]
    return Profile("abc", tuple(rows), 1e-2, 1e-2, batch=6)


def by_hand(**disturbed: float) -> list[tuple[float, float]]:
    """Start and end of the two messages, of 8 and 4 bytes, and of the update."""
    rows = [
        VariableProfile(name, (1,), ready_s=ready, update_s=update)
        for name, ready, update in (("a", 2, 0), ("b", 4, 0), ("c", 9, 4))
    ]
    plan = Plan(
        tuple(
            Bucket(name, tuple(names), (1,) * len(names), "float32", "allreduce")
            for name, names in (("0", "ab"), ("1", "c"))
        ),
        Topology(2, 1),
    )
    of_abc = Profile("abc", tuple(rows), 10.0, 10.0, batch=6)
    timeline = simulate(plan, of_abc, LINKS, Assumptions(**disturbed))
    assert timeline.compute_s == 24
    kinds = ("message", "update")
    return [(span.start_s, span.end_s) for span in timeline.spans if span.kind in kinds]


def test_a_slow_node_and_a_slow_port_by_hand() -> None:
    assert by_hand() == [(14, 24), (24, 30), (30, 34)]
    # Gradients at 15 + 6 and 15 + 13.5, and an update of 6
    assert by_hand(slow_node=1.5) == [(21, 31), (31, 37), (37, 43)]
    # Messages of 2 + 16 and 2 + 8
    assert by_hand(slow_port=0.5) == [(14, 32), (32, 42), (42, 46)]
    # Half of the steps have a port below 1 - 0.8 sqrt(1/2) of its rate
    long = 2 + 8 / (1 - 0.8 * 0.5**0.5)
    assert by_hand(jitter=0.8)[0] == pytest.approx((14, 14 + long))


def test_the_slowest_node_is_another_one_if_ranks_differ_more() -> None:
    spread = Assumptions(spread=0.1, slow_node=1.01)
    assert spread.slowest_on(Topology(100, 1)) == spread.slowest(100) > 1.2
    assert Assumptions(spread=0.1, slow_node=2.0).slowest_on(CLUSTER) == 2 * spread.slowest(2)


@pytest.mark.parametrize("slow_port", [1.0, 0.8, 0.3])
@pytest.mark.parametrize("nodes", [1, 2, 7])
def test_quantiles_are_those_of_drawn_rates(nodes: int, slow_port: float) -> None:
    draw, assumed = random.Random(7), Assumptions(slow_port=slow_port, jitter=0.7)
    shares = [slow_port] + [1.0] * (nodes - 1)
    drawn = [min(share * (1 - 0.7 * draw.random()) for share in shares) for _ in range(20_000)]
    tenths = statistics.quantiles(drawn, n=10)
    for quantile in (0.1, 0.5, 0.9):
        expected = tenths[round(10 * (1 - quantile)) - 1]
        assert slowest_rate(nodes, assumed, quantile) == pytest.approx(expected, rel=0.02)


def test_steps_at_quantiles_are_quantiles_of_steps() -> None:
    """Steps with drawn rates of four ports."""
    assumed = Setting(profile(), CLUSTER, NOMINAL, Assumptions(jitter=0.7))
    found, draw, steps = assumed.predict(Scheme()), random.Random(3), []
    for _ in range(500):
        rate = min(1 - 0.7 * draw.random() for _ in range(CLUSTER.nodes))
        links = disturbed_links(NOMINAL, CLUSTER, Assumptions(slow_port=rate))
        steps.append(simulate(found.plan, assumed.profile, links).step_s)
    tenths = statistics.quantiles(steps, n=10)
    assert found.tenths == pytest.approx((tenths[0], tenths[8]), rel=0.02)
    assert found.step_s == pytest.approx(tenths[4], rel=0.02)
    assert found.interval.low < found.step_s < found.interval.high


def test_quantiles_hold_the_step_where_a_slower_port_ends_it_earlier() -> None:
    """With a cycle of 20 ms one step in ten took less than 80 ms, and one more than 61, not 81."""
    rows = tuple(
        VariableProfile(f"layer{number}", (rows, 100), ready_s=0.01 * (number + 1))
        for number, rows in enumerate([100, 100, 1000, 10, 100])
    )
    engine = EngineSettings("gloo", cycle_s=0.02)
    links = Links(Link(1e-5, 1e-10), Link(1e-4, 8e-9), fuses=True, engine=engine)
    measured = Profile("five layers", rows, 0.01, 0.05, batch=8)
    assumed = Setting(measured, Topology(2, 1), links, Assumptions(jitter=0.7))
    found = assumed.predict(Scheme(merging="each"))
    assert found.tenths is not None
    assert found.tenths.low < found.step_s == found.tenths.high


def test_without_disturbances_links_are_what_they_are() -> None:
    assert disturbed_links(NOMINAL, CLUSTER, IDEAL, 0.9) is NOMINAL
    alone = Assumptions(jitter=0.5, slow_port=0.5)
    assert disturbed_links(NOMINAL, Topology(1, 8), alone) is NOMINAL
    found = Setting(profile(), CLUSTER, NOMINAL).predict(Scheme())
    row = found.row()
    assert row["step_seconds_p10"] == row["step_seconds"] == row["step_seconds_p90"]
    assert found.timeline == simulate(found.plan, profile(), NOMINAL, IDEAL, quantile=0.9)


def test_what_the_probe_measured_of_collectives_grows_with_their_price() -> None:
    """Two ranks: b bytes take 2 + b at the full rate, and 2 + 2 b at half of it."""
    gathers = ((4.0, 10.0), (8.0, 20.0))
    measured = Calibration(2, not_falling([(4, 10.0), (8, 20.0)]), 2, gathers)
    links = LINKS._replace(calibration=measured)
    slower = disturbed_links(links, Topology(2, 1), Assumptions(slow_port=0.5))
    grown = not_falling([(4, 14.0), (8, 28.0)])
    assert slower.calibration == Calibration(2, grown, 2, grown)
    assert (slower.between.beta_s_per_byte, slower.inside) == (2, LINKS.inside)


def schemes() -> list[Scheme]:
    dense = [Scheme(name) for name in routes.DENSE]
    sparse = [Scheme(name, "mstopk", 0.1, dense_below=0) for name in routes.SPARSE]
    return [*dense, *sparse]


@pytest.mark.parametrize("engine", ["ring", "nccl", "gloo", "open_mpi"])
@pytest.mark.parametrize("scheme", schemes(), ids=lambda scheme: scheme.route)
@pytest.mark.parametrize(
    "of",
    [
        lambda share: {"slow_node": 1 + share},
        lambda share: {"slow_port": 1 - share},
        lambda share: {"jitter": share},
    ],
    ids=["slow_node", "slow_port", "jitter"],
)
def test_more_of_a_disturbance_never_gives_a_faster_step(
    of: Callable[[float], dict[str, float]], scheme: Scheme, engine: str
) -> None:
    links = NOMINAL._replace(engine=EngineSettings(engine))

    def predicted(share: float) -> Prediction:
        assumed = Assumptions(**of(share))
        return Setting(profile(1e-4), CLUSTER, links, assumed).predict(scheme)

    found = [predicted(0.1 * tenth) for tenth in range(10)]
    steps = [one.step_s for one in found]
    assert all(after >= step * (1 - 1e-12) for step, after in itertools.pairwise(steps))
    assert steps[0] < steps[-1] and found[0].step_s == predicted(0).step_s
    for one in found:
        low, high = one.tenths or (one.step_s, one.step_s)
        assert low <= one.step_s <= high

"""Simulated steps against timelines drawn by hand, and how long simulating takes."""

from __future__ import annotations

import time

import pytest

from tfcommx import routes
from tfcommx.core import (
    NOMINAL,
    Bucket,
    ConfigurationError,
    EngineSettings,
    Link,
    Links,
    Plan,
    PlanError,
    Profile,
    Scheme,
    Span,
    Topology,
    VariableProfile,
)
from tfcommx.planner.plan import Gradient, make_plan
from tfcommx.simulator import models
from tfcommx.simulator.assumptions import (
    Assumptions,
    interpolated_time,
    measured_time,
    sorting_time,
)
from tfcommx.simulator.step import simulate, stages_of

TWO = Topology(2, 1)
# 2 ranks: an allreduce of b bytes is 2 (alpha + b / 2 beta) = 2 + b
LINKS = Links(inside=Link(1, 1, 0), between=Link(1, 1, 0))


def row(name: str, ready: float, size: int = 1, **more: object) -> VariableProfile:
    return VariableProfile(name, (size,), ready_s=ready, **more)


def bucket(name: str, *variables: str, size: int = 1, **more: object) -> Bucket:
    more = {"route": "allreduce", **more}
    return Bucket(name, variables, (size,) * len(variables), "float32", **more)


PROFILE = Profile("abc", (row("a", 2), row("b", 4), row("c", 9)), 10.0, 10.0, batch=6)
AB_C = Plan((bucket("0", "a", "b"), bucket("1", "c")), TWO)


def found(plan: Plan, profile: Profile = PROFILE, **more: object) -> list[tuple[object, ...]]:
    """Return the spans outside compute, as (resource, kind, start, end, bucket)."""
    timeline = simulate(plan, profile, LINKS, Assumptions(**more))
    return [
        (span.resource, span.kind, span.start_s, span.end_s, span.bucket)
        for span in timeline.spans
        if span.kind not in ("forward", "backward")
    ]


def test_messages_overlap_the_backward_pass_and_follow_each_other() -> None:
    """Ready at 14 and 19, of 2 + 8 and 2 + 4 s."""
    assert found(AB_C) == [("between", "message", 14, 24, 0), ("between", "message", 24, 30, 1)]
    timeline = simulate(AB_C, PROFILE, LINKS)
    assert (timeline.step_s, timeline.compute_s, timeline.exposed_s) == (30, 20, 10)
    assert timeline.throughput == 2 * 6 / 30 and timeline.scaling_efficiency == 20 / 30


def test_a_bucket_waits_for_its_last_gradient() -> None:
    """In whatever order its variables are listed."""
    plan = Plan((bucket("0", "c", "a"), bucket("1", "b")), TWO)
    assert found(plan) == [("between", "message", 14, 20, 1), ("between", "message", 20, 30, 0)]


def test_selection_on_the_compute_stream_delays_what_follows() -> None:
    """3 s each: a at 12 to 15, then b's gradient until 17 and its selection until 20."""
    sparse = {"route": "allgather", "selection": "exact", "k": 1, "wire": "pair32"}
    plan = Plan(tuple(bucket(name, name, **sparse) for name in "abc"), TWO)
    assert found(plan, selection=lambda entries: 3.0) == [
        ("compute", "select", 12, 15, 0),
        ("between", "message", 15, 24, 0),
        ("compute", "select", 17, 20, 1),
        ("between", "message", 24, 33, 1),
        ("compute", "select", 25, 28, 2),
        ("between", "message", 33, 42, 2),
    ]
    assert found(plan, selection=lambda entries: 3.0, selection_on="beside") == [
        ("beside", "select", 12, 15, 0),
        ("beside", "select", 15, 18, 1),
        ("between", "message", 15, 24, 0),
        ("beside", "select", 19, 22, 2),
        ("between", "message", 24, 33, 1),
        ("between", "message", 33, 42, 2),
    ]


def test_stages_of_two_level_routes_use_both_ports() -> None:
    """HiTopKComm selects in the middle; the engine carries out one collective at a time."""
    plan = Plan(
        tuple(
            bucket(name, name, size=2, route="hitopk", selection="exact", k=1, wire="pair32",
                   options=routes.get("hitopk").options(Scheme(), LINKS))
            for name in "ab"
        ),
        Topology(2, 2),
    )  # fmt: skip
    profile = Profile("ab", (row("a", 0, 2), row("b", 0, 2)), 0.0, 1.0, batch=1)
    # Inside: 1 + 4; selection 2; between: 1 + 2 pairs of 8; inside: 1 + 4
    one = [("inside", 0, 5), ("compute", 5, 7), ("between", 10, 27), ("inside", 44, 49)]
    two = [("inside", 5, 10), ("compute", 10, 12), ("between", 27, 44), ("inside", 49, 54)]

    def of(number: int) -> list[tuple[object, ...]]:
        spans = found(plan, profile, selection=lambda entries: 2.0)
        return [(a, start, end) for a, _, start, end, bucket in spans if bucket == number]

    assert (of(0), of(1)) == (one, two)


def test_stages_add_up_to_the_price_of_every_route() -> None:
    gradients = [Gradient(f"layer{i}/kernel", (64, 130 + i), "float32") for i in range(3)]
    for name, route in routes.ROUTES.items():
        scheme = Scheme(name, "mstopk", 0.01) if name in routes.SPARSE else Scheme(name)
        for topology in (Topology(1, 4), Topology(4, 1), Topology(4, 2)):
            for bucket in make_plan(gradients, {"*": scheme}, topology).buckets:
                stages = route.stages(bucket, topology, NOMINAL)
                total = sum(stage.seconds for stage in stages)
                assert total == pytest.approx(route.seconds(bucket, topology, NOMINAL)), name
                selections = sum(stage.resource == "select" for stage in stages)
                assert selections == (name in routes.SPARSE), name


def test_stages_of_the_torus_by_hand() -> None:
    """16 bytes on 2 x 2: 1 + 8 inside; two shards of 8 share the port: 2 + 16; 1 + 8 inside."""
    torus = routes.get("torus")
    one = bucket("0", "a", size=4, route="torus", options=torus.options(Scheme(), LINKS))
    stages = torus.stages(one, Topology(2, 2), LINKS)
    assert stages == [("inside", 9), ("between", 18), ("inside", 9)]
    assert torus.seconds(one, Topology(2, 2), LINKS) == 36


def with_engine(**more: object) -> Links:
    return LINKS._replace(engine=EngineSettings(**more))


def test_an_engine_that_sleeps_looks_at_what_waits_once_a_cycle() -> None:
    """a and b are ready at 14, c at 19; looks at 0, 8, 16, ...; 10 s of ab end at 26, not before c.

    The engine has worked longer than a cycle and looks at once: c from 26 to 32.
    """
    timeline = simulate(AB_C, PROFILE, with_engine(cycle_s=8.0))
    sent = [(one.start_s, one.end_s) for one in timeline.spans if one.kind == "message"]
    assert sent == [(16, 26), (26, 32)]
    # A message that is shorter than a cycle: a from 20 to 26, then c waits for the look at 40
    timeline = simulate(AB_C, PROFILE, with_engine(cycle_s=20.0))
    sent = [(one.start_s, one.end_s) for one in timeline.spans if one.kind == "message"]
    assert sent == [(20, 30), (40, 46)]


def test_messages_of_one_negotiation_are_sent_in_one_cycle() -> None:
    """ab and c are ready at the look at 20, and do not fit one buffer: c follows ab at once."""
    assumed = Assumptions(fuses=True)
    timeline = simulate(AB_C, PROFILE, with_engine(cycle_s=20.0, fusion_bytes=0), assumed)
    sent = [(one.start_s, one.end_s) for one in timeline.spans if one.kind == "message"]
    assert sent == [(20, 30), (30, 36)]


def test_what_is_ready_later_is_not_fused_with_an_earlier_negotiation() -> None:
    """a and b wait at the look at 20 and do not fit one buffer; c, ready later, fits with b."""
    rows = (row("a", 2), row("b", 4), row("c", 18))
    profile = Profile("abc", rows, 10.0, 20.0, batch=6)
    plan = Plan(tuple(bucket(str(i), name) for i, name in enumerate("abc")), TWO)
    links, assumed = with_engine(cycle_s=20.0, fusion_bytes=4), Assumptions(fuses=True)
    sent = [one for one in simulate(plan, profile, links, assumed).spans if one.kind == "message"]
    assert [(one.start_s, one.end_s) for one in sent] == [(20, 26), (26, 32), (40, 46)]
    both = simulate(plan, profile, with_engine(cycle_s=20.0, fusion_bytes=8), assumed)
    sent = [one for one in both.spans if one.kind == "message"]
    assert [(one.start_s, one.end_s) for one in sent] == [(20, 30), (40, 46)]


def test_what_does_not_fit_the_fusion_buffer_waits() -> None:
    """a is sent from 12 to 18; b, c, d of 4 bytes wait; two fit 8 bytes, then the third follows."""
    rows = tuple(row(name, ready) for name, ready in zip("abcd", (2, 4, 5, 5), strict=True))
    profile = Profile("abcd", rows, 10.0, 10.0, batch=6)
    plan = Plan(tuple(bucket(str(i), name) for i, name in enumerate("abcd")), TWO)
    assumed = Assumptions(fuses=True)
    fused = simulate(plan, profile, with_engine(fusion_bytes=8), assumed)
    sent = [(one.start_s, one.end_s) for one in fused.spans if one.kind == "message"]
    assert sent == [(12, 18), (18, 28), (28, 34)]
    alone = simulate(plan, profile, with_engine(fusion_bytes=0), assumed)
    assert [one.end_s for one in alone.spans if one.kind == "message"] == [18, 24, 30, 36]


def test_allreduces_that_wait_together_are_fused_if_the_engine_does_so() -> None:
    """a is sent from 12 to 18, while b and c become ready: one message of 8 bytes follows."""
    rows = (row("a", 2), row("b", 4), row("c", 5), row("d", 5))
    profile = Profile("abcd", rows, 10.0, 10.0, batch=6)
    other = bucket("3", "d", route="asa")
    plan = Plan((*(bucket(str(place), name) for place, name in enumerate("abc")), other), TWO)
    with_d = stages_of(other, TWO, LINKS)[0].seconds
    assert found(plan, profile, fuses=True) == [
        ("between", "message", 12, 18, 0),
        ("between", "message", 18, 28, 1),
        ("between", "message", 28, 28 + with_d, 3),
    ]
    # Unset assumptions take the links' values; d is negotiated together with b and c
    links = LINKS._replace(fuses=True, engine_s=0.5)
    timeline = simulate(plan, profile, links, Assumptions())
    assert timeline.step_s == 28 + with_d + 2 * 0.5
    assert simulate(plan, profile, links, Assumptions(engine_s=0.0)).step_s == 28 + with_d
    assert [span[3] for span in found(plan, profile)] == [18, 24, 30, 30 + with_d]


def test_selected_entries_are_never_fused() -> None:
    """Also under an engine that fuses sums: such a plan could not be simulated."""
    sparse = {"route": "allgather", "selection": "mstopk", "k": 1, "wire": "pair32"}
    plan = Plan((bucket("0", "a", "b", **sparse), bucket("1", "c", **sparse)), TWO)
    sent = found(plan)
    assert found(plan, fuses=True) == sent and {span[4] for span in sent} == {0, 1}


def test_contention_slows_messages_while_the_backward_pass_runs() -> None:
    """From 14 to 20 at half speed: 3 of 10 s are done, 7 remain; then 6 s at full speed."""
    assert found(AB_C, contention=1.0) == [
        ("between", "message", 14, 27, 0),
        ("between", "message", 27, 33, 1),
    ]
    assert found(Plan((bucket("0", "a"), bucket("1", "b", "c")), TWO), contention=0.25)[0] == (
        ("between", "message", 12, 19.5, 0)
    )


def test_the_slowest_rank_holds_up_all() -> None:
    assumptions = Assumptions(spread=0.1)
    slowest = assumptions.slowest(2)
    timeline = simulate(AB_C, PROFILE, LINKS, assumptions)
    assert 1.05 < slowest < 1.06  # The mean of the larger of two normal numbers: 0.564
    assert timeline.spans[1].start_s == pytest.approx(10 * slowest)
    assert timeline.compute_s == 20
    assert Assumptions(spread=0.1).slowest(1000) == pytest.approx(1.324, abs=0.003)


def test_engine_loading_and_update() -> None:
    profile = Profile("abc", (*PROFILE.variables[:2], row("c", 9, update_s=4.0)), 10.0, 10.0, 6)
    timeline = simulate(AB_C, profile, LINKS, Assumptions(engine_s=0.5, loading_s=25.0))
    assert timeline.spans[-1] == Span("compute", "update", "update", 31, 35)
    assert timeline.compute_s == 24 and timeline.step_s == 35
    assert simulate(AB_C, profile, LINKS, Assumptions(loading_s=50.0)).step_s == 50


def test_messages_between_two_ranks_pay_and_wait_for_no_engine() -> None:
    """a and c by the pipeline, ready at 12 and 19: as without an engine, its cycle and fusion."""
    by_messages = {"route": "pipeline", "options": routes.get("pipeline").options(Scheme(), LINKS)}
    plan = Plan((bucket("0", "a", "b", **by_messages), bucket("1", "c", **by_messages)), TWO)
    alone = simulate(plan, PROFILE, LINKS)
    links = with_engine(cycle_s=20.0)._replace(engine_s=7.0)
    for fuses in (False, True):
        assert simulate(plan, PROFILE, links, Assumptions(fuses=fuses)).spans == alone.spans


def test_a_torus_with_messages_between_nodes_pays_the_engine_inside_alone() -> None:
    for peers, paid in (("allreduce", [7, 7, 7]), ("pipeline", [7, 0, 7])):
        options = routes.get("torus").options(Scheme(peer_route=peers), LINKS)
        one = bucket("0", "a", size=4, route="torus", options=options)
        pairs = zip(
            stages_of(one, Topology(2, 2), LINKS._replace(engine_s=7.0)),
            stages_of(one, Topology(2, 2), LINKS),
            strict=True,
        )
        assert [more.seconds - less.seconds for more, less in pairs] == pytest.approx(paid)


def test_one_rank_exchanges_nothing() -> None:
    plan = make_plan([Gradient("a", (1,), "float32")], {"*": Scheme()}, Topology(1, 1))
    timeline = simulate(plan, Profile("a", (row("a", 1),), 1.0, 2.0, 1), LINKS)
    assert timeline.step_s == 3 and timeline.scaling_efficiency == 1


def test_a_profile_of_another_model_is_refused() -> None:
    with pytest.raises(PlanError, match=r"'abc'.*'z'"):
        simulate(Plan((bucket("0", "z"),), TWO), PROFILE, LINKS)
    with pytest.raises(PlanError, match=r"'c'.*\b1\b.*'abc'.*\b0\b"):
        simulate(Plan((bucket("0", "a", "b"),), TWO), PROFILE, LINKS)
    with pytest.raises(ConfigurationError, match=r"`spread`.*-1"):
        Assumptions(spread=-1)
    with pytest.raises(ConfigurationError, match="'computer'"):
        Assumptions(selection_on="computer")


def test_times_of_selection() -> None:
    assert sorting_time(2.0)(8) == 2 * 8 * 3 and sorting_time(2.0)(1) == 0
    curve = interpolated_time([(10, 1.0), (20, 4.0)])
    assert [curve(size) for size in (5, 10, 15, 20, 40)] == [0.5, 1.0, 2.5, 4.0, 8.0]
    known = Profile("m", (row("a", 0, 10, selection_s=1.0),), 1.0, 1.0, 1)
    assert measured_time(known)(20) == 2.0 and measured_time(PROFILE) is None
    with pytest.raises(ConfigurationError, match=r"\[\]"):
        interpolated_time([])


def step_of_500(nodes: int) -> tuple[Plan, Profile]:
    rows = tuple(row(f"v{i}", (i + 1) / 500, 50_000) for i in range(500))
    topology = Topology(nodes, 8)
    scheme = Scheme(bucket_bytes=1)
    gradients = [Gradient(variable.name, (50, 1000), "float32") for variable in rows]
    plan = make_plan(list(reversed(gradients)), {"*": scheme}, topology)
    return plan, Profile("m", rows, 0.5, 1.0, batch=1)


@pytest.mark.parametrize(("nodes", "limit_s"), [(16, 0.05), (10_000, 1.0)])
def test_simulating_500_variables_is_fast(nodes: int, limit_s: float) -> None:
    """The fastest of three; ten times the goal, because other processes may run."""
    plan, profile = step_of_500(nodes)
    assert len(plan.buckets) == 500
    seconds = []
    for _ in range(3):
        start = time.perf_counter()
        timeline = simulate(plan, profile, NOMINAL)
        seconds.append(time.perf_counter() - start)
    assert min(seconds) < 10 * limit_s
    assert timeline == simulate(plan, profile, NOMINAL) and timeline.ranks == 8 * nodes


def test_resnet_on_many_nodes_is_bound_by_its_latencies() -> None:
    """A ring over all ranks: exposed time grows with their number."""
    profile = Profile.from_throughput(models.get("resnet50"), 250, batch=64)
    gradients = [Gradient(v.name, v.shape, v.dtype) for v in reversed(profile.variables)]
    exposed = []
    for nodes in (1, 4, 16, 64, 1024):
        plan = make_plan(gradients, {"*": Scheme()}, Topology(nodes, 8))
        exposed.append(simulate(plan, profile, NOMINAL).exposed_s)
        assert stages_of(plan.buckets[0], plan.topology, NOMINAL)
    assert exposed == sorted(exposed) and exposed[0] > 0

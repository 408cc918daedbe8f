"""A budget of bytes between nodes: kept, by the scheme that loses least, on clusters as drawn."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given
from hypothesis import strategies as st

from tfcommx import routes
from tfcommx.core import (
    DENSE_CODES,
    ConfigurationError,
    Link,
    Links,
    Plan,
    PlanError,
    Profile,
    Scheme,
    Topology,
    VariableProfile,
)
from tfcommx.kernels import low_bits
from tfcommx.planner import budget as planner_budget
from tfcommx.planner.automatic import PlanRequest, propose, rules_out_plain
from tfcommx.planner.budget import SentBytes, fewer_bytes, least_lossy
from tfcommx.planner.plan import Gradient, make_plan
from tfcommx.routes.messages import MessageRoute

# Kinds as the documentation lists them, the least lossy first
WIRES = (("plain",), ("float16", "bfloat16"), ("int8",), ("int4",), ("int2",), ("int1",))
SLOW = Links(Link(1e-6, 1e-7), Link(1e-6, 1e-7))
CLUSTERS = [Topology(2, 1), Topology(2, 2), Topology(8, 1), Topology(16, 8), Topology(64, 8)]
UNEVEN = Topology(2, 2, (("red", 2), ("blue", 1)))
LAYERS = [Gradient(f"layer{number}/kernel", (512, 512), "float32") for number in range(6)]


def between(plan: Plan) -> float:
    return sum(routes.of(one).wire_bytes(one, plan.topology).between for one in plan.buckets)


def kind_of(scheme: Scheme) -> int:
    """Return the place of a scheme in the order of losses; selection is last."""
    if scheme.selection != "all":
        return len(WIRES)
    return next(place for place, wires in enumerate(WIRES) if scheme.wire in wires)


shapes = st.one_of(
    st.tuples(st.integers(1, 3000)),
    st.tuples(st.integers(8, 800), st.integers(8, 800)),
    st.tuples(st.just(3), st.just(3), st.integers(1, 64), st.integers(1, 64)),
)
models = st.lists(
    st.tuples(shapes, st.sampled_from(["float32", "float32", "bfloat16", "float16"])),
    min_size=1,
    max_size=8,
)
budgets = st.floats(0.002, 1.0)


@given(models, st.sampled_from([*CLUSTERS, UNEVEN]), budgets, st.booleans())
def test_what_is_proposed_fits_and_nothing_that_loses_less_does(
    model: list[tuple[tuple[int, ...], str]], topology: Topology, budget: float, moves: bool
) -> None:
    gradients = [Gradient(f"v{number}", *one) for number, one in enumerate(model)]
    plain = between(make_plan(gradients, {"*": Scheme()}, topology))

    def fits(scheme: Scheme) -> bool:
        return between(make_plan(gradients, {"*": scheme}, topology)) <= budget * plain

    asked = PlanRequest(gradients, topology, links=SLOW, has_momentum=moves)
    schemes = {"*": Scheme("auto", budget=budget)}
    names = ("allreduce", "asa") if topology.uneven or topology.slots == 1 else routes.DENSE
    writes = [
        (place, Scheme(name, wire=wire, merging="single"))
        for place, wires in enumerate(WIRES)
        for wire in wires
        for name in names
        if wire in routes.DENSE[name].wires and not routes.DENSE[name].messages
        if not (moves and wire in ("int2", "int1"))
    ]
    fitting = [place for place, scheme in writes if fits(scheme)]
    try:
        found = propose(schemes, asked)
    except PlanError:
        assert not fitting
        return
    chosen = least_lossy(schemes["*"], SentBytes(gradients, topology), moves)
    assert {kind_of(scheme) for scheme in chosen} == {min(fitting, default=len(WIRES))}
    assert found or not rules_out_plain(schemes, topology)
    for one in found:
        assert between(one.plan) <= budget * plain
        wires = {bucket.wire for bucket in one.plan.buckets}
        assert not (moves and wires & {"int2", "int1"})
    for scheme in chosen:
        if scheme.selection != "all" and scheme.density < 0.1:
            assert fits(scheme)
            assert not fits(dataclasses.replace(scheme, density=scheme.density + 1e-4))


@pytest.mark.parametrize(
    ("topology", "budget", "moves", "expected"),
    [
        (Topology(2, 2), 0.7, True, {("torus", "plain", 1.0)}),  # Two levels send less
        (Topology(4, 1), 0.3, True, {("asa", "int8", 1.0)}),
        (Topology(16, 8), 0.15, True, {("torus", "int4", 1.0)}),
        (Topology(16, 8), 0.07, False, {("torus", "int2", 1.0)}),
        (Topology(64, 8), 0.04, False, {("torus", "int1", 1.0)}),
        (Topology(2, 2), 0.04, True, {("hitopk", "elias/int4", 0.1)}),  # int4 takes .086
    ],
)
def test_the_scheme_by_cluster_budget_and_momentum(
    topology: Topology, budget: float, moves: bool, expected: set[tuple[str, str, float]]
) -> None:
    found = least_lossy(Scheme("auto", budget=budget), SentBytes(LAYERS, topology), moves)
    assert {(one.route, one.wire, one.density) for one in found} == expected


def test_on_one_node_and_at_1_it_changes_nothing_but_routes_that_send_more() -> None:
    for topology in (Topology(1, 4), Topology(4, 1)):
        asked = PlanRequest(LAYERS, topology, links=SLOW)
        with_budget, without = (
            propose({"*": Scheme("auto", budget=budget)}, asked) for budget in (1, None)
        )
        assert with_budget == without
        assert not rules_out_plain({"*": Scheme("auto", budget=1)}, topology)
    asked = PlanRequest(LAYERS, Topology(1, 4), links=SLOW)
    assert propose({"*": Scheme("auto", budget=0.01)}, asked) == propose(
        {"*": Scheme("auto")}, asked
    )


def test_a_slower_plan_is_proposed_where_plain_horovod_does_not_fit() -> None:
    """Where the backward pass hides every exchange, nothing is faster."""
    fast = Links(Link(1e-9, 1e-15), Link(1e-9, 1e-15))
    rows = tuple(VariableProfile(one.path, one.shape, ready_s=5.0) for one in reversed(LAYERS))
    slow = Profile("slow layers", rows, 5.0, 10.0, batch=32)
    asked = PlanRequest(LAYERS, Topology(4, 1), links=fast, profile=slow)
    assert propose({"*": Scheme("auto")}, asked) == []
    first, *_ = propose({"*": Scheme("auto", budget=0.3)}, asked)
    assert first.share > 0.97 and {bucket.wire for bucket in first.plan.buckets} == {"int8"}


def test_the_budget_is_of_the_variables_of_auto() -> None:
    """Vectors, of which nothing is selected, would leave no room for the others."""
    vector = Gradient("vector", (2 * 10**6,), "float32")
    schemes = {"vector": Scheme(), "*": Scheme("auto", budget=0.01)}
    asked = PlanRequest([*LAYERS, vector], Topology(4, 1), links=SLOW)
    first, *_ = propose(schemes, asked)
    for bucket in first.plan.buckets:
        assert (bucket.k is None) == (bucket.variables == ("vector",))
    with pytest.raises(PlanError, match=r"0\.01"):
        propose({"*": schemes["*"]}, asked)


@pytest.mark.parametrize("moves", [False, True])
def test_what_cannot_fit_is_refused_with_the_fewest_bytes_and_the_remedy(moves: bool) -> None:
    asked = PlanRequest(LAYERS, Topology(64, 8), links=SLOW, has_momentum=moves)
    with pytest.raises(PlanError) as refused:
        propose({"*": Scheme("auto", budget=0.001)}, asked)
    for words in ("0.001", "64 x 8", "hitopk, mstopk 0.001", "OneBitAdam", "LowBitSGD", "3.2 %"):
        assert words in str(refused.value)


@pytest.mark.parametrize(
    ("fields", "names"),
    [
        ({"budget": 0}, r"`budget`.*\b0\b"),
        ({"budget": 1.5}, r"`budget`.*1\.5"),
        ({"budget": float("nan")}, "`budget`.*nan"),
        ({"budget": True}, "`budget`.*True"),
        ({"budget": "few"}, "`budget`.*'few'"),
        ({"route": "torus", "budget": 0.3}, r"budget=0\.3.*'torus'"),
        ({"selection": "mstopk", "density": 0.1, "budget": 0.3}, r"budget=0\.3.*'mstopk'"),
        ({"wire": "int8", "budget": 0.3}, r"budget=0\.3.*'int8'"),
        ({"compression": "powersgd/4", "budget": 0.3}, r"budget=0\.3.*powersgd"),
    ],
)
def test_what_is_refused(fields: dict[str, object], names: str) -> None:
    with pytest.raises(ConfigurationError, match=names):
        Scheme(**{"route": "auto", **fields})


def test_it_is_found_by_few_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan of 500 variables takes up to some hundredths of a second."""
    made = itertools.count()

    def counting(*given: object) -> Plan:
        next(made)
        return make_plan(*given)  # type: ignore[arg-type]

    monkeypatch.setattr(planner_budget, "make_plan", counting)
    least_lossy(Scheme("auto", budget=0.019), SentBytes(LAYERS, Topology(2, 2)), True)
    assert 20 < next(made) < 80


@pytest.mark.parametrize("topology", CLUSTERS)
@pytest.mark.parametrize("density", [0.001, 0.01, 0.1])
def test_a_low_bit_sum_is_named_where_a_selection_sends_more(
    topology: Topology, density: float
) -> None:
    """By hand: 10 % exceed 4 bits an entry from some 16 nodes on; vectors do not count."""
    gradients = [*LAYERS, Gradient("vector", (10**6,), "float32")]
    route = "allgather" if topology.slots == 1 else "hitopk"
    scheme = Scheme(route, "mstopk", density, wire="elias/int4")
    said = fewer_bytes(make_plan(gradients, {"*": scheme}, topology), gradients)
    better = "asa" if topology.slots == 1 else "torus"
    codes = Scheme(better, wire="int4", merging="single")
    sums, selects, plain = (
        between(make_plan(LAYERS, {"*": one}, topology)) for one in (codes, scheme, Scheme())
    )
    assert (said is not None) == (selects > sums)
    assert said is None or topology.nodes >= 8
    if said is not None:
        for share in (selects / plain, sums / plain):
            assert f"{100 * share:.2g} %" in said
        assert f"Scheme({better!r}, wire='int4')" in said
        assert "OneBitAdam" in said and "LowBitSGD" in said


def test_nothing_is_named_for_a_plan_that_selects_nothing_or_stays_in_a_node() -> None:
    for scheme, topology in (
        (Scheme(), Topology(64, 8)),
        (Scheme("allgather"), Topology(64, 1)),  # All entries, which loses nothing
        (Scheme("allgather", "mstopk", 0.5), Topology(1, 8)),
    ):
        assert fewer_bytes(make_plan(LAYERS, {"*": scheme}, topology), LAYERS) is None


def test_kinds_are_in_the_order_of_what_they_lose() -> None:
    """Of normally distributed entries; the most that are selected, 10 %, lose more than signs."""
    entries = tf.random.stateless_normal([10**5], seed=(1, 2))

    def lost(wire: str) -> float:
        if wire in DENSE_CODES:
            residual = tf.Variable(tf.zeros_like(entries))
            low_bits.write(entries, residual, wire, len(entries), len(entries))
            return float(tf.reduce_mean(residual**2))
        written = entries if wire == "plain" else tf.cast(entries, wire)
        return float(tf.reduce_mean((entries - tf.cast(written, "float32")) ** 2))

    losses = [max(map(lost, wires)) for wires in planner_budget.KINDS]
    squares = np.sort(entries.numpy() ** 2)
    losses.append(float(squares[: -len(squares) // 10].sum() / len(squares)))
    assert losses == sorted(losses)
    assert losses == pytest.approx([0, 3e-6, 4e-5, 0.014, 0.118, 0.363, 0.56], rel=0.15)


def test_planning_for_an_mpi_launch_counts_no_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    """On 16 x 8 ranks counting those of one route took 9 s, for a model of 500 variables."""

    def refuse(*_: object) -> None:
        raise AssertionError("routes of messages count block by block")

    monkeypatch.setattr(MessageRoute, "wire_bytes", refuse)
    asked = PlanRequest(LAYERS, Topology(4, 2), links=SLOW)
    for budget in (1.0, 0.7, 0.3):
        assert propose({"*": Scheme("auto", budget=budget)}, asked, messages=True)


def test_a_share_of_more_than_100_percent_is_written_out() -> None:
    """Of 64 nodes, each of which gathers the entries of all, the log had "3e+02 %"."""
    topology, scheme = Topology(64, 1), Scheme("allgather", "mstopk", 0.05)
    text = fewer_bytes(make_plan(LAYERS, {"*": scheme}, topology), LAYERS)
    assert text is not None and "e+" not in text


def test_a_model_without_entries_has_plans_to_propose() -> None:
    request = PlanRequest([Gradient("empty", (0, 4), "float32")], Topology(2, 1))
    assert len(propose({"*": Scheme("auto", budget=0.1)}, request)) <= 1

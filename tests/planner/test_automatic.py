"""The plans that `Scheme("auto")` proposes beside plain Horovod, and refused schemes."""

from __future__ import annotations

import dataclasses

import pytest

from tfcommx.core import (
    NOMINAL,
    Bucket,
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
from tfcommx.planner.automatic import (
    MAX_GUESSES,
    MAX_TRIALS,
    MIN_BYTES,
    PlanRequest,
    Proposal,
    auto_as_plain,
    find_auto,
    is_worth_a_trial,
    propose,
    with_unique_names,
)
from tfcommx.planner.check import check_scheme
from tfcommx.planner.plan import Gradient, make_plan

LAYERS = [Gradient(f"layer{number}/kernel", (512, 512), "float32") for number in range(6)]
SLOW = NOMINAL._replace(between=Link(1e-4, 4e-8))
LOSSY = Scheme("auto", "mstopk", 0.01)


def profile(seconds: float) -> Profile:
    rows = tuple(
        VariableProfile(one.path, one.shape, ready_s=seconds * (place + 1) / len(LAYERS))
        for place, one in enumerate(reversed(LAYERS))
    )
    return Profile("dense layers", rows, seconds / 2, seconds, batch=32)


def sparse(buckets: tuple[Bucket, ...]) -> bool:
    return any(bucket.k is not None for bucket in buckets)


def test_a_lossless_auto_proposes_lossless_plans_other_than_plain_horovods() -> None:
    asked = PlanRequest(LAYERS, Topology(4, 2), "sum", SLOW)
    found = propose({"*": Scheme("auto")}, asked)
    plain = asked.plan(auto_as_plain({"*": Scheme("auto")}))
    assert 1 <= len(found) <= MAX_TRIALS
    plans = [plain, *(one.plan for one in found)]
    assert len({one.buckets for one in plans}) == len(plans)
    for one in plans:
        assert one.operation == "sum" and one.paths == plain.paths
        assert not sparse(one.buckets) and {bucket.wire for bucket in one.buckets} == {"plain"}


@pytest.mark.parametrize("fragments", [1, 2])
def test_a_pattern_that_matches_nothing_is_warned_of_once(
    fragments: int, caplog: pytest.LogCaptureFixture
) -> None:
    """One that matches in another fragment is no mistake."""
    asked = PlanRequest(LAYERS, Topology(2, 1), fragments=fragments)
    asked.plan({LAYERS[-1].path: Scheme("torus"), "mistyped": Scheme("torus"), "*": Scheme()})
    assert [one.args[0] for one in caplog.records] == ["mistyped"]


def test_routes_of_messages_need_an_mpi_launch() -> None:
    def routes_of(messages: bool) -> set[str]:
        found = propose({"*": Scheme("auto")}, PlanRequest(LAYERS, Topology(4, 1)), messages)
        return {bucket.route for one in found for bucket in one.plan.buckets}

    assert routes_of(True) & {"pipeline", "tree", "bidirectional"}
    assert not routes_of(False) & {"pipeline", "tree", "bidirectional"}


def test_a_lossy_auto_sparsifies_on_slow_links_in_the_shortest_format() -> None:
    first, *_ = propose({"*": LOSSY}, PlanRequest(LAYERS, Topology(4, 1), links=SLOW))
    assert sparse(first.plan.buckets) and "elias/int8" in first.name
    asked = dataclasses.replace(LOSSY, wire="pair32")
    first, *_ = propose({"*": asked}, PlanRequest(LAYERS, Topology(4, 1), links=SLOW))
    assert {bucket.wire for bucket in first.plan.buckets} == {"pair32"}


@pytest.mark.parametrize("wire", ["float16", "bfloat16"])
def test_an_auto_in_16_bits_proposes_dense_plans_in_them(wire: str) -> None:
    """On slow links; without being asked it loses nothing."""
    for topology in (Topology(4, 1), Topology(4, 2)):
        asked = PlanRequest(LAYERS, topology, links=SLOW)
        first, *_ = propose({"*": Scheme("auto", wire=wire)}, asked)
        assert {bucket.wire for bucket in first.plan.buckets} == {wire} and wire in first.name
        assert all(bucket.k is None and bucket.rounds for bucket in first.plan.buckets)
        for one in propose({"*": Scheme("auto")}, asked):
            assert {bucket.wire for bucket in one.plan.buckets} == {"plain"}


def test_what_a_lossy_auto_leaves_dense_may_travel_in_16_bits() -> None:
    asked = dataclasses.replace(LOSSY, dense_wire="bfloat16", dense_below=10**9)
    first, *_ = propose({"*": asked}, PlanRequest(LAYERS, Topology(4, 1), links=SLOW))
    assert {bucket.wire for bucket in first.plan.buckets} == {"bfloat16"}


def test_a_plan_that_cannot_be_the_fastest_is_not_tried_and_a_hopeless_one_not_at_all() -> None:
    """Where the backward pass hides every exchange, nothing can be faster."""
    clear = PlanRequest(LAYERS, Topology(4, 1), links=SLOW, profile=profile(0.01))
    found = propose({"*": LOSSY}, clear)
    assert 1 <= len(found) <= MAX_TRIALS and all(sparse(one.plan.buckets) for one in found)
    assert len(propose({"*": LOSSY}, clear._replace(links=None))) == MAX_GUESSES
    fast = Links(Link(1e-9, 1e-15), Link(1e-9, 1e-15))
    assert propose({"*": LOSSY}, clear._replace(links=fast, profile=profile(10.0))) == []


def test_a_probe_that_varies_leaves_more_open() -> None:
    """Two levels send half as much as one here: clear, unless messages vary by half."""
    asked = PlanRequest(LAYERS, Topology(4, 4), links=SLOW, profile=profile(0.01))
    calm, varied = (
        propose({"*": LOSSY}, asked._replace(links=SLOW._replace(spread=spread)))
        for spread in (0.0, 0.5)
    )
    assert {one.plan.buckets[0].route for one in calm} == {"hitopk"}
    assert {one.plan.buckets[0].route for one in varied} == {"hitopk", "allgather"}


def test_auto_for_some_patterns_leaves_the_others_as_asked() -> None:
    schemes = {"layer0/*": Scheme("asa"), "*": LOSSY}
    for one in propose(schemes, PlanRequest(LAYERS, Topology(4, 1), links=SLOW)):
        (bucket,) = [one for one in one.plan.buckets if "layer0/kernel" in one.variables]
        assert (bucket.route, bucket.k) == ("asa", None)
        assert sparse(one.plan.buckets)


def test_what_is_worth_a_trial() -> None:
    entries = MIN_BYTES // 4
    schemes = {"small": Scheme("asa"), "*": Scheme("auto")}
    large, small = Gradient("large", (entries,), "float32"), Gradient("small", (9,), "float32")
    assert is_worth_a_trial(schemes, PlanRequest([large, small], Topology(2, 1)))
    assert not is_worth_a_trial(schemes, PlanRequest([large, small], Topology(1, 1)))
    almost = Gradient("large", (entries - 1,), "float32")
    assert not is_worth_a_trial(schemes, PlanRequest([almost, small], Topology(2, 1)))


@pytest.mark.parametrize(
    ("scheme", "names"),
    [
        (Scheme("auto", merging="single"), "merging"),
        (Scheme("auto", dense_route="asa"), "dense_route"),
        (Scheme("auto", peer_route="tree"), "peer_route"),
        (Scheme("auto", "mstopk", 0.01, momentum=0.9), "momentum"),
        (Scheme("auto", "mstopk", 0.01, clip_norm=1.0), "clip_norm"),
        (Scheme("auto", wire="block16/float16"), "wire"),
        (Scheme("auto", dense_wire="float16"), "dense_wire"),
        (Scheme("auto", "mstopk", 0.01, wire="float16"), "wire"),
        (Scheme("auto", "largest", 0.01), "largest"),
        (Scheme("auta"), "auto.*hitopk"),
    ],
)
def test_an_auto_that_asks_for_what_it_cannot_keep_is_refused(scheme: Scheme, names: str) -> None:
    with pytest.raises(ConfigurationError, match=names):
        check_scheme(scheme, Topology(2, 1))


def test_what_cannot_be_combined_is_refused() -> None:
    with pytest.raises(PlanError, match=r"\b2\b.*'a\*'"):
        find_auto({"a*": Scheme("auto"), "*": LOSSY})
    moving = Scheme("allgather", "mstopk", 0.01, momentum=0.9)
    with pytest.raises(PlanError, match=r"`momentum`.*Scheme\(\"auto\"\)"):
        find_auto({"a*": moving, "*": LOSSY})
    assert find_auto({"a*": LOSSY, "*": LOSSY}) == LOSSY and find_auto({"*": moving}) is None
    with pytest.raises(PlanError, match=r"'auto'.*'\*'.*DistributedOptimizer"):
        make_plan(LAYERS, {"*": LOSSY}, Topology(2, 1))


def test_a_profile_of_another_model_is_refused_by_name() -> None:
    asked = PlanRequest([*LAYERS, Gradient("head/bias", (9,), "float32")], Topology(4, 1))
    with pytest.raises(PlanError, match=r"'head/bias'.*'dense layers'"):
        asked._replace(profile=profile(0.1)).plan(auto_as_plain({"*": LOSSY}))
    PlanRequest(LAYERS, Topology(4, 1), profile=profile(0.1)).plan(auto_as_plain({"*": LOSSY}))


def test_two_plans_of_one_scheme_have_two_names() -> None:
    """One scheme is planned for each assumed compute time, and the trial prints both."""
    gradients = [Gradient(name, (64, 64), "float32") for name in "abcd"]

    def plan(size: int) -> Plan:
        return make_plan(gradients, {"*": Scheme(bucket_bytes=size)}, Topology(2, 1))

    whole, halves, each = plan(2**20), plan(2 * 4 * 64 * 64), plan(1)
    named = with_unique_names(
        [Proposal("torus", whole, 0.5), Proposal("torus", each, 0.6), Proposal("asa", each, 0.7)]
    )
    assert [one.name for one in named] == ["torus, 1 buckets", "torus, 4 buckets", "asa"]
    other = dataclasses.replace(halves, buckets=(*each.buckets[:1], *halves.buckets[1:]))
    assert len(other.buckets) == len(halves.buckets)
    named = with_unique_names([Proposal("torus", halves, 0.5), Proposal("torus", other, 0.6)])
    assert len({one.name for one in named}) == 2

"""The schemes tried, their order, and changes that would help: checked against make_plan."""

from __future__ import annotations

import dataclasses

import pytest

from tfcommx.core import NOMINAL, Links, PlanError, Profile, Scheme, Topology, VariableProfile
from tfcommx.planner.choose import SHORT_WIRE, candidates
from tfcommx.planner.predict import Setting, describe, what_helps
from tfcommx.simulator.assumptions import Assumptions

SPARSE = Scheme("allgather", "mstopk", density=0.01, wire="block16/float16")


def profile(variables: int = 6, seconds: float = 0.1) -> Profile:
    rows = tuple(
        VariableProfile(
            f"layer{number}/kernel", (512, 512), ready_s=seconds * (number + 1) / variables
        )
        for number in range(variables)
    )
    return Profile("dense layers", rows, seconds / 2, seconds, batch=32)


def slow(factor: float) -> Links:
    """Links between nodes that are slower than the nominal ones."""
    beta = factor * NOMINAL.between.beta_s_per_byte
    return NOMINAL._replace(between=dataclasses.replace(NOMINAL.between, beta_s_per_byte=beta))


def test_lossless_means_dense_routes_in_float32_and_the_fastest_comes_first() -> None:
    found = candidates(Setting(profile(), Topology(2, 2), NOMINAL))
    steps = [candidate.timeline.step_s for candidate in found]
    assert steps == sorted(steps)
    assert {one.scheme.route for one in found} == {"allreduce", "torus", "asa"}  # no MPI launch
    assert {(one.scheme.selection, one.scheme.wire) for one in found} == {("all", "plain")}
    assert all(one.residual_bytes == 0 for one in found)
    for one in found:
        assert one == Setting(profile(), Topology(2, 2), NOMINAL).predict(one.scheme)


def test_in_16_bits_every_dense_route_that_writes_them_is_tried_too() -> None:
    found = candidates(Setting(profile(), Topology(2, 2), slow(50)), Scheme(wire="float16"))
    assert {one.scheme.route for one in found if one.scheme.wire == "float16"} == {
        "allreduce",
        "torus",
        "asa",
    }
    assert found[0].scheme.wire == "float16" and any(one.scheme == Scheme() for one in found)
    kept = {one.scheme.route: one.residual_bytes for one in found if one.scheme.wire != "plain"}
    entries = 6 * 512 * 512
    assert kept == {"allreduce": 4 * entries, "asa": 4 * entries, "torus": 2 * entries}
    brain = candidates(Setting(profile(), Topology(2, 2), slow(50)), Scheme("asa", wire="bfloat16"))
    assert {one.scheme.route for one in brain if one.scheme.wire != "plain"} == {"torus", "asa"}


def test_plain_horovod_is_always_among_them() -> None:
    for topology in (Topology(1, 2), Topology(4, 1), Topology(2, 2)):
        found = candidates(Setting(profile(), topology, NOMINAL))
        assert [one.scheme for one in found].count(Scheme()) == 1


def test_an_mpi_launch_has_routes_of_messages_too() -> None:
    found = {
        one.scheme.route
        for one in candidates(Setting(profile(), Topology(4, 1), NOMINAL), None, True)
    }
    assert found == {"allreduce", "asa", "pipeline", "tree", "bidirectional"}
    peers = {
        one.scheme.peer_route
        for one in candidates(Setting(profile(), Topology(2, 2), NOMINAL), None, True)
        if one.scheme.route == "torus"
    }
    assert "pipeline" in peers and "allreduce" in peers


def test_selection_wins_on_a_slow_network_and_loses_on_a_fast_one() -> None:
    takes = Assumptions(selection=lambda entries: 2e-9 * entries)
    sparse = candidates(Setting(profile(), Topology(4, 2), slow(50), takes), SPARSE)
    assert sparse[0].scheme.selection == "mstopk" and sparse[0].scheme.wire == SPARSE.wire
    assert sparse[0].residual_bytes > 0
    assert sparse[0].bytes_between < 0.1 * max(one.bytes_between for one in sparse)
    dense = candidates(Setting(profile(), Topology(1, 2), NOMINAL, takes), SPARSE)
    assert dense[0].scheme.selection == "all"


def test_selected_entries_travel_in_the_short_format_unless_another_is_named() -> None:
    """`tfcommx plan` priced 8 bytes an entry, where `Scheme("auto")` sends 2."""
    setting = Setting(profile(), Topology(4, 2), slow(50))
    for wire, formats in (("plain", {SHORT_WIRE}), ("elias/float32", {"elias/float32"})):
        found = candidates(setting, dataclasses.replace(SPARSE, wire=wire), thorough=False)
        assert {one.scheme.wire for one in found if one.scheme.selection != "all"} == formats


def test_what_is_kept_is_counted_as_the_executor_keeps_it() -> None:
    """All-gather: every entry of every bucket; HiTopKComm: the rank's shard of the node's sum."""
    found = candidates(Setting(profile(), Topology(2, 2), slow(50)), SPARSE)
    kept = {one.scheme.route: one.residual_bytes for one in found if one.scheme.selection != "all"}
    entries = 6 * 512 * 512
    assert kept == {"allgather": 4 * entries, "hitopk": 2 * entries}
    doubled = candidates(
        Setting(profile(), Topology(2, 2), slow(50)), dataclasses.replace(SPARSE, momentum=0.9)
    )
    assert max(one.residual_bytes for one in doubled) == 8 * entries


def test_uneven_clusters_are_left_the_routes_of_one_level() -> None:
    uneven = Topology(2, 2, (("red", 2), ("blue", 1)))
    found = candidates(Setting(profile(), uneven, NOMINAL), SPARSE)
    assert {one.scheme.route for one in found} <= {"allreduce", "asa", "allgather"}


def test_what_would_help_where_the_network_is_slow() -> None:
    setting = Setting(profile(), Topology(4, 2), slow(50))
    changes = what_helps(Scheme(), setting)
    step = {what: change.step_s for what, change in changes.items()}
    now = step.pop("as it is")
    assert now == setting.predict(Scheme()).step_s
    assert step["twice the rate between nodes"] < 0.7 * now
    assert step["twice the rate inside nodes"] == pytest.approx(now, rel=0.01)
    twice = changes["twice the batch"].timeline.throughput
    # The exchange costs as much as before
    assert twice > 1.2 * changes["as it is"].timeline.throughput
    assert "half the density" not in step
    sparse = what_helps(SPARSE, setting)
    assert sparse["half the density"].step_s < sparse["as it is"].step_s


def test_half_of_odd_or_uneven_slots_is_not_offered() -> None:
    """Of 3 slots it was 1, and of 3 + 2 it was 1 + 1."""
    for uneven in ((), (("red", 3), ("blue", 2))):
        setting = Setting(profile(), Topology(2, 3, uneven), NOMINAL)
        assert "half the slots a node" not in what_helps(Scheme(), setting)
    halved = what_helps(Scheme(), Setting(profile(), Topology(2, 4), NOMINAL))
    assert halved["half the slots a node"].plan.topology == Topology(2, 2)


def test_a_profile_without_times_is_refused() -> None:
    sizes = Profile.of_sizes("sizes", profile().variables)
    with pytest.raises(PlanError, match="'sizes'"):
        candidates(Setting(sizes, Topology(2, 1), NOMINAL))


def test_names() -> None:
    assert describe(Scheme()) == "allreduce, threshold"
    assert describe(SPARSE) == "allgather mstopk 0.01 + allreduce, block16/float16, threshold"

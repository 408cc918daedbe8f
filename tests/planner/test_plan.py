"""The assignment of gradients to buckets."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tfcommx import routes
from tfcommx.core import (
    NOMINAL,
    ConfigurationError,
    PlanError,
    Profile,
    Scheme,
    Topology,
    VariableProfile,
)
from tfcommx.planner import merging
from tfcommx.planner.check import DenseWay, SparseWay, Ways, check_scheme, require_coverage
from tfcommx.planner.merging.merging import Prices
from tfcommx.planner.plan import Gradient, make_plan
from tfcommx.planner.prices import default_bucket_bytes

GRADIENTS = [
    Gradient("conv/kernel", (3, 3, 8, 64), "float32"),
    Gradient("conv/bias", (64,), "float32"),
    Gradient("dense/kernel", (64, 100), "float32"),
    Gradient("dense/bias", (100,), "float32"),
]
SPARSE = Scheme(route="hitopk", selection="mstopk", density=0.01)


def threshold(sizes: list[int], limit: int) -> list[list[int]]:
    rows = tuple(VariableProfile(f"v{i}", (size,)) for i, size in enumerate(sizes))
    prices = Prices(lambda entries: 1.0, entry_bytes=1, bucket_bytes=limit)
    return merging.get("threshold").groups(Profile.of_sizes("m", rows), prices)


@given(st.lists(st.integers(0, 50)), st.integers(1, 100))
def test_merging_keeps_every_gradient_once_and_in_order(sizes: list[int], limit: int) -> None:
    groups = threshold(sizes, limit)
    assert [position for group in groups for position in group] == list(range(len(sizes)))
    for group in groups[:-1]:
        assert sum(sizes[i] for i in group) >= limit > sum(sizes[i] for i in group[:-1])


def test_merging_as_drawn() -> None:
    assert threshold([4, 4, 9, 1, 2, 2], 8) == [[0, 1], [2], [3, 4, 5]]


MIB = 2**20


@pytest.mark.parametrize(
    ("latency", "mib", "fused", "expected"),
    [
        (0, 8, False, 4),  # the least
        (0, 640, False, 40),  # 16 buckets
        (0, 640, True, 10),  # 64 buckets
        (8, 64, True, 4),  # Horovod fuses them, so that latency is paid once
        (1, 64, False, 8),  # 64 + 8 of latency, against 64 + 1: within 20 %; 64 + 16 is not
        (100, 64, False, 16),  # four buckets, however long the latency
        (100, 17, False, 8),  # at most four: three
    ],
)
def test_size_of_buckets_without_a_request(
    latency: float, mib: int, fused: bool, expected: int
) -> None:
    """A message takes its MiB plus the latency."""
    prices = Prices(lambda entries: latency + 4 * entries / MIB)
    assert default_bucket_bytes(prices, mib * MIB, fused) == expected * MIB


def test_a_compression_is_not_fused_and_not_priced_as_one_matrix() -> None:
    gradients = [Gradient(f"w{i}", (1024, 1024), "float32") for i in range(64)]
    sizes = {
        len(make_plan(gradients, {"*": Scheme(route, compression=name)}, Topology(64, 1)).buckets)
        for route in ("allreduce", "torus")
        for name in ("powersgd/4",)
    }
    assert sizes == {16}


@pytest.mark.parametrize(
    "scheme",
    [
        Scheme(compression="powersgd/4"),
        Scheme("asa", wire="int4"),
        Scheme("hitopk", "mstopk", 0.1, dense_below=0, wire="elias/int4"),
        Scheme("hitopk", "exact", 1.0, dense_below=0),
    ],
)
def test_variables_without_entries_are_added_plainly(scheme: Scheme) -> None:
    """Alone in a bucket they were priced by division, selected from, or written in blocks."""
    gradients = [Gradient("w", (0, 3), "float32"), Gradient("v", (0,), "bfloat16")]
    (bucket,) = make_plan(gradients, {"*": scheme}, Topology(2, 1)).buckets
    assert (bucket.route, bucket.wire, bucket.k, bucket.compresses) == (
        "allreduce",
        "plain",
        None,
        False,
    )


def test_buckets_grow_with_the_nodes_and_a_request_counts() -> None:
    gradients = [Gradient(f"w{i}", (512, 1024), "float32") for i in range(64)]

    def buckets(nodes: int, **options: int) -> int:
        return len(
            make_plan(gradients, {"*": Scheme("torus", **options)}, Topology(nodes, 8)).buckets
        )

    assert buckets(64) < buckets(2)
    assert buckets(64, bucket_bytes=2 * MIB) == 64


def test_allreduces_grow_where_the_engine_was_measured_not_to_fuse() -> None:
    gradients = [Gradient(f"w{i}", (512, 1024), "float32") for i in range(64)]
    fused, alone = (
        len(make_plan(gradients, {"*": Scheme()}, Topology(64, 8), links=links).buckets)
        for links in (NOMINAL, NOMINAL._replace(fuses=False))
    )
    assert alone < fused


def test_small_variables_stay_dense_and_order_is_backward() -> None:
    plan = make_plan(GRADIENTS, {"*": SPARSE}, Topology(2, 2))
    assert [(bucket.route, bucket.variables) for bucket in plan.buckets] == [
        ("allreduce", ("dense/bias", "conv/bias")),
        ("hitopk", ("dense/kernel", "conv/kernel")),
    ]
    assert plan.buckets[1].k == round(0.01 * (64 * 100 + 9 * 512) / 2)


def test_complex_gradients_are_refused() -> None:
    """As float32 they would lose their imaginary parts."""
    with pytest.raises(PlanError, match=r"complex64 .*'filter/kernel'"):
        make_plan(
            [*GRADIENTS, Gradient("filter/kernel", (8, 8), "complex64")],
            {"*": Scheme()},
            Topology(2, 2),
        )


def test_a_pattern_means_all_variables_of_that_path() -> None:
    """Two towers have layers of the same name: the second one's variables have a number."""
    towers = [
        Gradient(name, (50, 50), "float32")
        for name in ("dense/kernel", "dense/kernel#2", "out/kernel")
    ]
    plan = make_plan(towers, {"dense/kernel": SPARSE, "*": Scheme()}, Topology(2, 2))
    assert {bucket.route: bucket.variables for bucket in plan.buckets} == {
        "hitopk": ("dense/kernel#2", "dense/kernel"),
        "allreduce": ("out/kernel",),
    }


def test_padding_makes_equal_shards() -> None:
    plan = make_plan([Gradient("w", (101, 101), "float32")], {"*": SPARSE}, Topology(2, 8))
    assert plan.buckets[0].padded % 8 == 0
    assert plan.buckets[0].padding == -(101 * 101) % 8


def test_schemes_by_pattern_first_match_counts() -> None:
    plan = make_plan(GRADIENTS, {"conv/*": Scheme("torus"), "*": SPARSE}, Topology(2, 2))
    assert {path: bucket.route for bucket in plan.buckets for path in bucket.variables} == {
        "conv/kernel": "torus",
        "conv/bias": "torus",
        "dense/kernel": "hitopk",
        "dense/bias": "allreduce",
    }


def test_a_variable_without_scheme_is_named() -> None:
    with pytest.raises(PlanError, match="'dense/bias'"):
        make_plan(GRADIENTS, {"conv/*": SPARSE}, Topology(2, 2))


def test_a_bucket_too_small_for_its_density_sends_one_entry() -> None:
    """Which variable is alone in a bucket depends on the cluster.

    Training must not fail because of it.
    """
    plan = make_plan(GRADIENTS, {"*": Scheme("hitopk", "mstopk", 1e-6)}, Topology(2, 2))
    assert {bucket.k for bucket in plan.buckets if bucket.route == "hitopk"} == {1}


def test_dtypes_do_not_mix_and_bfloat16_travels_as_float32() -> None:
    dtypes = {"a": "float16", "b": "bfloat16", "c": "float64", "d": "float32"}
    gradients = [Gradient(path, (8,), dtype) for path, dtype in dtypes.items()]
    plan = make_plan(gradients, {"*": Scheme()}, Topology(1, 2))
    assert {path: bucket.dtype for bucket in plan.buckets for path in bucket.variables} == {
        "a": "float16",
        "b": "float32",
        "c": "float64",
        "d": "float32",
    }


def test_float16_travels_in_codes_too() -> None:
    """It was sent in 16 bits, whatever the wire, and no word said so."""
    gradients = [Gradient(dtype, (2048,), dtype) for dtype in ("float16", "bfloat16", "float64")]
    for wire, of_float16 in (("int8", "int8"), ("int1", "int1"), ("bfloat16", "plain")):
        plan = make_plan(gradients, {"*": Scheme("asa", wire=wire)}, Topology(2, 1))
        wires = {name: bucket.wire for bucket in plan.buckets for name in bucket.variables}
        assert wires == {"float16": of_float16, "bfloat16": wire, "float64": "plain"}


@pytest.mark.parametrize(
    ("scheme", "received"),
    [
        (Scheme(route="hitpk", selection="mstopk", density=0.1), r"'hitpk'.*'hitopk'"),
        (Scheme(route="hitopk", selection="mstop", density=0.1), r"'mstop'.*'mstopk'"),
        (Scheme(route="torus", selection="mstopk", density=0.1), r"'mstopk'.*route='torus'"),
        (
            Scheme(route="hitopk", selection="mstopk", density=0.1, dense_route="hitopk"),
            r"`dense_route`.*'hitopk'",
        ),
    ],
)
def test_schemes_that_do_not_fit(scheme: Scheme, received: str) -> None:
    with pytest.raises(ConfigurationError, match=received):
        check_scheme(scheme, Topology(2, 2))


def test_the_ways_of_a_scheme() -> None:
    sparse = dataclasses.replace(SPARSE, wire="elias/int8", dense_route="asa", dense_wire="float16")
    hitopk, asa = routes.SPARSE["hitopk"], routes.DENSE["asa"]
    assert check_scheme(sparse, Topology(2, 2)) == Ways(
        SparseWay(hitopk, "elias/int8"), DenseWay(asa, "float16")
    )
    dense = Scheme("asa", compression="powersgd/4")
    assert check_scheme(dense, Topology(2, 2)) == Ways(None, DenseWay(asa, "plain", "powersgd/4"))
    assert check_scheme(Scheme("auto"), Topology(2, 2)) is None


def test_a_plan_of_other_variables_or_sizes_is_refused() -> None:
    """A plan of a wider layer with the same name once failed in a reshape of TensorFlow."""
    gradients = [Gradient("w", (8, 8), "float32"), Gradient("v", (64, 8), "float32")]
    plan = make_plan(gradients, {"*": SPARSE}, Topology(2, 2), largest=300)  # "v" in two pieces
    require_coverage(plan, {"w": 64, "v": 512})
    with pytest.raises(PlanError, match=r"512\b.*'v'.*256"):
        require_coverage(plan, {"w": 64, "v": 256})
    with pytest.raises(PlanError, match="'v' is only"):
        require_coverage(plan, {"w": 64})


@pytest.mark.parametrize("route", ["torus", "hitopk"])
def test_two_level_routes_name_the_hosts_of_an_uneven_cluster(route: str) -> None:
    uneven = Topology.of_hosts(["red", "red", "blue"])
    with pytest.raises(PlanError, match="red:2, blue:1"):
        check_scheme(Scheme(route), uneven)
    check_scheme(Scheme("allgather", "mstopk", 0.1), uneven)

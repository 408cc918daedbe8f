"""Values refused by constructors, and the round trip of a plan through JSON."""

from __future__ import annotations

import dataclasses
import json
import re

import numpy as np
import pytest

from tfcommx.core import (
    Bucket,
    ConfigurationError,
    Link,
    Plan,
    PlanError,
    Scheme,
    Topology,
    check_name,
    first_difference,
)
from tfcommx.routes import read_plan
from tfcommx.routes.hitopk import HitopkOptions
from tfcommx.routes.messages import MessageOptions
from tfcommx.routes.torus import TorusOptions


@pytest.mark.parametrize("density", [0, -0.1, 1.5, float("nan"), "0.1", True])
def test_density_outside_its_range_is_refused(density: object) -> None:
    with pytest.raises(PlanError, match=rf"`density`.*Received {density!r}\.$"):
        Scheme(route="hitopk", selection="mstopk", density=density)


@pytest.mark.parametrize("name", ["route", "selection", "peer_route", "wire", "compression"])
@pytest.mark.parametrize("value", [None, 3, ["torus"]])
def test_a_name_that_is_no_string_is_refused(name: str, value: object) -> None:
    """compression=None ended the first step in an AttributeError, and no route was refused here."""
    with pytest.raises(PlanError, match=re.escape(f"{name}={value!r}")):
        Scheme(**{name: value})


def test_a_truth_value_is_no_norm() -> None:
    """`clip_norm: true` in a recipe once clipped to a norm of 1."""
    with pytest.raises(PlanError, match=r"`clip_norm`.*Received True\."):
        Scheme("hitopk", "mstopk", 0.1, clip_norm=True)


def test_rule_all_refuses_a_density() -> None:
    with pytest.raises(PlanError, match=r"'all'.*density=0\.1"):
        Scheme(route="hitopk", density=0.1)


def test_an_unknown_name_gets_the_nearest() -> None:
    with pytest.raises(ConfigurationError, match=r"'hitpk'.*'hitopk'"):
        check_name("route", "hitpk", ["allreduce", "hitopk", "torus"])


@pytest.mark.parametrize("arguments", [(0, 1), (1, 0)])
def test_an_empty_topology_is_refused(arguments: tuple[int, int]) -> None:
    with pytest.raises(PlanError, match=r"nodes={}, slots={}".format(*arguments)):
        Topology(*arguments)


def test_a_link_that_sends_nothing_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"`beta_s_per_byte`.*\b0\b"):
        Link(1e-6, 0)


def test_groups() -> None:
    topology = Topology(nodes=2, slots=3)
    assert topology.size == 6
    assert topology.group("node", 4) == (3, 4, 5)
    assert topology.group("peers", 4) == (1, 4)
    assert topology.group("world", 4) == (0, 1, 2, 3, 4, 5)


def test_a_topology_has_whole_numbers() -> None:
    """A topology of NumPy's numbers made a plan that could not be written as JSON."""
    assert json.dumps(dataclasses.asdict(Topology(np.int64(2), 3.0)))
    for wrong in (1.5, "2", True):
        with pytest.raises(ConfigurationError, match="`nodes`"):
            Topology(wrong, 1)


def test_unequal_slots_are_named() -> None:
    topology = Topology.of_hosts(["red", "red", "blue"])
    assert topology.size == 3
    with pytest.raises(PlanError, match=r"red:2, blue:1"):
        topology.group("node", 0)


def test_ranks_that_jump_between_hosts_are_refused() -> None:
    with pytest.raises(PlanError, match=r"rank 2\b.*'red'"):
        Topology.of_hosts(["red", "blue", "red"])


def test_numpys_numbers_are_numbers() -> None:
    given = Scheme(
        "hitopk",
        "mstopk",
        np.float32(0.25),
        seed=np.int64(3),
        dense_below=np.int32(8),
        bucket_bytes=np.uint64(64),
        momentum=np.float64(0.5),
        clip_norm=np.float16(2),
        block_bytes=np.int8(16),
    )
    assert given == Scheme(
        "hitopk",
        "mstopk",
        0.25,
        seed=3,
        dense_below=8,
        bucket_bytes=64,
        momentum=0.5,
        clip_norm=2.0,
        block_bytes=16,
    )
    assert json.loads(json.dumps(dataclasses.asdict(given)))["density"] == 0.25
    for wrong in (
        {"seed": np.float32(3)},
        {"seed": np.bool_(True)},
        {"seed": True},
        {"density": np.float32(2)},
    ):
        with pytest.raises(PlanError, match=next(iter(wrong))):
            Scheme("hitopk", "mstopk", **{"density": 0.1, **wrong})


def plan(k: int = 3, block_bytes: int = 600) -> Plan:
    peers = TorusOptions("pipeline", MessageOptions(block_bytes))
    pairs = HitopkOptions("pairs")
    return Plan(
        (
            Bucket("b0", ("a", "b"), (4, 6), "float32", "hitopk", "mstopk", k, 2, options=pairs),
            Bucket("b1", ("c",), (5,), "float16", "torus", options=peers),
            Bucket("b2", ("d",), (5,), "float16", "allreduce"),
        ),
        Topology(2, 3),
    )


def test_a_plan_survives_json() -> None:
    assert read_plan(plan().to_json()) == plan()


def test_the_first_difference_is_named() -> None:
    assert first_difference(plan(), plan()) is None
    assert first_difference(plan(), plan(k=4)) == "plan.buckets[0].k: 3 against 4"
    assert first_difference(plan(), plan(block_bytes=8)) == (
        "plan.buckets[1].options.peers.block_bytes: 600 against 8"
    )


def test_a_variable_in_two_buckets_is_refused() -> None:
    bucket = Bucket("b0", ("a",), (4,), "float32", "torus")
    with pytest.raises(PlanError, match=r"'a'.*\bb0\b"):
        Plan((bucket, bucket), Topology(1, 1))

"""The checks of members pass for ours, and for each law name a member that breaks it."""

from __future__ import annotations

import dataclasses
import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from pairs_format import Pairs

import tfcommx as cx
from tfcommx import routes, selection
from tfcommx.compression import Compression, CompressionResult
from tfcommx.compression.powersgd import PowerSGD
from tfcommx.core import Scheme, Sparse, Topology, Traffic
from tfcommx.planner.automatic import PlanRequest, propose
from tfcommx.planner.check import check_scheme
from tfcommx.planner.plan import Gradient
from tfcommx.routes.allgather import Allgather
from tfcommx.routes.allreduce import Allreduce
from tfcommx.routes.asa import Asa
from tfcommx.routes.compressed import CompressedRoute
from tfcommx.testing import (
    LawBroken,
    check_compression,
    check_route,
    check_rule,
    check_strategy,
    check_wire,
)


class Descending:
    """The k largest, in the wrong order."""

    def select(self, gradient: tf.Tensor, k: int, seed: int = 0) -> Sparse:
        magnitude = tf.where(tf.math.is_finite(gradient), tf.abs(gradient), np.inf)
        indices = tf.math.top_k(magnitude, k).indices
        return Sparse(indices, tf.gather(gradient, indices), gradient.shape[0])


class BlindToNaN:
    """The first k entries."""

    def select(self, gradient: tf.Tensor, k: int, seed: int = 0) -> Sparse:
        return Sparse(tf.range(k), gradient[:k], gradient.shape[0])


class Branches:
    """Python's `if` on a tensor, which AutoGraph would convert; steps are traced without it."""

    def select(self, gradient: tf.Tensor, k: int, seed: int = 0) -> Sparse:
        if tf.reduce_any(gradient > 0):
            gradient = tf.identity(gradient)
        return selection.rule("exact").select(gradient, k, seed)


class OwnShare(Asa):
    """Ignores the other ranks' shares."""

    name = "broken_members:SHARE"

    def run(self, flat: Any, bucket: Any, comm: Any, codec: Any) -> Any:
        super().run(flat, bucket, comm, codec)
        return flat * comm.topology.size


class Cheap(Allreduce):
    """Says that it sends nothing."""

    name = "broken_members:CHEAP"

    def wire_bytes(self, bucket: Any, topology: Any) -> Traffic:
        return Traffic(0.0, 0.0)


class OwnGather(Allgather):
    """A sparse route of another package."""

    name = "broken_members:GATHER"
    wires = ("elias/int8",)


@dataclasses.dataclass(frozen=True)
class Changed(Compression):
    """PowerSGD of which one thing is changed."""

    change: Any

    def sums(self, shapes: Any) -> Any:
        return PowerSGD(2).sums(shapes)

    def state_sizes(self, shapes: Any) -> Any:
        return PowerSGD(2).state_sizes(shapes)

    def first_state(self, shapes: Any) -> Any:
        return PowerSGD(2).first_state(shapes)

    def run(self, gradients: Any, state: Any, add: Any) -> CompressionResult:
        done = PowerSGD(2).run(gradients, state, add)
        return self.change(done, gradients)


def lossy(done: CompressionResult, gradients: Any) -> CompressionResult:
    return done._replace(sent=[1.1 * one for one in done.sent])


def eager(done: CompressionResult, gradients: Any) -> CompressionResult:
    return done._replace(state=tf.constant(done.state.numpy()))


def own_noise(done: CompressionResult, gradients: Any) -> CompressionResult:
    changed = [total + 1e-7 * one for total, one in zip(done.totals, gradients, strict=True)]
    return done._replace(totals=changed)


class Careless(Pairs):
    """Loses its rounding errors."""

    def rounded(self, values: tf.Tensor) -> Any:
        return super().rounded(values)[0], None


class Longer(Pairs):
    def words(self, k: int, size: int) -> int:
        return super().words(k, size) + 1


class Finite(Pairs):
    """Writes zeros for NaN and Inf."""

    def rounded(self, values: tf.Tensor) -> Any:
        return super().rounded(tf.where(tf.math.is_finite(values), values, 0.0))


class Unordered(Pairs):
    """Reads the buffers of the ranks in the wrong order."""

    def decode(self, words: tf.Tensor, k: int, size: int) -> Any:
        return super().decode(tf.reverse(words, [0]), k, size)


class Three(Pairs):
    """Reads halves of the values, unless there are three buffers."""

    def decode(self, words: tf.Tensor, k: int, size: int) -> Any:
        indices, values = super().decode(words, k, size)
        return indices, values if words.shape[0] == 3 else values / 2


class Halving(Pairs):
    """Halves values each time that they are rounded."""

    def rounded(self, values: tf.Tensor) -> Any:
        written, _ = super().rounded(values / 2)
        return written, tf.where(tf.math.is_finite(values), values - written, 0.0)


@pytest.fixture(autouse=True)
def members(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the members above importable, as a stranger's module would be."""
    module = SimpleNamespace(
        DESCENDING=Descending(),
        BLIND=BlindToNaN(),
        BRANCHES=Branches(),
        SHARE=OwnShare(),
        CHEAP=Cheap(),
        GATHER=OwnGather(),
        LOSSY=Changed(lossy),
        NOISE=Changed(own_noise),
        EAGER=Changed(eager),
        PAIRS=Pairs(),
        PRICES=CompressedRoute(routes.get("allreduce")),
        CARELESS=Careless(),
        LONGER=Longer(),
        FINITE=Finite(),
        UNORDERED=Unordered(),
        HALVING=Halving(),
        THREE=Three(),
    )
    monkeypatch.setitem(sys.modules, "broken_members", module)


@pytest.mark.parametrize(
    ("check", "member", "law"),
    [
        (check_rule, "DESCENDING", "_check_choice"),
        (check_rule, "BLIND", "_check_choice"),
        (check_rule, "BRANCHES", "check_traces"),
        (check_route, "SHARE", "check_conservation"),
        (check_route, "CHEAP", "check_count"),
        (check_compression, "LOSSY", "check_conservation"),
        (check_compression, "NOISE", "check_agreement"),
        (check_compression, "EAGER", "check_traces"),
        (check_wire, "CARELESS", "_check_rounded"),
        (check_wire, "LONGER", "check_traces"),
        (check_wire, "FINITE", "_check_rounded"),
        (check_wire, "UNORDERED", "_check_buffers"),
        (check_wire, "HALVING", "_check_rounded"),
        (check_wire, "THREE", "check_conservation"),
    ],
)
def test_a_broken_member_is_named_by_the_check_of_its_law(
    check: Any, member: str, law: str
) -> None:
    with pytest.raises(LawBroken, match=f"'broken_members:{member}'") as caught:
        check(f"broken_members:{member}")
    callers = [entry.name for entry in caught.traceback if entry.name != "require"]
    assert callers[-1] == law


@pytest.mark.extended
def test_our_own_members_pass() -> None:
    """Tests of laws walk over the tables; here is one of a family, by its outside name."""
    assert cx.testing.check_rule is check_rule
    check_rule("tfcommx.selection.rules:EXACT")
    check_route("allreduce")
    with pytest.raises(cx.PlanError, match=r"'asa'.*'tfcommx\.routes\.asa:ROUTE'"):
        check_route("tfcommx.routes.asa:ROUTE")
    check_strategy("root")


def test_a_sparse_route_of_another_package_passes_and_prices_alone_are_no_route() -> None:
    check_route("broken_members:GATHER")
    with pytest.raises(cx.PlanError, match=r"'allgather'.*'tfcommx\.routes\.allgather:ROUTE'"):
        check_route("tfcommx.routes.allgather:ROUTE")
    with pytest.raises(cx.ConfigurationError, match=r"route\.DenseRoute\b.*route\.SparseRoute\b"):
        check_route("broken_members:PRICES")


@pytest.mark.extended
def test_a_wire_format_of_another_package_passes_and_may_be_named_by_auto() -> None:
    check_wire("broken_members:PAIRS")
    with pytest.raises(cx.ConfigurationError, match=r"wire\.formats\.WireFormat"):
        check_wire("broken_members:DESCENDING")
    gradients = [Gradient("w", (4000, 50), "float32")]
    asked = Scheme("auto", "mstopk", 0.01, wire="broken_members:PAIRS")
    proposals = propose({"*": asked}, PlanRequest(gradients, Topology(4, 1)))
    wires = {bucket.wire for one in proposals for bucket in one.plan.buckets}
    assert "broken_members:PAIRS" in wires
    for route in ("allreduce", "auto"):
        scheme = Scheme(route, wire="broken_members:PAIRS")
        with pytest.raises(cx.PlanError, match="wire='broken_members:PAIRS'"):
            check_scheme(scheme, Topology(2, 1))


def test_a_strategy_that_leaves_ranks_apart_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    class Alone(Allreduce):
        def run_list(self, parts: Any, bucket: Any, comm: Any, average: bool) -> Any:
            super().run_list(parts, bucket, comm, average)
            return parts

    monkeypatch.setitem(routes.ROUTES, "allreduce", Alone())
    with pytest.raises(LawBroken, match=r"[Rr]ank 1\b.*rank 0\b"):
        check_strategy("synchronous")

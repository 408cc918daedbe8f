"""The checks of members pass for ours, and for each law name a member that breaks it."""

from __future__ import annotations

import dataclasses
import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import tfcommx as cx
from tfcommx import routes
from tfcommx.compression import Compressed, Compression
from tfcommx.compression.powersgd import PowerSGD
from tfcommx.routes.allreduce import Allreduce
from tfcommx.terms import Sparse, Traffic
from tfcommx.testing import LawBroken, check_compression, check_route, check_rule, check_strategy


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


class OwnShare(Allreduce):
    """Forgets what others sent."""

    name = "broken_members:SHARE"
    takes_list = False

    def run(self, flat: Any, bucket: Any, comm: Any, codec: Any, select: Any = None) -> Any:
        super().run(flat, bucket, comm, codec)
        return flat * comm.topology.size


class Cheap(Allreduce):
    """Says that it sends nothing."""

    name = "broken_members:CHEAP"

    def wire_bytes(self, bucket: Any, topology: Any) -> Traffic:
        return Traffic(0.0, 0.0)


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

    def run(self, gradients: Any, state: Any, add: Any) -> Compressed:
        done = PowerSGD(2).run(gradients, state, add)
        return self.change(done, gradients)


def lossy(done: Compressed, gradients: Any) -> Compressed:
    return done._replace(sent=[1.1 * one for one in done.sent])


def eager(done: Compressed, gradients: Any) -> Compressed:
    return done._replace(state=tf.constant(done.state.numpy()))


def own_noise(done: Compressed, gradients: Any) -> Compressed:
    changed = [total + 1e-7 * one for total, one in zip(done.totals, gradients, strict=True)]
    return done._replace(totals=changed)


@pytest.fixture(autouse=True)
def members(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the members above importable, as a stranger's module would be."""
    module = SimpleNamespace(
        DESCENDING=Descending(),
        BLIND=BlindToNaN(),
        SHARE=OwnShare(),
        CHEAP=Cheap(),
        LOSSY=Changed(lossy),
        NOISE=Changed(own_noise),
        EAGER=Changed(eager),
    )
    monkeypatch.setitem(sys.modules, "broken_members", module)


@pytest.mark.parametrize(
    ("check", "member", "law"),
    [
        (check_rule, "DESCENDING", "ascending"),
        (check_rule, "BLIND", "chosen before all else"),
        (check_route, "SHARE", "sent plus what stays"),
        (check_route, "CHEAP", "bytes sent"),
        (check_compression, "LOSSY", "sent plus what stays"),
        (check_compression, "NOISE", "same bits"),
        (check_compression, "EAGER", "traceable"),
    ],
)
def test_a_broken_member_is_named_with_its_law(check: Any, member: str, law: str) -> None:
    with pytest.raises(LawBroken, match=law) as caught:
        check(f"broken_members:{member}")
    assert f"'broken_members:{member}'" in str(caught.value)


def test_our_own_members_pass() -> None:
    """Tests of laws walk over the tables; here is one of each family, by its outside name."""
    assert cx.testing.check_rule is check_rule
    check_rule("tfcommx.selection.exact:RULE")
    check_route("allreduce")
    with pytest.raises(cx.PlanError, match="what others find it by"):
        check_route("tfcommx.routes.asa:ROUTE")
    check_strategy("root")


def test_a_strategy_that_leaves_ranks_apart_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    class Alone(Allreduce):
        def run_list(self, parts: Any, bucket: Any, comm: Any, average: bool) -> Any:
            super().run_list(parts, bucket, comm, average)
            return parts

    monkeypatch.setitem(routes.ROUTES, "allreduce", Alone())
    with pytest.raises(LawBroken, match="same weights"):
        check_strategy("synchronous")

"""Ranks that differ, or fail, end with an error on every rank; none waits for ever."""

from __future__ import annotations

import re

import pytest
import tensorflow as tf
from laws_helpers import (
    RULES,
    plan_for,
    scheme,
)

from tfcommx.collectives.comm import Comm
from tfcommx.collectives.threads import ThreadComm
from tfcommx.core import PlanError, Topology
from tfcommx.runtime.executor import PlanExecutor


def test_different_plans_are_refused_on_every_rank_and_named() -> None:
    def work(comm: Comm) -> str:
        density = 0.1 if comm.rank < 3 else 0.2
        with pytest.raises(PlanError) as caught:
            PlanExecutor(plan_for(scheme("hitopk", RULES[0], density), comm.topology), comm)
        return str(caught.value)

    messages = ThreadComm.run(Topology(2, 2), work)
    assert len(messages) == 4
    assert all(
        re.search(r"[Rr]ank 0\b.*rank 3\b.*plan\.buckets\[0\]\.k\b", message)
        for message in messages
    )


def test_ranks_in_different_collectives_are_an_error_and_not_a_hang() -> None:
    with pytest.raises(RuntimeError, match=r"'allreduce name0', 'allreduce name1'"):
        ThreadComm.run(
            Topology(2, 1), lambda comm: comm.allreduce(tf.ones([2]), "world", f"name{comm.rank}")
        )


def test_a_rank_that_fails_ends_the_others() -> None:
    def work(comm: Comm) -> None:
        if comm.rank == 1:
            raise ValueError("rank 1 fails")
        comm.allreduce(tf.ones([2]), "world", "sum")

    with pytest.raises((ValueError, RuntimeError), match="rank 1 fails"):
        ThreadComm.run(Topology(3, 1), work)

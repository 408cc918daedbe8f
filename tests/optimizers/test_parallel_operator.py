"""The parallel operator equals its local form, bit by bit, on every rank; or raises one error.

Ranks are threads of one process here; tests/ranks has processes, traced steps and `fit`.
"""

from __future__ import annotations

import itertools
import logging
import re
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from tfcommx.collectives.threads import ThreadComm
from tfcommx.core import ConfigurationError, PlanError, Topology
from tfcommx.kernels.lars import squared_norms
from tfcommx.optimizers.parallel_operator import (
    Choice,
    ParallelOperator,
    pack,
    size_bytes,
    unpack,
)

UNEVEN = Topology(2, 3, (("red", 3), ("blue", 1)))
TOPOLOGIES = [Topology(1, 1), Topology(1, 2), Topology(3, 1), Topology(2, 2), UNEVEN]


def operator(comm: ThreadComm, op: Any, mode: str = "parallel", **more: Any) -> ParallelOperator:
    settings = {"group": "world"} | more
    return ParallelOperator(op, mode, comm=comm, **settings)


def on_ranks(topology: Topology, body: Callable[[Any], Any]) -> list[Any]:
    return ThreadComm.run(topology, body)


def tensors() -> list[tf.Tensor]:
    random = np.random.default_rng(2)
    return [
        tf.constant(random.normal(size=shape).astype("f"))
        for shape in ((40, 30), (3,), (), (0,), (700,), (5, 5, 5), (2,))
    ]


OPS = {
    "norms": lambda items: tf.unstack(squared_norms(items)),
    "whole tensors": lambda items: [tf.sqrt(tf.abs(item)) * 3 for item in items],
    "float16": lambda items: [tf.cast(item, tf.float16) for item in items],
    "bfloat16": lambda items: [tf.cast(item, tf.bfloat16) for item in items],
    "bool": lambda items: [item > 0 for item in items],
    "int8": lambda items: [tf.cast(item, tf.int8) for item in items],
    "int64": lambda items: [tf.cast(tf.size(item), tf.int64) for item in items],
}


@pytest.mark.parametrize("kind", OPS)
def test_equal_to_the_local_form_bit_by_bit(kind: str) -> None:
    for topology in TOPOLOGIES:
        right = [one.numpy().tobytes() for one in OPS[kind](tensors())]
        for found in on_ranks(topology, lambda comm: operator(comm, OPS[kind])(tensors())):
            assert [one.numpy().tobytes() for one in found] == right
            assert [one.shape for one in found] == [one.shape for one in OPS[kind](tensors())]


def test_items_without_cost_are_dealt_out_evenly_beside_large_ones() -> None:
    def shares(comm: ThreadComm) -> tuple[tuple[int, ...], ...]:
        made = operator(comm, OPS["whole tensors"])
        made([tf.ones(1000), tf.ones(1000), *[tf.ones(0)] * 6])
        (found,) = made._shares.values()
        return found.positions

    for positions in on_ranks(Topology(1, 2), shares):
        assert [len(own) for own in positions] == [4, 4]


def test_items_may_be_tuples() -> None:
    def products(items: list[tuple[tf.Tensor, tf.Tensor]]) -> list[tf.Tensor]:
        return [tf.reduce_sum(one * other) for one, other in items]

    pairs = [(one, one + 1) for one in tensors()]
    right = [one.numpy().item() for one in products(pairs)]
    for found in on_ranks(Topology(1, 3), lambda comm: operator(comm, products)(pairs)):
        assert [one.numpy().item() for one in found] == right


@pytest.mark.parametrize("rows", [0, 1, 2, 3, 10, 1001])
def test_one_long_tensor_is_shared_out_by_ranges(rows: int) -> None:
    long = tf.random.stateless_normal([rows, 3], [1, 2])

    def square(items: list[tf.Tensor]) -> list[tf.Tensor]:
        assert len(items) == 1
        return [tf.square(items[0])]

    def squares(items: list[tf.Tensor]) -> list[tf.Tensor]:
        return [tf.square(item) for item in items]

    for found in on_ranks(Topology(2, 2), lambda comm: operator(comm, squares)(long)):
        np.testing.assert_array_equal(found.numpy(), tf.square(long).numpy())
    for found in on_ranks(Topology(1, 2), lambda comm: operator(comm, square, "local")(long)):
        np.testing.assert_array_equal(found.numpy(), tf.square(long).numpy())


def test_each_rank_computes_its_share_only() -> None:
    """The large item costs as much as the others together; by number, ranks had two each."""
    seen: dict[int, int] = {}

    def body(comm: ThreadComm) -> None:
        count = itertools.count()

        def op(items: list[tf.Tensor]) -> list[tf.Tensor]:
            if tf.executing_eagerly():
                seen[comm.rank] = len(items)
                next(count)
            return [tf.reduce_sum(item) for item in items]

        operator(comm, op)([tf.ones([8]), tf.ones([4]), tf.ones([3]), tf.ones([2])])
        assert next(count) == 1

    on_ranks(Topology(1, 2), body)
    assert seen == {0: 1, 1: 3}


def test_the_nodes_of_a_group_share_by_themselves() -> None:
    def body(comm: ThreadComm) -> list[float]:
        mine = [tf.fill([3], float(comm.rank // 2)), tf.fill([2], 1.0)]
        found = operator(comm, OPS["norms"], group="node")(mine)
        return [one.numpy().item() for one in found]

    assert on_ranks(Topology(2, 2), body) == [[0, 2], [0, 2], [3, 2], [3, 2]]


@pytest.mark.parametrize("kind", [ValueError, tf.errors.InvalidArgumentError])
def test_an_error_on_one_rank_ends_all_with_it(kind: type) -> None:
    def body(comm: ThreadComm) -> str:
        def op(items: list[tf.Tensor]) -> list[tf.Tensor]:
            if comm.rank == 1 and tf.executing_eagerly():
                raise kind(None, None, "no root") if kind is not ValueError else kind("no root")
            return [tf.sqrt(item) for item in items]

        with pytest.raises(tf.errors.InvalidArgumentError) as caught:
            operator(comm, op)(tensors())
        return str(caught.value)

    for message in on_ranks(Topology(1, 3), body):
        assert f"rank 1: {kind.__name__}" in message and "no root" in message


def test_an_error_while_an_op_is_traced_on_one_rank_ends_all() -> None:
    def body(comm: ThreadComm) -> None:
        def op(items: list[tf.Tensor]) -> list[tf.Tensor]:
            if comm.rank == 1:
                raise ValueError("not here")
            return items

        with pytest.raises(ConfigurationError, match="rank 1: ValueError: not here"):
            operator(comm, op)(tensors())

    on_ranks(Topology(1, 2), body)


def test_other_tensors_on_one_rank_are_refused() -> None:
    def body(comm: ThreadComm) -> None:
        with pytest.raises(ConfigurationError, match=r"rank 1\b.*shape=\(3,\)"):
            operator(comm, OPS["norms"])([tf.ones([3 + comm.rank]), tf.ones([2])])

    on_ranks(Topology(1, 2), body)


@pytest.mark.parametrize(("gather_s", "form"), [(0.0, "parallel"), (10.0, "local")])
def test_auto_takes_the_form_of_the_lower_price(
    gather_s: float, form: str, caplog: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured, calls = ParallelOperator._seconds, Counter()

    def seconds(self: ParallelOperator, work: Callable[[], tf.Tensor]) -> float:
        calls[self] += 1  # All items, a share, the all-gather
        return gather_s if calls[self] == 3 else measured(self, work)

    monkeypatch.setattr(ParallelOperator, "_seconds", seconds)

    def heavy(items: list[tf.Tensor]) -> list[tf.Tensor]:
        return [tf.reduce_sum(tf.linalg.svd(item, compute_uv=False)) for item in items]

    matrices = [tf.random.stateless_normal([60, 60], [i, 1]) for i in range(8)]

    def body(comm: ThreadComm) -> Choice:
        chosen = operator(comm, heavy, "auto")
        first = [one.numpy().item() for one in chosen(matrices)]
        assert [one.numpy().item() for one in chosen(matrices)] == first  # by the first choice
        (shares,) = chosen._shares.values()
        return shares.choice

    with caplog.at_level(logging.INFO, "tfcommx"):
        one, other = on_ranks(Topology(2, 1), body)
    assert one == other
    # Threads of one process do not compute side by side: the price of the share may not be less.
    locally, largest_share, gather = map(float, re.findall(r"[\d.]+(?= ms)", one.reason))
    expected = "parallel" if largest_share + gather < locally else "local"
    assert one.form == expected and (form == "parallel" or one.form == "local")
    assert f"heavy: {one.form}: all locally" in caplog.text.replace("<locals>.", "")


def test_wrong_arguments_are_refused_in_words() -> None:
    def body(comm: ThreadComm) -> None:
        with pytest.raises(ConfigurationError, match="'fast'"):
            operator(comm, OPS["norms"], "fast")
        with pytest.raises(ConfigurationError, match="'peers'"):
            operator(comm, OPS["norms"], group="peers")
        with pytest.raises(ConfigurationError, match=r"`op`.*'norms'"):
            operator(comm, "norms")
        with pytest.raises(ConfigurationError, match=r"`op`.*TensorSpec"):
            operator(comm, lambda items: [tf.add_n(items)])([tf.ones([2]), tf.ones([2])])

    on_ranks(Topology(1, 2), body)
    with pytest.raises(PlanError, match="red:3, blue:1"):
        ThreadComm.run(UNEVEN, lambda comm: operator(comm, OPS["norms"], group="node"))


@settings(max_examples=30)
@given(
    shapes=st.lists(st.lists(st.integers(0, 4), max_size=3), max_size=5),
    dtype=st.sampled_from(["float32", "float64", "bool", "int8", "uint8", "bfloat16", "complex64"]),
    spare=st.integers(0, 9),
)
def test_packed_results_come_back(shapes: list[list[int]], dtype: str, spare: int) -> None:
    results = [tf.cast(tf.random.stateless_normal(shape, [1, 2]) > 0, dtype) for shape in shapes]
    specs = [tf.TensorSpec(one.shape, one.dtype) for one in results]
    row = pack(results, sum(map(size_bytes, specs)) + spare)
    for one, other in zip(unpack(row, specs), results, strict=True):
        assert one.shape == other.shape and one.dtype == other.dtype
        assert one.numpy().tobytes() == other.numpy().tobytes()

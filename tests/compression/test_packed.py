"""Packed: digits survive any sum, and what arrives is what its definition says."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from tfcommx import compression
from tfcommx.compression import packed
from tfcommx.core import PlanError, Scheme, Topology
from tfcommx.planner.check import check_scheme
from tfcommx.planner.plan import Gradient, make_plan
from tfcommx.testing import check_compression

SHAPES = [(40, 30), (24,)]


def agreeing(gradients: list[list[np.ndarray]]) -> tuple[list[np.ndarray], list[list[np.ndarray]]]:
    """Return what arrives, and what each rank sent: first all tell their largest entries."""
    member = compression.get("packed")

    class Told(Exception):
        pass

    def first(one: list[np.ndarray]) -> np.ndarray:
        def add(vector: tf.Tensor) -> tf.Tensor:
            raise Told(vector.numpy())

        with pytest.raises(Told) as told:
            member.run(list(map(tf.constant, one)), tf.zeros([0]), add)
        return told.value.args[0]

    agreed, sums = sum(map(first, gradients)), []

    def second(one: list[np.ndarray]) -> np.ndarray:
        answers = iter(
            [lambda _: tf.constant(agreed), lambda vector: sums.append(vector) or vector]
        )
        done = member.run(
            list(map(tf.constant, one)), tf.zeros([0]), lambda vector: next(answers)(vector)
        )
        return [part.numpy() for part in done.sent]

    sent = [second(one) for one in gradients]
    answers = iter([tf.constant(agreed), tf.add_n(sums)])
    done = member.run(list(map(tf.constant, gradients[0])), tf.zeros([0]), lambda _: next(answers))
    return [part.numpy() for part in done.totals], sent


@pytest.mark.parametrize("ranks", [2, 4, 16])
def test_it_sends_whole_steps_and_all_of_them_arrive(ranks: int) -> None:
    numbers = np.random.default_rng(ranks)
    scale = 10.0 ** numbers.integers(-6, 6, (ranks, 1))
    gradients = [
        [(numbers.normal(size=shape) * scale[rank]).astype(np.float32) for shape in SHAPES]
        for rank in range(ranks)
    ]
    totals, sent = agreeing(gradients)
    flat = np.stack([np.concatenate([part.ravel() for part in one]) for one in gradients])
    arrived = np.concatenate([part.ravel() for part in totals])
    for start in range(0, flat.shape[1], packed.BLOCK):
        block = flat[:, start : start + packed.BLOCK].astype(np.float64)
        levels = packed.LARGEST // ranks
        step = packed.RANGE * np.abs(block).max(axis=1).sum() / ranks / levels
        whole = np.clip(np.round(block / step), -levels, levels).sum(axis=0)
        # Where division falls on the middle of two numbers, float32 may take the other
        error = np.abs(arrived[start : start + packed.BLOCK] / step - whole)
        assert np.mean(error < 1e-3) > 0.99 and error.max() < 1.01
    for place in range(len(SHAPES)):
        whole = sum(one[place].astype(np.float64) for one in sent)
        np.testing.assert_allclose(totals[place], whole, rtol=1e-5, atol=1e-6 * np.abs(whole).max())


def test_the_largest_digits_survive() -> None:
    ends = np.array(np.meshgrid(*[[-160, -1, 0, 1, 160]] * 3)).reshape(3, -1).astype(np.float32)
    found = packed._unpacked(packed._packed(tf.constant(ends)))
    np.testing.assert_array_equal(found, ends)
    assert np.isnan(packed._unpacked(tf.constant([np.nan]))).all()


def test_zeros_arrive_as_zeros() -> None:
    totals, _ = agreeing([[np.zeros(shape, np.float32) for shape in SHAPES]] * 2)
    assert not any(part.any() for part in totals)


def test_a_bucket_that_would_not_be_half_as_long_travels_as_it_is() -> None:
    member = compression.get("packed")
    assert member.sums([(384,)]) == (4, 128)
    assert member.sums([(200,)]) == ()


def test_it_holds_the_laws() -> None:
    check_compression("packed")


def test_gradients_that_a_float_holds_arrive() -> None:
    """Though the largest entries of a block are 1.2e38 on each rank, at different places."""
    gradients = [[np.zeros(shape, np.float32) for shape in SHAPES] for _ in range(4)]
    for rank, (kernel, _) in enumerate(gradients):
        kernel[0, rank] = 1.2e38
    totals, _ = agreeing(gradients)
    np.testing.assert_allclose(totals[0][0, :4], 1.2e38, rtol=0.05)


@pytest.mark.parametrize("ranks", [4, packed.Packed.most_ranks])
def test_all_of_it_has_arrived_after_some_steps(ranks: int) -> None:
    """Equal gradients on all ranks, of which a rank keeps what it did not send."""
    numbers = np.random.default_rng(0)
    gradient = [numbers.normal(size=shape).astype(np.float32) for shape in SHAPES]
    member, stays, arrived = compression.get("packed"), [0.0, 0.0], [0.0, 0.0]
    for _ in range(12):
        whole = [one + kept for one, kept in zip(gradient, stays, strict=True)]
        done = member.run(list(map(tf.constant, whole)), tf.zeros([0]), lambda one: ranks * one)
        stays = [one - sent.numpy() for one, sent in zip(whole, done.sent, strict=True)]
        arrived = [one + total.numpy() for one, total in zip(arrived, done.totals, strict=True)]
    for one, total in zip(gradient, arrived, strict=True):
        assert np.abs(total - 12 * ranks * one).max() < 1.01 * ranks * np.abs(one).max()


def test_what_is_refused() -> None:
    with pytest.raises(PlanError, match="compression='packed/4'"):
        compression.get("packed/4")
    gradients = [Gradient("kernel", (40, 30), "float32")]
    for route in ("torus", "auto"):
        scheme = Scheme(route, compression="packed")
        with pytest.raises(PlanError, match=r"\b80\b.*\b81\b"):
            check_scheme(scheme, Topology(81, 1))
        check_scheme(scheme, Topology(80, 1))
    with pytest.raises(PlanError, match=r"\b80\b.*\b81\b"):
        make_plan(gradients, {"*": Scheme(compression="packed")}, Topology(81, 1), "sum")

"""The rules of selection: which k entries of a gradient are sent; the package has their table."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from tfcommx.core import PlanError, Sparse
from tfcommx.kernels import select as kernel
from tfcommx.kernels import traced
from tfcommx.kernels.select import below


@dataclass(frozen=True)
class All:
    """Every entry, whatever its magnitude."""

    def select(self, gradient: tf.Tensor, k: int, seed: int = 0) -> Sparse:
        """Choose all n entries of the gradient.

        Args:
            gradient: float [n].
            k: n.
            seed: not used.

        **Cost:** one pass at most.
        **Raises:** PlanError if k is not n; InvalidArgumentError if that is known only in the step.
        """
        size = traced.length(gradient)
        problem = "Rule 'all' needs k = n. Received k={}, n={}. Use density 1, or another rule."
        if isinstance(size, int) and isinstance(k, int):
            if k != size:
                raise PlanError(problem.format(k, size))
        else:
            tf.debugging.assert_equal(tf.cast(k, tf.int32), size, problem.format("a tensor", size))
        # Counted in int64: TensorFlow's int32 range would be created in the host's memory for a GPU
        indices = tf.cast(tf.range(tf.size(gradient, tf.int64)), tf.int32)
        return Sparse(indices, tf.cast(gradient, tf.float32), size)


ALL = All()


@dataclass(frozen=True)
class NativeSelector:
    """A rule of `kernels.select`, which fuses the choice with error feedback in one pass.

    The band of "mstopk" is 1/4096 wide, relative to its magnitude: the chosen entries differ from
    the exact top k only within the band.

    **Source:** Shi et al., Towards Scalable Distributed Training of Deep Learning on Public Cloud
    Clusters, 2021, Algorithm 1; we find the thresholds by counting in bins, in one pass, instead of
    by a binary search.
    """

    # Name of the rule in the kernel: "exact" or "mstopk"
    name: str

    def select(self, gradient: tf.Tensor, k: int, seed: int = 0) -> Sparse:
        """Choose k entries; see `kernels.select.select`."""
        return kernel.select(gradient, k, seed, self.name)


EXACT = NativeSelector("exact")
MSTOPK = NativeSelector("mstopk")


@dataclass(frozen=True)
class Dgc:
    """The k largest of the entries that reach a sampled threshold.

    **Source:** Lin et al., Deep Gradient Compression, 2018, section 5. There, fewer than k entries
    travel if the sampled threshold is too high. Here k entries always travel, because the threshold
    is set for 1.25 k entries, and if fewer than k reach it, the choice is among all entries.
    """

    # Share of the entries that is sampled, as in the paper
    sampled: float = 0.01
    # Smallest sample, in entries, because a smaller one has too few of the top 0.1 % of entries
    at_least: int = 1024
    # The threshold is the magnitude that margin * k entries are expected to reach
    margin: float = 1.25

    def select(self, gradient: tf.Tensor, k: int, seed: int = 0) -> Sparse:
        """Choose k entries of float [n] by double sampling.

        **Ranks:** local.
        **Cost:** three passes, a sample, and a partial sort of about 1.25 k entries on one thread;
        of all n if too few entries reach the threshold.
        **Raises:** PlanError, or in the step InvalidArgumentError, if k is not in [1, n].
        """
        _check_k(k, gradient, "dgc")
        acc = tf.cast(gradient, tf.float32)
        magnitude = _magnitude(acc)
        # Int64: TensorFlow moves a GPU's int32 through the host
        reaching = tf.where(magnitude >= self._threshold(magnitude, k, seed))[:, 0]
        reaching = tf.cond(
            tf.size(reaching) >= k,
            lambda: reaching,
            lambda: tf.range(tf.cast(tf.size(acc), tf.int64)),
        )
        largest = tf.math.top_k(tf.gather(magnitude, reaching), k).indices
        # Ascending, because wire formats write indices so
        indices = tf.cast(tf.sort(tf.gather(reaching, largest)), tf.int32)
        return Sparse(indices, tf.gather(acc, indices), traced.length(gradient))

    def _threshold(self, magnitude: tf.Tensor, k: int, seed: int) -> tf.Tensor:
        """Return the magnitude that about margin * k entries reach, estimated from a sample."""
        size = tf.size(magnitude)
        samples = tf.cast(self.sampled * tf.cast(size, tf.float32), tf.int32)
        samples = tf.maximum(samples, self.at_least)
        seeds = tf.stack([tf.cast(seed, tf.int64), tf.constant(0, tf.int64)])
        drawn = tf.random.stateless_uniform([samples], seeds, 0, tf.maximum(size, 1), tf.int32)
        share = tf.cast(k, tf.float32) / tf.cast(tf.maximum(size, 1), tf.float32)
        rank = tf.math.ceil(self.margin * share * tf.cast(samples, tf.float32))
        rank = tf.clip_by_value(tf.cast(rank, tf.int32), 1, samples)
        return tf.reduce_min(tf.math.top_k(tf.gather(magnitude, drawn), rank).values)


def _check_k(k: Any, gradient: tf.Tensor, rule: str) -> None:
    """Require k entries in [1, n], or none of none, as `kernels.select` does for its rules."""
    size = traced.length(gradient)
    problem = f"Rule {rule!r} needs k in [1, n]. Received k={{}}, n={{}}. Change `density`."
    if isinstance(k, int) and isinstance(size, int):
        if not min(size, 1) <= k <= size:
            raise PlanError(problem.format(k, size))
        return
    k, problem = tf.cast(k, tf.int32), problem.format("a tensor", size)
    # A k beyond n would choose fewer entries than the buffers of the other ranks have room for
    tf.debugging.assert_less_equal(k, size, problem)
    tf.debugging.assert_greater_equal(k, tf.minimum(size, 1), problem)


def _magnitude(x: tf.Tensor) -> tf.Tensor:
    """Return |x|, with infinity for NaN, as float32 [n]; all denormals may compare as zero."""
    return tf.where(tf.math.is_finite(x), tf.abs(x), float("inf"))


DGC = Dgc()


@dataclass(frozen=True)
class Random:
    """Any k entries, every choice equally likely: a baseline that the other rules must beat."""

    def select(self, gradient: tf.Tensor, k: int, seed: int = 0) -> Sparse:
        """Choose k entries of float [n] at random, NaN and Inf first.

        **Ranks:** equal seeds choose equal entries of vectors of equal length, if all are finite.
        **Cost:** one random number per entry, and one selection of the largest of them.
        """
        acc = tf.cast(gradient, tf.float32)
        seeds = tf.stack([tf.cast(seed, tf.int64), tf.constant(1, tf.int64)])
        lots = tf.random.stateless_uniform(tf.shape(acc), seeds)
        lots = tf.where(tf.math.is_finite(acc), lots, float("inf"))
        indices = kernel.select(lots, k, seed, "exact").indices
        return Sparse(indices, tf.gather(acc, indices), traced.length(gradient))


RANDOM = Random()


@dataclass(frozen=True)
class Threshold:
    """Entries that reach a threshold first, then others.

    **Source:** Strom, Scalable Distributed DNN Training Using Commodity GPU Cloud Computing, 2015.
    There, all entries that reach the threshold travel, and only they. Here k entries always travel:
    if more than k reach the threshold, a random run of them; if fewer, all of them and a random run
    of the others.
    """

    # Magnitude, in units of the gradient, > 0
    threshold: float = 1e-3

    def select(self, gradient: tf.Tensor, k: int, seed: int = 0) -> Sparse:
        """Choose k entries of float [n], NaN and Inf first.

        **Ranks:** local.
        **Cost:** about eight passes, no sort of more than k entries.
        **Raises:** PlanError, or in the step InvalidArgumentError, if k is not in [1, n].
        """
        _check_k(k, gradient, "threshold")
        acc = tf.cast(gradient, tf.float32)
        bad = ~tf.math.is_finite(acc)
        reaching = ~bad & (tf.abs(acc) >= self.threshold)
        chosen = _positions(bad)[:k]
        for offset, candidates in enumerate((_positions(reaching), _positions(~bad & ~reaching))):
            need = tf.minimum(k - tf.size(chosen), tf.size(candidates))
            # Cast first, because a tensor wraps where a seed of 2^63 - 1 plus the offset does not
            # fit int64
            start = below(tf.cast(seed, tf.int64) + offset, tf.size(candidates) - need + 1)
            chosen = tf.concat([chosen, candidates[start : start + need]], 0)
        ascending = tf.ensure_shape(tf.sort(chosen), [k if isinstance(k, int) else None])
        indices = tf.cast(ascending, tf.int32)
        return Sparse(indices, tf.gather(acc, indices), traced.length(gradient))


def _positions(mask: tf.Tensor) -> tf.Tensor:
    return tf.where(mask)[:, 0]  # Int64: TensorFlow moves a GPU's int32 through the host


THRESHOLD = Threshold()

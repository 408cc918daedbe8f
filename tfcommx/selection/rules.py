"""The rules of selection: which k entries of a gradient are sent; the package has their table."""

from dataclasses import dataclass
from typing import Any, NamedTuple

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

    The two thresholds of "mstopk" are the edges of the bin in which the k-th largest magnitude
    lies. A bin is 1/4096 wide, relative to its magnitude: the chosen entries differ from the exact
    top k only within it.

    **Source:** Shi et al., Towards Scalable Distributed Training of Deep Learning on Public Cloud
    Clusters, 2021, Algorithm 1. We count in bins instead of searching by halves, because all edges
    together cost one pass, and each threshold of a search costs one. `BinarySearch` has the paper's
    thresholds.
    """

    # Name of the rule in the kernel: "exact" or "mstopk"
    name: str

    def select(self, gradient: tf.Tensor, k: int, seed: int = 0) -> Sparse:
        """Choose k entries; see `kernels.select.select`."""
        return kernel.select(gradient, k, seed, self.name)


EXACT = NativeSelector("exact")
MSTOPK = NativeSelector("mstopk")


@dataclass(frozen=True)
class BinarySearch:
    """MSTopK with the thresholds of its paper: a search by halves, a pass for each one tried.

    Thresholds t lie between the mean and the largest magnitude. After some halvings, thres1 is the
    one that the most entries reach, but no more than k; thres2 that which the fewest reach, but
    more than k:

        mean <-------- thres2 -- k-th largest -- thres1 --------> largest
                         |  a random run of   |   all of
                            these entries         these

    **Source:** Shi et al., Towards Scalable Distributed Training of Deep Learning on Public Cloud
    Clusters, 2021, Algorithm 1, which calls the number of thresholds N and takes 30 (section 5.2).
    As there, thres2 is 0 if fewer than k entries exceed the mean: the others are then a random run
    of all smaller entries, whereas "mstopk" still takes the largest. We differ where the paper's
    result is not k entries: if no threshold is reached by 1 to k entries, as with equal magnitudes,
    its thres1 stays 0 and takes everything; ours is infinite. NaN and Inf are chosen first, and
    indices ascend.
    """

    # Number of thresholds that are tried, >= 1: N in the paper
    searches: int = 30

    def select(self, gradient: tf.Tensor, k: int, seed: int = 0) -> Sparse:
        """Choose k entries of float [n] by two thresholds.

        **Ranks:** local.
        **Cost:** `searches` + 8 passes of float64.
        **Raises:** PlanError, or in the step InvalidArgumentError, if k is not in [1, n].
        """
        kernel.check_k(k, gradient, "binary_search")
        acc = tf.cast(gradient, tf.float32)
        finite = tf.math.is_finite(acc)
        # In float64, because a sum of magnitudes may overflow; -1 reaches no threshold
        magnitude = tf.where(finite, tf.abs(tf.cast(acc, tf.float64)), -1.0)
        chosen = _positions(~finite)[:k]
        wanted = tf.cast(k, tf.int64) - tf.size(chosen, tf.int64)
        upper, lower = self._thresholds(magnitude, wanted)
        above = _positions(magnitude >= upper)
        between = _positions((magnitude >= lower) & (magnitude < upper))
        need = tf.cast(wanted - tf.size(above, tf.int64), tf.int32)
        start = below(seed, tf.size(between) - need + 1)
        window = between[start : start + need]
        return _sparse(tf.concat([chosen, above, window], 0), acc, k)

    def _thresholds(self, magnitude: tf.Tensor, k: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """Return thres1, which at most k magnitudes reach, and thres2, which more than k reach."""
        # 1 if no entry is finite, where the sum is 0, too
        counted = tf.maximum(tf.math.count_nonzero(magnitude >= 0), 1)
        mean = tf.reduce_sum(tf.maximum(magnitude, 0.0)) / tf.cast(counted, tf.float64)
        largest = tf.reduce_max(magnitude)

        def halve(search: _Search) -> list[_Search]:
            ratio = search.left + (search.right - search.left) / 2
            threshold = mean + ratio * (largest - mean)
            reached = tf.math.count_nonzero(magnitude >= threshold)
            few = reached <= k
            first, second = few & (reached > search.k1), ~few & (reached < search.k2)
            return [
                _Search(
                    search.tried + 1,
                    tf.where(few, search.left, ratio),
                    tf.where(few, ratio, search.right),
                    tf.where(first, reached, search.k1),
                    tf.where(first, threshold, search.thres1),
                    tf.where(second, reached, search.k2),
                    tf.where(second, threshold, search.thres2),
                )
            ]

        zero, one, infinite = (tf.constant(x, tf.float64) for x in (0.0, 1.0, float("inf")))
        nothing, everything = tf.constant(0, tf.int64), tf.size(magnitude, tf.int64)
        begin = _Search(tf.constant(0), zero, one, nothing, infinite, everything, zero)
        (found,) = tf.while_loop(lambda search: search.tried < self.searches, halve, [begin])
        return found.thres1, found.thres2


class _Search(NamedTuple):
    """The variables of Algorithm 1, by its names; all are scalars."""

    # Number of thresholds so far
    tried: tf.Tensor
    # Ends of the interval of ratios: l and r in the paper
    left: tf.Tensor
    right: tf.Tensor
    # Entries that reach thres1, and those that reach thres2
    k1: tf.Tensor
    thres1: tf.Tensor
    k2: tf.Tensor
    thres2: tf.Tensor


BINARY_SEARCH = BinarySearch()


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
        kernel.check_k(k, gradient, "dgc")
        acc = tf.cast(gradient, tf.float32)
        # NaN counts as infinite; all denormals may compare as zero
        magnitude = tf.where(tf.math.is_finite(acc), tf.abs(acc), float("inf"))
        reaching = _positions(magnitude >= self._threshold(magnitude, k, seed))
        reaching = tf.cond(
            tf.size(reaching) >= k,
            lambda: reaching,
            lambda: tf.range(tf.cast(tf.size(acc), tf.int64)),
        )
        largest = tf.math.top_k(tf.gather(magnitude, reaching), k).indices
        return _sparse(tf.gather(reaching, largest), acc, k)

    def _threshold(self, magnitude: tf.Tensor, k: int, seed: int) -> tf.Tensor:
        """Return the magnitude that about margin * k entries reach, estimated from a sample."""
        size = tf.size(magnitude)
        samples = tf.cast(self.sampled * tf.cast(size, tf.float32), tf.int32)
        # None of an empty gradient
        samples = tf.maximum(samples, self.at_least) * tf.minimum(size, 1)
        seeds = tf.stack([tf.cast(seed, tf.int64), tf.constant(0, tf.int64)])
        drawn = tf.random.stateless_uniform([samples], seeds, 0, tf.maximum(size, 1), tf.int32)
        share = tf.cast(k, tf.float32) / tf.cast(tf.maximum(size, 1), tf.float32)
        rank = tf.math.ceil(self.margin * share * tf.cast(samples, tf.float32))
        rank = tf.minimum(tf.cast(rank, tf.int32), samples)
        return tf.reduce_min(tf.math.top_k(tf.gather(magnitude, drawn), rank).values)


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
        kernel.check_k(k, gradient, "threshold")
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
        return _sparse(chosen, acc, k)


def _positions(mask: tf.Tensor) -> tf.Tensor:
    return tf.where(mask)[:, 0]  # Int64: TensorFlow moves a GPU's int32 through the host


def _sparse(positions: tf.Tensor, acc: tf.Tensor, k: Any) -> Sparse:
    """Return the entries at k positions, int64 in any order."""
    # Ascending, because most wire formats take indices in order
    ascending = tf.ensure_shape(tf.sort(positions), [k if isinstance(k, int) else None])
    indices = tf.cast(ascending, tf.int32)
    return Sparse(indices, tf.gather(acc, indices), traced.length(acc))


THRESHOLD = Threshold()

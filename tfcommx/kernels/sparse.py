"""Merge (index, value) pairs into a vector; keep their rounding errors as residual."""

import contextlib
from typing import Any

import tensorflow as tf

from tfcommx.core import Sparse
from tfcommx.kernels import loader, traced


def keep(residual: tf.Variable, chosen: Sparse, errors: tf.Tensor) -> None:
    """Write errors into the residual, at the indices of the chosen entries.

    >>> residual = tf.Variable([5.0, 0.0, 7.0])
    >>> keep(residual, Sparse(tf.constant([1]), tf.constant([1.5]), 3), tf.constant([0.25]))
    >>> residual.numpy().tolist()
    [5.0, 0.25, 7.0]

    The selection has set the residual to zero at these indices. If a value is NaN or infinite, it
    has no error, and the residual is unchanged.

    Args:
        residual: a float32 variable [n], updated in place.
        chosen: indices int32 [k] in [0, n), unique; values float32 [k], before rounding.
        errors: float32 [k].

    **Ranks:** local. **Cost:** one pass over k entries.
    **Raises:** InvalidArgumentError if an index is out of range; a GPU skips it.
    """
    ops = loader.library()
    if ops is None:
        keep_definition(residual, chosen, errors)
        return
    ops.tfcommx_keep(
        residual=residual.handle, indices=chosen.indices, values=chosen.values, errors=errors
    )


def keep_definition(residual: tf.Variable, chosen: Sparse, errors: tf.Tensor) -> None:
    """Define `keep` in plain TensorFlow."""
    finite = tf.where(tf.math.is_finite(chosen.values))[:, 0]
    with tf.device(residual.device):
        indices = tf.gather(chosen.indices, finite)
        residual.scatter_update(tf.IndexedSlices(tf.gather(errors, finite), indices))


def merge(indices: Any, values: Any, size: int, k: int = 0) -> tf.Tensor:
    """Add (index, value) pairs into zeros, float32 [size], each entry's in the order of the list.

    >>> merge(tf.constant([2, 0, 2]), tf.constant([1.0, 4.0, 0.5]), size=4).numpy().tolist()
    [4.0, 0.0, 1.5, 0.0]

    Args:
        indices: int32 [pairs] in [0, size), repeats allowed.
        values: float32 [pairs].
        size: length of the result, in [0, 2^31).
        k: length of the ascending runs without a repeated index that the list consists of, as ranks
            send them; 0: any list, which CPUs merge.

    **Ranks:** local; equal lists give bit-identical results on every rank.
    **Cost:** one write of the result, no sort. If every run is ascending, the indices are read
    twice and the values once; any other list is read once by each of at most 16 threads. A GPU
    reads the pairs once.
    **Raises:** InvalidArgumentError if an index is outside [0, size). A GPU returns NaN in entry 0
    instead, also if a run is not ascending.
    """
    ops = loader.library()
    if ops is None:
        with tf.device("/cpu:0"):  # Because a GPU adds in any order, and ranks would differ
            return merge_definition(indices, values, size)
    with contextlib.nullcontext() if k else tf.device("/cpu:0"):
        return ops.tfcommx_merge(indices=indices, values=values, size=traced.int64(size), k=k)


def merge_definition(indices: tf.Tensor, values: tf.Tensor, size: int) -> tf.Tensor:
    """Define `merge` in plain TensorFlow.

    It adds in the order of the list only on CPUs. On other devices TensorFlow chooses the order, on
    which the last bit depends.
    """
    return tf.math.unsorted_segment_sum(values, indices, size)

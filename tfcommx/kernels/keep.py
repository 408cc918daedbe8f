"""Keep: what rounding leaves of selected entries goes into their residual."""

from __future__ import annotations

import tensorflow as tf

from tfcommx.kernels import loader
from tfcommx.terms import Sparse


def keep(residual: tf.Variable, chosen: Sparse, errors: tf.Tensor) -> None:
    """Write errors into the residual, at the indices of what was chosen.

    >>> residual = tf.Variable([5.0, 0.0, 7.0])
    >>> keep(residual, Sparse(tf.constant([1]), tf.constant([1.5]), 3), tf.constant([0.25]))
    >>> residual.numpy().tolist()
    [5.0, 0.25, 7.0]

    The selection has set the residual to zero there, except where a value is NaN or infinite: it
    has no error, and the residual stays.

    Args:
        residual: a float32 variable [n], updated in place.
        chosen: indices int32 [k] in [0, n), none twice; values float32 [k], before rounding.
        errors: float32 [k].

    **Ranks:** local. **Cost:** one pass over k entries.
    **Raises:** InvalidArgumentError if an index is outside; a GPU leaves it out.
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
        there = tf.gather(chosen.indices, finite)
        residual.scatter_update(tf.IndexedSlices(tf.gather(errors, finite), there))

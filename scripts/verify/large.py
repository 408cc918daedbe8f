#!/usr/bin/env python3
"""Claim: selection is right for a gradient of more than 2^31 entries, cut at the kernel's limit.

    python scripts/verify/large.py            # 22 GB of memory, a minute and a half

A float16 gradient of 2^31 + 1000 normal entries is selected from in two calls, of 2^31 - 1 entries
(the most that one takes) and of the rest, with float32 residuals of zeros. Checked: k indices,
ascending, also beyond 2^30; values equal to the gradient there; residual zero there and equal to
the gradient in samples elsewhere; nothing kept is larger than what was sent.
"""

from __future__ import annotations

import os
import time

# oneDNN's allocator takes memory in doubling regions, more than there may be.
os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "0")

import tfcommx.cli.load_quietly  # noqa: F401

# isort: split
import numpy as np
import tensorflow as tf

from tfcommx.kernels import loader, select

LENGTHS = (2**31 - 1, 1001)
DENSITY = 0.001


def main() -> None:
    if loader.library() is None:
        raise SystemExit(f"The native library is needed. {loader.REBUILD}")
    for length in LENGTHS:
        # tf.random.normal would make two more copies.
        gradient = tf.raw_ops.RandomStandardNormal(shape=[length], dtype=tf.float16, seed=1)
        residual, k = tf.Variable(tf.zeros([length])), max(1, int(DENSITY * length))
        start = time.perf_counter()
        chosen = select.select_with_residual(gradient, residual, k, 1, "exact")
        seconds = time.perf_counter() - start
        indices, values = chosen.indices.numpy(), chosen.values.numpy()
        assert (
            indices.size == k
            and (np.diff(indices) > 0).all()
            and indices[0] >= 0
            and indices[-1] < length
        )
        # So also beyond the end of a signed product of 32 bits.
        assert k < 1000 or indices[-1] > 0.99 * length
        np.testing.assert_array_equal(
            values, tf.cast(tf.gather(gradient, chosen.indices), tf.float32)
        )
        np.testing.assert_array_equal(tf.gather(residual, chosen.indices), np.zeros(k, np.float32))
        sample = np.random.default_rng(1).integers(length, size=1_000_000, dtype=np.int32)
        sample = sample[~np.isin(sample, indices)]
        np.testing.assert_array_equal(
            tf.gather(residual, sample), tf.cast(tf.gather(gradient, sample), tf.float32)
        )
        kept = max(tf.reduce_max(residual).numpy(), -tf.reduce_min(residual).numpy())
        assert kept <= np.abs(values).min()
        print(f"{length:,} entries, {k:,} chosen: right, in {seconds:.2f} s", flush=True)


if __name__ == "__main__":
    main()

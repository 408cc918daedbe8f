"""Rule mstopk selects all entries above its band, most of the magnitude, and a fair window."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf
from selection_helpers import IMPLEMENTATIONS
from vectors import make

from tfcommx.kernels import select

pytestmark = pytest.mark.usefixtures("library")


@pytest.mark.parametrize("kind", ["normal", "laplace"])
@pytest.mark.parametrize("density", [0.0001, 0.001, 0.01, 0.1])
def test_mstopk_takes_all_above_the_band_and_captures_the_magnitude(kind, density):
    n = 400_000
    k = max(1, int(n * density))
    gradient = tf.constant(make(kind, n, 2))
    size = np.abs(gradient.numpy())
    indices = select.select(gradient, k, 11, "mstopk").indices.numpy()
    exact = select.select(gradient, k, 11, "exact").indices.numpy()
    assert size[indices].sum() >= 0.99 * size[exact].sum()
    upper = np.sort(size)[-k] * (1 + 2.0**-12)  # the band is not wider
    assert np.isin(np.flatnonzero(size > upper), indices).all()
    assert (size[indices] >= np.sort(size)[-k] / (1 + 2.0**-12)).all()


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_the_window_is_fair(implementation):
    """12 equal entries in the band, 5 wanted: each of the 8 windows is equally likely."""
    gradient = np.zeros(30, np.float32)
    gradient[5:29:2] = 1.0
    gradient[[0, 3]] = -4.0
    band = list(range(5, 29, 2))
    draws = 800
    counts = np.zeros(8)
    choose = tf.function(
        lambda seed: (
            IMPLEMENTATIONS[implementation].select(tf.constant(gradient), 7, seed, "mstopk").indices
        ),
        autograph=False,
    )
    for seed in range(draws):
        indices = choose(tf.constant(seed, tf.int64)).numpy()
        assert indices[0] == 0 and indices[1] == 3
        start = band.index(indices[2])
        assert list(indices[2:]) == band[start : start + 5]
        counts[start] += 1
    # chi-square with 7 degrees of freedom: 29.9 is exceeded once in 10,000 fair draws
    assert ((counts - draws / 8) ** 2 / (draws / 8)).sum() < 29.9, counts


def test_splitmix64_is_the_published_one():
    assert int(select.splitmix64(0)) == 0xE220A8397B1DCDAF
    assert int(select.splitmix64(1)) == 0x910A2DEC89025CC1

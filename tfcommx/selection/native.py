"""Rules of the native selection kernel, which fuses the choice with error feedback in one pass."""

from __future__ import annotations

from dataclasses import dataclass

import tensorflow as tf

from tfcommx.kernels import select as kernel
from tfcommx.terms import Sparse


@dataclass(frozen=True)
class NativeSelector:
    """A rule of `kernels.select`."""

    # As the kernel names it: "exact" or "mstopk"
    name: str

    def select(self, gradient: tf.Tensor, k: int, seed: int = 0) -> Sparse:
        """Choose k entries; see `kernels.select.select`."""
        return kernel.select(gradient, k, seed, self.name)

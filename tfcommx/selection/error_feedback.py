"""Define a selection rule: a selector with error feedback around it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import tensorflow as tf

from tfcommx.core import Sparse
from tfcommx.kernels import select as kernel
from tfcommx.selection.rules import NativeSelector


class Selector(Protocol):
    """Chooses the entries of a vector that travel; each rule defines one."""

    def select(self, gradient: tf.Tensor, k: int, seed: int = 0) -> Sparse:
        """Choose k entries of a vector.

        Args:
            gradient: float [n].
            k: entries to choose, in [1, n].
            seed: int64, for rules that choose at random.

        Returns:
            Sparse: indices int32 [k] ascending and unique, values float32 [k]. Both shapes are
            known while tracing if k is a number.

        **Ranks:** local; equal inputs and seeds give equal results.
        """
        ...


@dataclass(frozen=True)
class Rule:
    """A selector with error feedback and momentum correction around it, as the runtime uses it."""

    # Has no access to residuals, which this class adds to any selector
    selector: Selector

    def select(self, gradient: tf.Tensor, k: int, seed: int = 0) -> Sparse:
        """Choose k entries of a vector without a residual, as the selector does."""
        return self.selector.select(gradient, k, seed)

    def select_with_residual(
        self,
        gradient: tf.Tensor,
        residual: tf.Variable,
        k: int,
        seed: int = 0,
        velocity: tf.Variable | None = None,
        momentum: float = 0.0,
    ) -> Sparse:
        """Choose k entries of gradient + residual; the residual keeps the others.

        With a velocity, it applies momentum correction.

        Args:
            gradient, k, seed: as `select`.
            residual, velocity: float32 [n] variables, updated in place.
            momentum: in [0, 1).

        **Cost:** as `kernels.select.select_with_residual` for its rules; for other rules, about
        five passes in addition to the choice, and four more with a velocity.
        **Source:** see the equations in `kernels.select.with_error_feedback`.
        """
        if isinstance(self.selector, NativeSelector):
            return kernel.select_with_residual(
                gradient, residual, k, seed, self.selector.name, velocity, momentum
            )
        return kernel.with_error_feedback(
            lambda acc: self.selector.select(acc, k, seed), gradient, residual, velocity, momentum
        )

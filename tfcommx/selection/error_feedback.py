"""Error feedback and momentum correction, around any rule.

**Source:** see `kernels.select.with_error_feedback`, which has the equations.
"""

from __future__ import annotations

from dataclasses import dataclass

import tensorflow as tf

from tfcommx.kernels import select as kernel
from tfcommx.selection.base import Rule, Selector
from tfcommx.terms import Sparse


def with_error_feedback(selector: Selector) -> Rule:
    """Wrap error feedback around a rule; one whose kernel fuses both is returned as it is."""
    return selector if isinstance(selector, Rule) else ErrorFeedback(selector)


@dataclass(frozen=True)
class ErrorFeedback:
    """A rule whose choice is made from gradient + residual; a `Rule`."""

    # Chooses; knows nothing of residuals
    selector: Selector

    def select(self, gradient: tf.Tensor, k: int, seed: int = 0) -> Sparse:
        """Choose without a residual, as the rule does."""
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
        """Choose from gradient + residual; the residual keeps the others.

        **Cost:** some five passes besides the choice, four more with a velocity.
        """
        return kernel.with_error_feedback(
            lambda acc: self.selector.select(acc, k, seed), gradient, residual, velocity, momentum
        )

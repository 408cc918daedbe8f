"""Define a selection rule: a selector with error feedback around it."""

from dataclasses import dataclass
from typing import Any, Protocol

import tensorflow as tf

from tfcommx.core import PlanError, Sparse
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

    def select(self, gradient: Any, k: int, seed: int = 0) -> Sparse:
        """Choose k entries of a vector without a residual, as the selector does.

        Args:
            gradient: a tensor, array or list [n]; float64 and integers are taken as float32.
            k, seed: as for the selector.

        **Raises:** PlanError if the gradient is no vector.
        """
        return self.selector.select(_vector(gradient), k, seed)

    def select_with_residual(
        self,
        gradient: Any,
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
        **Raises:** PlanError if the gradient is no vector.
        **Source:** see the equations in `kernels.select.with_error_feedback`.
        """
        gradient = _vector(gradient)
        # One kernel adds, chooses and keeps the rest, in fewer passes than separate operations
        if isinstance(self.selector, NativeSelector):
            return kernel.select_with_residual(
                gradient, residual, k, seed, self.selector.name, velocity, momentum
            )
        return kernel.with_error_feedback(
            lambda acc: self.selector.select(acc, k, seed), gradient, residual, velocity, momentum
        )


def _vector(gradient: Any) -> tf.Tensor:
    """Return a vector as a tensor of a dtype that every rule takes."""
    vector = tf.convert_to_tensor(gradient)
    if vector.shape.rank not in (None, 1):
        raise PlanError(
            f"A selection rule chooses from a vector. Received shape {tuple(vector.shape)}. "
            "Flatten it: tf.reshape(gradient, [-1])."
        )
    # Others are cast to the dtype of the residual, because a wider sum could not be kept
    taken = (tf.float32, tf.float16, tf.bfloat16)
    return vector if vector.dtype in taken else tf.cast(vector, tf.float32)

"""What a selection rule is, as types."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, runtime_checkable

from tfcommx.terms import Sparse

if TYPE_CHECKING:
    import tensorflow as tf


class Selector(Protocol):
    """What a rule's own file defines: which entries of a vector travel."""

    def select(self, gradient: tf.Tensor, k: int, seed: int = 0) -> Sparse:
        """Choose k entries of a vector.

        Args:
            gradient: float [n].
            k: entries to choose, in [1, n].
            seed: int64, of rules that choose at random.

        Returns:
            Sparse: indices int32 [k] ascending and unique, values float32 [k]. Both shapes are
            known while tracing if k is a number.

        **Ranks:** local; equal inputs and seeds give equal results.
        """
        ...


@runtime_checkable
class Rule(Selector, Protocol):
    """What the runtime holds: a rule that also keeps what does not travel."""

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

        With a velocity, momentum is corrected for: see `kernels.select.select_with_residual`.

        Args:
            gradient, k, seed: as `select`.
            residual, velocity: float32 [n] variables, updated in place.
            momentum: in [0, 1).
        """
        ...

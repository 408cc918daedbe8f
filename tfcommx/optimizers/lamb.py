"""LAMB: Adam whose rate follows the norms of each variable and of its update."""

from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from tfcommx.core import check_number
from tfcommx.optimizers.layerwise import EXCLUDED, LayerwiseOptimizer


@keras.saving.register_keras_serializable("tfcommx")
class LAMB(LayerwiseOptimizer):
    """Layer-wise adaptive moments, for large batches of Transformers.

    For each variable w with gradient g, in step t:

        m = m + (1 - beta_1) (g - m)
        v = v + (1 - beta_2) (g^2 - v)
        u = m / (1 - beta_1^t) / (sqrt(v / (1 - beta_2^t)) + epsilon) + weight_decay w
        w = w - learning_rate |w| / |u| u

    The ratio |w| / |u| is 1 where |w| or |u| is 0. Excluded variables have the ratio 1 and no
    weight decay.

    `keras.optimizers.Lamb` differs: it subtracts weight decay before the update, outside the ratio,
    and excludes no variable from the ratio. With `decay_in_ratio=False` and `exclude=()` the
    results equal Keras's, to float32 rounding.

    >>> import tfcommx as cx
    >>> optimizer = cx.optimizers.LAMB(0.01, weight_decay=0.01)
    >>> weight = keras.Variable([3.0, 4.0])
    >>> optimizer.apply([tf.constant([1.0, 1.0])], [weight])
    >>> [round(float(entry), 3) for entry in weight.numpy()]
    [2.965, 3.964]

    Args:
        learning_rate: a number, a schedule or a function, as for every Keras optimizer.
        beta_1: in [0, 1).
        beta_2: in [0, 1).
        epsilon: > 0.
        weight_decay: >= 0; None: none.
        decay_in_ratio: True: weight decay is part of the update and its norm, as in the paper.
            False: learning_rate weight_decay w is subtracted before the update, as in Keras.
        exclude: patterns of variable paths, as in file names.
        norms: as in `LARS`.
        keras_options: as in `LARS`.

    **Ranks:** local; `cx.DistributedOptimizer` wraps it as any other. Equal gradients result in
    equal weights on every rank, bit by bit.
    **Cost:** Adam's, and one pass over weights and updates; memory for all updates at once.
    **Raises:** ConfigurationError for numbers out of range.
    **Source:** You et al., "Large Batch Optimization for Deep Learning: Training BERT in 76
    minutes" (2020), Algorithm 2 with phi(z) = z. The paper excludes no variable; its code for BERT
    excludes biases and layer normalisation, as the default here.
    """

    def __init__(
        self,
        learning_rate: Any = 0.001,
        beta_1: float = 0.9,
        beta_2: float = 0.999,
        epsilon: float = 1e-7,
        weight_decay: float | None = None,
        decay_in_ratio: bool = True,
        exclude: Sequence[str] = EXCLUDED,
        norms: str = "local",
        **keras_options: Any,
    ) -> None:
        super().__init__(learning_rate, weight_decay, exclude, norms, **keras_options)
        self.beta_1 = check_number("beta_1", beta_1, "in [0, 1)")
        self.beta_2 = check_number("beta_2", beta_2, "in [0, 1)")
        self.epsilon = check_number("epsilon", epsilon, "> 0")
        self.decay_in_ratio = bool(decay_in_ratio)

    def build(self, variables: Sequence[keras.Variable]) -> None:
        """Create two moments for each variable."""
        if self.built:
            return
        super().build(variables)
        self._momentums, self._velocities = self.add_optimizer_variables(
            variables, ["momentum", "velocity"]
        )

    def update_together(
        self,
        gradients: Sequence[tf.Tensor],
        variables: Sequence[tf.Variable],
        positions: Sequence[int],
        learning_rate: Any,
    ) -> None:
        """Update all variables, after computing all updates and their norms."""
        parts = zip(gradients, variables, positions, strict=True)
        # All updates before any is applied, because one operation computes the norms of all
        updates = [self.adam(*part) for part in parts]
        self.apply_updates(updates, variables, positions, learning_rate)

    def apply_updates(
        self,
        updates: Sequence[tf.Tensor],
        variables: Sequence[tf.Variable],
        positions: Sequence[int],
        learning_rate: Any,
    ) -> None:
        """Add weight decay to Adam's updates; move the weights by them and their ratios."""
        decayed = []
        for update, variable, position in zip(updates, variables, positions, strict=True):
            if decay := self.decay_of(position):
                if self.decay_in_ratio:
                    update += decay * variable
                else:
                    rate = tf.cast(learning_rate, variable.dtype)
                    # Before the norm of the weights is taken, as in keras.optimizers.Lamb
                    variable.assign_sub(variable * decay * rate)
            decayed.append(update)
        ratios = self.ratios(
            positions, variables, decayed, lambda weight, update, _: weight / update
        )
        rates = tf.unstack(tf.cast(learning_rate, tf.float32) * ratios)
        for variable, update, rate in zip(variables, decayed, rates, strict=True):
            variable.assign_sub(tf.cast(rate, variable.dtype) * update)

    def adam(self, gradient: tf.Tensor, variable: tf.Variable, position: int) -> tf.Tensor:
        """Update the moments of a variable; return Adam's update without its rate."""
        gradient = tf.cast(gradient, variable.dtype)
        mean, square = self._momentums[position].value, self._velocities[position].value
        mean.assign_add((gradient - mean) * (1 - self.beta_1))
        square.assign_add((tf.square(gradient) - square) * (1 - self.beta_2))
        # In float32, because the usual beta_2 of .999 is 1 in bfloat16
        step = tf.cast(self.iterations, tf.float32) + 1.0
        first, second = (
            tf.cast(1.0 - tf.pow(beta, step), gradient.dtype) for beta in (self.beta_1, self.beta_2)
        )
        return (mean / first) / (tf.sqrt(square / second) + self.epsilon)

    def get_config(self) -> dict[str, Any]:
        return {
            **super().get_config(),
            "beta_1": self.beta_1,
            "beta_2": self.beta_2,
            "epsilon": self.epsilon,
            "decay_in_ratio": self.decay_in_ratio,
        }

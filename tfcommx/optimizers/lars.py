"""LARS: stochastic gradient descent whose rate follows the norms of each variable."""

from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from tfcommx.core import check_number
from tfcommx.keras_internals.step import compiled_by_xla
from tfcommx.kernels.lars import lars_update, lars_update_definition
from tfcommx.optimizers.layerwise import EXCLUDED, LayerwiseOptimizer


@keras.saving.register_keras_serializable("tfcommx")
class LARS(LayerwiseOptimizer):
    """Layer-wise adaptive rate scaling, for large batches of convolutional networks.

    For each variable w with gradient g:

        ratio = trust_coefficient |w| / (|g| + weight_decay |w|)
        m     = momentum m - learning_rate ratio (g + weight_decay w)
        w     = w + m                 (Nesterov: w + momentum m - learning_rate ratio (g + ...))

    The ratio is 1 where |w| or |g| is 0, because weights of zero would otherwise never move.
    Excluded variables have the ratio 1 and no weight decay.

    >>> import tfcommx as cx
    >>> optimizer = cx.optimizers.LARS(2.0, weight_decay=1e-4)
    >>> weight = keras.Variable([3.0, 4.0])
    >>> optimizer.apply([tf.constant([1.0, 0.0])], [weight])
    >>> [round(float(entry), 4) for entry in weight.numpy()]
    [2.99, 4.0]

    Args:
        learning_rate: a number, a schedule or a function, as for every Keras optimizer.
        momentum: in [0, 1).
        nesterov: True: Nesterov momentum, as in the formula above.
        weight_decay: >= 0; part of the gradient and of the ratio. None: none.
        trust_coefficient: > 0.
        exclude: patterns of variable paths, as in file names.
        norms: "local", "parallel" or "auto", as in `cx.parallel_operator`. Sharing the computation
            seldom pays, because one native operation computes all norms. They are always local if
            ranks' weights may differ, or only one rank updates.
        keras_options: name, clipnorm, clipvalue, global_clipnorm, use_ema, ema_momentum,
            ema_overwrite_frequency, loss_scale_factor, gradient_accumulation_steps.

    **Ranks:** local; `cx.DistributedOptimizer` wraps it as any other. Equal gradients result in
    equal weights on every rank, bit by bit.
    **Cost:** one pass over weights and gradients for the norms, one for the update; a momentum for
    each weight.
    **Raises:** ConfigurationError for numbers out of range.
    **Source:** You, Gitman, Ginsburg, "Large Batch Training of Convolutional Networks" (2017),
    Algorithm 1; equation 11 of Shi et al., "Towards Scalable Distributed Training of Deep Learning
    on Public Cloud Clusters" (2021), whose gamma is `trust_coefficient` and whose epsilon is
    `weight_decay`. The papers exclude no variable. Where Shi et al. gather learning rates, ranks
    gather norms, which serve LAMB as well.
    """

    def __init__(
        self,
        learning_rate: Any = 1.0,
        momentum: float = 0.9,
        nesterov: bool = False,
        weight_decay: float | None = None,
        trust_coefficient: float = 0.001,
        exclude: Sequence[str] = EXCLUDED,
        norms: str = "local",
        **keras_options: Any,
    ) -> None:
        super().__init__(learning_rate, weight_decay, exclude, norms, **keras_options)
        self.momentum = check_number("momentum", momentum, "in [0, 1)")
        self.nesterov = bool(nesterov)
        self.trust_coefficient = check_number("trust_coefficient", trust_coefficient, "> 0")

    def build(self, variables: Sequence[keras.Variable]) -> None:
        """Create a momentum for each variable."""
        if self.built:
            return
        super().build(variables)
        self.momentums = self.add_optimizer_variables(variables, "momentum")

    def update_together(
        self,
        gradients: Sequence[tf.Tensor],
        variables: Sequence[tf.Variable],
        positions: Sequence[int],
        learning_rate: Any,
    ) -> None:
        """Update all variables, after computing their ratios."""
        trust = self.trust_coefficient
        ratios = self.ratios(
            positions,
            variables,
            gradients,
            lambda weight, gradient, decay: trust * weight / (gradient + decay * weight),
        )
        rates = tf.cast(learning_rate, tf.float32) * ratios
        decays = [self.decay_of(position) for position in positions]
        momenta = [self.momentums[position].value for position in positions]
        options = (decays, self.momentum, self.nesterov)
        # XLA cannot compile the native operation, which is for float32 alone. By plain operations a
        # step takes 5 to 10 times as long
        if not compiled_by_xla() and all(variable.dtype == tf.float32 for variable in variables):
            gradients = [tf.cast(gradient, tf.float32) for gradient in gradients]
            lars_update(variables, momenta, gradients, rates, *options)
            return
        lars_update_definition(variables, momenta, gradients, rates, *options)

    def get_config(self) -> dict[str, Any]:
        return {
            **super().get_config(),
            "momentum": self.momentum,
            "nesterov": self.nesterov,
            "trust_coefficient": self.trust_coefficient,
        }

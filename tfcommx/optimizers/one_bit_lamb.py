"""OneBitLAMB: LAMB that sends its momentum in 1 bit an entry after learning its second moments."""

from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from tfcommx.keras_internals.optimizers import values_of
from tfcommx.optimizers.frozen_moments import FreezesSecondMoments
from tfcommx.optimizers.lamb import LAMB


@keras.saving.register_keras_serializable("tfcommx")
class OneBitLAMB(FreezesSecondMoments, LAMB):
    """LAMB that sends its momentum, in few bits, after a phase in which it learns its scales.

    The phases, the momentum m and the second moments v are those of `cx.optimizers.OneBitAdam`: in
    the first, ranks exchange gradients in `learning_wire`, and every rank runs LAMB; then v is
    frozen, at the same step on all ranks, and m travels by the scheme. From then on

        s = m / (1 - beta_1^t) / (sqrt(v) + epsilon)
        u = s / max(|s|, 1) + weight_decay w
        w = w - learning_rate |w| / |u| u

    So the ratio is still that of each step, and a step is as long as LAMB's, learning_rate |w|.
    Rounding to 1 bit makes m shorter, by a quarter in trials, which the ratio makes up for. As v no
    longer follows the gradients, u shrinks with them, and weight decay has a larger share of it.

    Variables of one dimension or of few entries, and those that `exclude` matches, are always
    updated by LAMB, with gradients in bfloat16, because they are few or sensitive.

    >>> import keras
    >>> import tfcommx as cx
    >>> _ = cx.init()
    >>> lamb = cx.optimizers.OneBitLAMB(0.005, weight_decay=0.01)
    >>> optimizer = cx.DistributedOptimizer(lamb, cx.Scheme("asa", wire="int1"))

    Not wrapped, it freezes v in the same way and sends nothing.

    Args:
        learning_rate: as in `cx.optimizers.LAMB`.
        freeze_after, dense_below, learning_wire: as in `cx.optimizers.OneBitAdam`.
        options: the other arguments of `cx.optimizers.LAMB`. Variables that `exclude` matches have
            the ratio 1 and no weight decay, and send gradients in both phases. `clipnorm`,
            `clipvalue` and `global_clipnorm` are as in `cx.optimizers.OneBitAdam`.

    **Ranks:** as `cx.DistributedOptimizer`, with strategy "synchronous" and op "average".
    **Cost:** LAMB's, and that of the exchange of `cx.optimizers.OneBitAdam`.
    **Raises:** ConfigurationError for numbers out of range.
    **Source:** Li et al., "1-bit LAMB: Communication Efficient Large-Scale Large-Batch Training
    with LAMB's Convergence Speed" (2021), algorithm 1. There the ratio is frozen with v, as its
    running mean, and multiplied by a clipped factor that compares v with second moments of
    gradients reconstructed from m. Here the ratio is that of the received momentum, which needs no
    state or threshold, and trained a small network as well as the paper's. The floor of v and its
    correction are those of OneBitAdam.
    """

    def __init__(
        self,
        learning_rate: Any = 0.001,
        *,
        freeze_after: int | None = None,
        dense_below: int = 1024,
        learning_wire: str = "bfloat16",
        **options: Any,
    ) -> None:
        super().__init__(learning_rate, **options)
        self.set_phases(freeze_after, dense_below, learning_wire)

    def update_by_momenta(
        self, received: Sequence[tf.Tensor], variables: Sequence[keras.Variable], learning_rate: Any
    ) -> None:
        """Update by the received momenta, the frozen second moments and the ratios."""
        values, positions = values_of(variables), list(map(self.position_of, variables))
        updates = [
            self.receive(result, value)
            if self.sends_momentum(variable)
            else self.adam(result, value, position)
            for result, variable, value, position in zip(
                received, variables, values, positions, strict=True
            )
        ]
        self.apply_updates(updates, values, positions, learning_rate)

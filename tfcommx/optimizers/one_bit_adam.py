"""OneBitAdam: Adam that sends its momentum in 1 bit an entry after learning its second moments."""

from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from tfcommx.core import ConfigurationError, check_number
from tfcommx.optimizers.frozen_moments import FreezesSecondMoments
from tfcommx.optimizers.layerwise import check_patterns


@keras.saving.register_keras_serializable("tfcommx")
class OneBitAdam(FreezesSecondMoments, keras.optimizers.Adam):
    """Adam that sends its momentum, in few bits, after a phase in which it learns its scales.

    Gradients in 1 bit spoil Adam, because squares of their noise enter the second moments, and
    momentum amplifies it. Training therefore has two phases. In the first, ranks exchange gradients
    g in `learning_wire`, and every rank runs Keras's Adam. Then the second moments v are frozen, at
    the same step on all ranks. From then on rank i adds the momentum m, which is equal on all
    ranks, to its own gradient, and sends the result by the scheme, with error feedback:

        u_i = g_i + beta_1 / (1 - beta_1) m
        m = (1 - beta_1) (mean over the ranks of u_i, as received)
        s = m / (1 - beta_1^t) / (sqrt(v) + epsilon)
        w = w - learning_rate s / max(|s|, 1)

    where v is v / (1 - beta_2^t) of the step t at which it was frozen. It is raised to at least 1 %
    of the mean of its variable's nonzero entries, because entries that are 0 by then, such as rows
    of an embedding that have not occurred, would turn noise into steps. No entry moves by more than
    the learning rate, because 1 bit gives an entry of small momentum the mean magnitude of its
    block.

    Variables of one dimension or of few entries, and those that `exclude` matches, are always
    updated by Adam, with gradients in bfloat16, because they are few or sensitive.

    >>> import keras
    >>> import tfcommx as cx
    >>> _ = cx.init()
    >>> adam = cx.optimizers.OneBitAdam(0.001)
    >>> optimizer = cx.DistributedOptimizer(adam, cx.Scheme("asa", wire="int1"))

    Not wrapped, it freezes v in the same way and sends nothing.

    Args:
        learning_rate, beta_1, beta_2, epsilon: as in Keras's Adam.
        freeze_after: updates after which v is frozen, >= 1; fewer than 1 / (1 - beta_2), which v
            averages, are warned of. None, which is safer: by the change of v. Every
            1 / (1 - beta_2) updates the sum of v / (1 - beta_2^t) is compared with the previous
            one; v is frozen if it has changed by less than 4 %, and the learning rate has not
            risen: not before 2 / (1 - beta_2) updates, 2,000 by default.
        exclude: patterns of variable paths, as in file names; such variables stay with Adam.
        dense_below: entries, >= 0; smaller variables also stay with Adam.
        learning_wire: wire format of gradients in the first phase: "float16", "bfloat16", "int8" or
            "int4". A shorter one costs fewer bytes in the first phase.
        keras_options: the other arguments of every Keras optimizer. Weight decay is decoupled, as
            in Keras. `clipnorm`, `clipvalue` and `global_clipnorm` clip the mean gradient in the
            first phase, and in the second each rank's own, before it enters the momentum.

    **Ranks:** as `cx.DistributedOptimizer`, with strategy "synchronous" and op "average".
    **Cost:** Adam's; in the second phase v is read, and not written. A residual of 4 bytes an entry
    on each rank (on "torus" divided by the slots of a node); with clipping, that of the first phase
    is dropped at the change, because its gradients were not yet clipped. A bucket is exchanged when
    its gradients exist, as with Adam; with clipping when all exist.
    **Raises:** ConfigurationError for numbers out of range, or `amsgrad`.
    **Source:** Tang et al., "1-bit Adam: Communication Efficient Large-Scale Training with Adam's
    Convergence Speed" (2021), algorithm 1. The paper has no floor for v and no bound of steps, does
    not correct m and v for their first steps, freezes v of all variables, and also while v still
    grows.

    With `freeze_after=None` v was frozen after some 250 updates on a small translation model
    (docs/laboratory/miniatures.md) and a small language model (docs/laboratory/training.md), and
    both came close to Adam. 67 updates were enough for the first; the second ended far behind.
    """

    def __init__(
        self,
        learning_rate: Any = 0.001,
        beta_1: float = 0.9,
        beta_2: float = 0.999,
        epsilon: float = 1e-7,
        freeze_after: int | None = None,
        exclude: Sequence[str] = (),
        dense_below: int = 1024,
        learning_wire: str = "bfloat16",
        **keras_options: Any,
    ) -> None:
        if keras_options.pop("amsgrad", False):
            raise ConfigurationError(
                "OneBitAdam freezes its second moments, and AMSGrad takes the largest of them. "
                "Received amsgrad=True. Leave it out."
            )
        super().__init__(
            learning_rate,
            check_number("beta_1", beta_1, "in [0, 1)"),
            check_number("beta_2", beta_2, "in [0, 1)"),
            check_number("epsilon", epsilon, "> 0"),
            **keras_options,
        )
        self.exclude = check_patterns(exclude)
        self.set_phases(freeze_after, dense_below, learning_wire)

    def update_by_momenta(
        self, received: Sequence[tf.Tensor], variables: Sequence[keras.Variable], learning_rate: Any
    ) -> None:
        """Update by the received momenta and the frozen second moments."""
        for result, variable in zip(received, variables, strict=True):
            if self.sends_momentum(variable):
                # Not by Keras's `update_step`, which would also update the second moments
                step = self.receive(result, variable)
                self.assign_sub(variable, tf.cast(learning_rate, step.dtype) * step)
            else:
                self.update_step(result, variable, learning_rate)

    def get_config(self) -> dict[str, Any]:
        config = super().get_config()
        # It is always False, and no option of this class
        del config["amsgrad"]
        return config

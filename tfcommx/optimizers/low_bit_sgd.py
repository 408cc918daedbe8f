"""LowBitSGD: SGD that sends its momentum in 2 bits an entry."""

from collections.abc import Sequence
from typing import Any, ClassVar

import keras
import tensorflow as tf

from tfcommx.core import ConfigurationError, check_number, check_whole
from tfcommx.optimizers.layerwise import SendsLargeMatrices, check_patterns


@keras.saving.register_keras_serializable("tfcommx")
class LowBitSGD(SendsLargeMatrices, keras.optimizers.SGD):
    """SGD with momentum that sends the momentum, in few bits, in place of the gradient.

    SGD with momentum diverges on gradients in 1 or 2 bits, because momentum amplifies the noise of
    so few levels. Here rank i adds the momentum m, which is equal on all ranks, to its own gradient
    g_i, and sends the result by the scheme, with error feedback:

        u_i = g_i - momentum m / learning_rate
        m'  = -learning_rate (mean over the ranks of u_i, as received)
        w   = w + m'        (Nesterov: w + momentum m' + (m' - momentum m))

    Without rounding it is Keras's SGD on the mean gradient, because u_i is linear in g_i. Residuals
    have the unit of gradients, as with any other optimizer, so one may take the place of the other.

    Variables of one dimension or of few entries, and those that `exclude` matches, send gradients
    in bfloat16, because they are few or sensitive.

    >>> import keras
    >>> import tfcommx as cx
    >>> _ = cx.init()
    >>> sgd = cx.optimizers.LowBitSGD(0.1, momentum=0.9, nesterov=True)
    >>> optimizer = cx.DistributedOptimizer(sgd, cx.Scheme("asa", wire="int2"))

    Args:
        learning_rate, nesterov: as in Keras's SGD.
        momentum: in (0, 1).
        exclude: patterns of variable paths, as in file names; such variables send gradients.
        dense_below: entries, >= 0; smaller variables also send gradients.
        keras_options: the other arguments of every Keras optimizer. Weight decay is decoupled, as
            in Keras. `clipnorm`, `clipvalue` and `global_clipnorm` clip each rank's own gradient,
            before it enters the momentum.

    **Ranks:** as `cx.DistributedOptimizer`, with strategy "synchronous" and op "average".
    **Cost:** SGD's, and one pass over gradients and momenta; a residual of 4 bytes an entry on each
    rank (on "torus" divided by the slots of a node).
    **Raises:** ConfigurationError for numbers out of range.
    **Source:** Zheng, Huang, Kwok, "Communication-Efficient Distributed Blockwise Momentum SGD with
    Error-Feedback" (2019), algorithm 3. We differ in the codes, and in the momentum: there each
    rank has its own, here all ranks update the same one.
    """

    default_wire: ClassVar[str] = "int2"
    divides_by_rate: ClassVar[bool] = True

    def __init__(
        self,
        learning_rate: Any = 0.01,
        momentum: float = 0.9,
        nesterov: bool = False,
        exclude: Sequence[str] = (),
        dense_below: int = 1024,
        **keras_options: Any,
    ) -> None:
        if check_number("momentum", momentum, "in [0, 1)") == 0:
            raise ConfigurationError(
                "LowBitSGD sends its momentum. Received momentum=0. Take keras.optimizers.SGD: its "
                "gradients may travel in 1 or 2 bits, because no momentum amplifies their noise."
            )
        super().__init__(learning_rate, momentum, nesterov, **keras_options)
        self.exclude = check_patterns(exclude)
        self.dense_below = check_whole("dense_below", dense_below, least=0)

    def carried(self, variable: keras.Variable | tf.Variable) -> tf.Tensor:
        """Return the momentum in the unit of gradients; 0 at the learning rate 0."""
        momentum = self.momentums[self.position_of(variable)].value
        rate = tf.cast(self.learning_rate, momentum.dtype)
        return tf.math.divide_no_nan(-self.momentum * momentum, rate)

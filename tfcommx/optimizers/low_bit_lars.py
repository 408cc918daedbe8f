"""LowBitLARS: LARS that sends its momentum in 2 bits an entry."""

from collections.abc import Sequence
from typing import Any, ClassVar

import keras
import tensorflow as tf

from tfcommx.core import ConfigurationError, check_whole
from tfcommx.keras_internals.momenta import OfAll
from tfcommx.kernels.lars import squared_norms
from tfcommx.optimizers.lars import LARS
from tfcommx.optimizers.layerwise import Formula, SendsLargeMatrices

# Numbers of a sketch. The standard deviation of the norm that they estimate is 1 / sqrt(2 SKETCH) =
# 9 %. A prime, because a gradient is often largest in some of its channels, whose number a prime
# does not divide: so their entries are spread over all sums of the sketch
SKETCH = 61
# Largest factor by which rounding may make a norm larger; in trials it was 1.3 to 3. More is not
# made up for, because where gradients vanish in one step, rounding errors remain, and a ratio for
# gradients near 0 would make a huge step of them
INFLATION = 8.0


@keras.saving.register_keras_serializable("tfcommx")
class LowBitLARS(SendsLargeMatrices, LARS):
    """LARS that sends its momentum, in few bits, in place of the gradient.

    On gradients in 1 or 2 bits LARS trains badly, because momentum amplifies their noise: see
    `cx.optimizers.LowBitSGD`. Here rank i adds the momentum m, which is equal on all ranks, to its
    own gradient g_i, and sends the result by the scheme, with error feedback:

        u_i = g_i - c m             with c = momentum / (learning_rate mean_ratio)
        g   = mean over the ranks of u_i, as received, + c m

    Then it updates by LARS with the gradient g. `mean_ratio` is a running mean of the variable's
    ratio, which weighs steps as the momentum does; c is 0 while there is none. Without rounding g
    is the mean gradient for any c, so this is LARS except for the norm of g.

    **The norm.** The ratio needs |g|, which rounding makes larger, in trials by a third with 2 bits
    and to three times with 1 bit, so the rate would be as much too low. Therefore ranks also add 61
    numbers for each variable, exactly: the sketch of a gradient has in place j the sum of the
    entries j, 61 + j, 122 + j, ..., with signs that are random, equal on all ranks, and new in each
    step. The norm of the mean sketch, at least an eighth of |g|, takes the place of |g|. Its square
    is that of the mean gradient on average, and its standard deviation is 9 %.

    Variables of one dimension or of few entries, and those that `exclude` matches, send gradients
    in bfloat16, because they are few or sensitive, and have LARS's own ratio.

    >>> import keras
    >>> import tfcommx as cx
    >>> _ = cx.init()
    >>> lars = cx.optimizers.LowBitLARS(2.0, weight_decay=1e-4)
    >>> optimizer = cx.DistributedOptimizer(lars, cx.Scheme("asa", wire="int2"))

    Not wrapped, and on one rank, it is LARS.

    Args:
        learning_rate: as in `cx.optimizers.LARS`.
        momentum: in (0, 1).
        dense_below: entries, >= 0; smaller variables also send gradients.
        options: the other arguments of `cx.optimizers.LARS`. Variables that `exclude` matches have
            the ratio 1 and no weight decay, and send gradients. `clipnorm`, `clipvalue` and
            `global_clipnorm` clip each rank's own gradient, before it enters the momentum.

    **Ranks:** as `cx.DistributedOptimizer`, with strategy "synchronous" and op "average".
    **Cost:** LARS's, two passes over gradients and momenta, and one over gradients for their
    sketches, with a temporary of 4 bytes an entry of one variable; an allreduce of 244 bytes a
    variable; a residual of 4 bytes an entry on each rank (on "torus" divided by the slots of a
    node).
    **Raises:** ConfigurationError for numbers out of range.
    **Source:** LARS as in `cx.optimizers.LARS`, the momentum as in `cx.optimizers.LowBitSGD`; the
    sketch is that of Alon, Matias, Szegedy, "The Space Complexity of Approximating the Frequency
    Moments" (1996), section 2.2, except that each entry is in one of its sums, and not in all.
    """

    default_wire: ClassVar[str] = "int2"
    divides_by_rate: ClassVar[bool] = True

    def __init__(
        self,
        learning_rate: Any = 1.0,
        momentum: float = 0.9,
        dense_below: int = 1024,
        **options: Any,
    ) -> None:
        super().__init__(learning_rate, momentum, **options)
        if self.momentum == 0:
            raise ConfigurationError(
                "LowBitLARS sends its momentum. Received momentum=0. Take cx.optimizers.LARS."
            )
        self.dense_below = check_whole("dense_below", dense_below, least=0)

    def build(self, variables: Sequence[keras.Variable]) -> None:
        """Create the momenta, and a running mean of each variable's ratio; 0: none so far."""
        if self.built:
            return
        super().build(variables)
        self.mean_ratios = self.add_variable([len(variables)], dtype="float32", name="mean_ratios")

    def carried(self, variable: keras.Variable | tf.Variable) -> tf.Tensor:
        """Return the momentum in the unit of gradients; 0 at the learning rate 0."""
        position = self.position_of(variable)
        momentum = self.momentums[position].value
        rate = tf.cast(self.learning_rate, tf.float32) * self.mean_ratios.value[position]
        return tf.math.divide_no_nan(-self.momentum * momentum, tf.cast(rate, momentum.dtype))

    @tf.autograph.experimental.do_not_convert
    def exchange_and_clip(
        self,
        gradients: list[tf.Tensor],
        variables: Sequence[keras.Variable],
        exchange: OfAll,
        clip: OfAll,
    ) -> Sequence[tf.Tensor]:
        """As SendsMomentum does; also add the sketches of the clipped gradients."""
        clipped = list(clip(gradients))
        sketches = [
            self.sketch(gradient, self.position_of(variable))
            for gradient, variable in zip(clipped, variables, strict=True)
            if self.sends_momentum(variable)
        ]
        # With `list` as the clip, because these gradients are clipped already
        received = list(super().exchange_and_clip(clipped, variables, exchange, list))
        if sketches and self.exchanger.ranks > 1:
            guard = self.exchanger.guard
            total = guard.mean_over_ranks(tf.concat(sketches, axis=0))
            norms = tf.sqrt(squared_norms(tf.split(total, len(sketches))))
            senders = map(self.position_of, filter(self.sends_momentum, variables))
            guard.step.norms_of = dict(zip(senders, tf.unstack(norms), strict=True))
        return received

    def sketch(self, gradient: tf.Tensor, position: int) -> tf.Tensor:
        """Return sums of a gradient's entries with random signs, float32 [SKETCH]."""
        flat = tf.cast(tf.reshape(gradient, [-1]), tf.float32)
        # The same on all ranks, because the sketch of the mean gradient is the mean of their
        # sketches only if the signs are equal
        seed = [tf.cast(self.iterations, tf.int32), position]
        # The same on every device. Not int32, which TensorFlow compares on the host, even on a GPU
        numbers = tf.random.stateless_uniform(flat.shape, seed, alg="philox")
        signed = tf.where(numbers < 0.5, -flat, flat)
        padded = tf.pad(signed, [[0, -flat.shape[0] % SKETCH]])
        return tf.reduce_sum(tf.reshape(padded, [-1, SKETCH]), axis=0)

    def ratios(
        self,
        positions: Sequence[int],
        variables: Sequence[tf.Variable],
        updates: Sequence[tf.Tensor],
        formula: Formula,
    ) -> tf.Tensor:
        """Return the trust ratios by the sketches, and let the running means follow them."""
        # Set in this step by `exchange_and_clip`; empty on one rank
        known = self.exchanger.guard.step.norms_of if self.is_wrapped else {}
        included = [position for position in positions if self.adapted[position]]

        def of_means(weights: tf.Tensor, received: tf.Tensor, decays: tf.Tensor) -> tf.Tensor:
            sketched = tf.constant([position in known for position in included])
            norms = tf.stack([known.get(position, 0.0) for position in included])
            norms = tf.where(sketched, tf.maximum(norms, received / INFLATION), received)
            return formula(weights, norms, decays)

        ratios = super().ratios(positions, variables, updates, of_means)
        before = tf.gather(self.mean_ratios.value, positions)
        after = tf.where(before > 0, before + (1 - self.momentum) * (ratios - before), ratios)
        self.mean_ratios.value.scatter_nd_update([[position] for position in positions], after)
        return ratios

"""Shrink residuals while the learning rate rises.

An entry waits in the residual for some 1 / density steps, and is applied at the rate of the step
that sends it. While the rate rises from almost 0, as in a warm-up, the large gradients of the first
steps would count as if the rate had never been low. The residual has to shrink as the rate grows,
because error feedback is derived for updates, rate times gradient.

It shrinks by powers of two, which are exact, and only when the rate reaches a new maximum. It does
not grow while the rate falls, because that would change little, and have no limit at a rate of 0.

Residuals of momenta that are divided by the rate are different: while the rate falls, the momentum
still has the size of earlier steps, so such a residual grows as the rate falls. At the end of a
cycle of CosineDecayRestarts it is some 500 gradients, for any length of the cycle. Therefore
`RecentRate` shrinks them whenever the rate rises, also below its maximum.

**Source:** Karimireddy et al., "Error Feedback Fixes SignSGD and other Gradient Compression
Schemes" (2019), algorithm 2, which adds up rate times gradient.
"""

import tensorflow as tf

# Larger than the exponent of any rate, so that the first rate is no rise. NaN and Inf have it, too,
# and are never the highest
UNKNOWN = 128


def exponent_of(rate: tf.Tensor) -> tf.Tensor:
    """Return the floor of log2 of a rate's magnitude, int32 in [-127, UNKNOWN].

    -127 also stands for 0, and UNKNOWN for a rate that is not finite.

    >>> [int(exponent_of(tf.constant(rate))) for rate in (0.0, 0.25, 0.3, 0.5, 3.0)]
    [-127, -2, -2, -1, 1]
    """
    # From the bits, because a logarithm may round up to the next integer
    bits = tf.bitcast(tf.abs(tf.cast(rate, tf.float32)), tf.int32)
    return tf.bitwise.right_shift(bits, 23) - 127


def power_of_two(exponent: tf.Tensor) -> tf.Tensor:
    """Return 2 to the power of an int32 exponent <= 127, float32, exactly; below -126 it is 0.

    >>> [float(power_of_two(tf.constant(exponent))) for exponent in (0, -3, -130)]
    [1.0, 0.125, 0.0]
    """
    return tf.bitcast(tf.bitwise.left_shift(tf.maximum(exponent + 127, 0), 23), tf.float32)


class HighestRate:
    """The highest rate so far, as a power of two; shrinks residuals when it rises."""

    # Octaves, >= 1, by which a rate must be above the recorded one to shrink the residuals
    least_rise = 1

    def __init__(self) -> None:
        with tf.device("/cpu:0"):
            self._exponent = tf.Variable(UNKNOWN, trainable=False, name="tfcommx/highest_rate")

    @property
    def exponent(self) -> int | None:
        """The floor of the recorded rate's log2; None before the first step. Outside of graphs."""
        exponent = int(self._exponent.numpy())
        return None if exponent == UNKNOWN else exponent

    def continue_from(self, exponent: int) -> None:
        """Continue from the rate that other plans recorded. Outside of graphs."""
        self._exponent.assign(exponent)

    def follow(self, rate: tf.Tensor, residuals: list[tf.Variable]) -> None:
        """Record a step's rate; shrink the residuals if it rises above the recorded one.

        **Cost:** one pass over the residuals in steps in which the rate passes a power of two;
        otherwise nothing.
        """

        def shrink() -> tf.Tensor:
            # After steps at a rate of 0 it is below 2^-100 for any usual rate, so gradients of such
            # steps are never applied
            factor = power_of_two(recorded - exponent)
            before: list[tf.Operation] = []
            for residual in residuals:
                # In sequence, so that the products need memory for only one residual
                with tf.control_dependencies(before), tf.device(residual.device):
                    before = [residual.assign(residual * factor, read_value=False)]
            with tf.control_dependencies(before):
                return tf.identity(exponent)

        with tf.device("/cpu:0"):
            exponent, recorded = exponent_of(rate), self._exponent.read_value()
            rises = (exponent >= recorded + self.least_rise) & (exponent < UNKNOWN)
            unshrunk = self._without_rise(exponent, recorded)
            self._exponent.assign(tf.cond(rises, shrink, lambda: unshrunk))

    def _without_rise(self, exponent: tf.Tensor, recorded: tf.Tensor) -> tf.Tensor:
        """Return the exponent to record after a step whose rate does not rise."""
        # The first rate is only recorded, because no residual was left at a lower one
        return tf.where(recorded == UNKNOWN, exponent, recorded)


class RecentRate(HighestRate):
    """The rate of recent steps, as a power of two; shrinks residuals when it rises."""

    # Otherwise a rate that varies around a power of two would shrink them again and again
    least_rise = 2

    def _without_rise(self, exponent: tf.Tensor, recorded: tf.Tensor) -> tf.Tensor:
        return tf.minimum(exponent, recorded)

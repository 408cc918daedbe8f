"""Second moments that are learnt, then frozen: the common part of OneBitAdam and OneBitLAMB."""

from collections.abc import Sequence
from typing import Any, ClassVar

import keras
import tensorflow as tf

from tfcommx.core import NARROW, check_name, check_whole, log
from tfcommx.keras_internals.momenta import LearnsThenSendsMomentum
from tfcommx.keras_internals.optimizers import trainable_variables
from tfcommx.optimizers.layerwise import SendsLargeMatrices

# Second moments are stable if their sum changes by less than this factor in 1 / (1 - beta_2)
# updates
STABLE = 0.96
# Wire formats of gradients while second moments are learnt; 2 bits and 1 spoil Adam. Some are
# shorter than bfloat16, in which this phase sends more bytes on 4 nodes than the whole second one
LEARNING_WIRES = tuple(wire for wire in NARROW if wire not in ("int2", "int1"))
# Lower bound of frozen second moments, as a share of the mean of their variable's nonzero ones. In
# 1 bit an entry without momentum receives the mean magnitude of its block; where that is small
# beside its variable's, so are the steps that noise takes in entries whose second moments are 0.
FLOOR = 0.01


class FreezesSecondMoments(SendsLargeMatrices, LearnsThenSendsMomentum):
    """Mixed into a subclass of Keras's Adam, or of LAMB, that sends its momentum in few bits.

    The class calls `set_phases` in its constructor, sets `exclude`, and has the update of the
    second phase, `update_by_momenta`.
    """

    default_wire: ClassVar[str] = "int1"

    def set_phases(self, freeze_after: int | None, dense_below: int, learning_wire: str) -> None:
        """Check and keep the options of the phases. **Raises:** ConfigurationError."""
        if freeze_after is not None:
            freeze_after = check_whole("freeze_after", freeze_after, least=1)
        self.freeze_after = freeze_after
        self.dense_below = check_whole("dense_below", dense_below, least=0)
        check_name("learning_wire", learning_wire, LEARNING_WIRES)
        self.learning_wire = learning_wire

    def build(self, variables: Sequence[keras.Variable]) -> None:
        """Create the moments, and the state of the phases."""
        if self.built:
            return
        # Frozen after 33 updates, where beta_2 averages 50, a training on 8 nodes of 1 stayed
        # behind dense gradients; after 67 it did not
        averaged = round(1 / (1 - self.beta_2))
        if self.freeze_after is not None and self.freeze_after < averaged:
            log.warning(
                "%s freezes its second moments after %d updates, fewer than the %d that they "
                "average (1 / (1 - beta_2)), so they have the size of the first gradients, and "
                "training may fail. Leave freeze_after out: they are frozen once they settle.",
                type(self).__name__,
                self.freeze_after,
                averaged,
            )
        super().build(variables)
        with tf.init_scope():  # Outside the graph: tracing the first step reads its value
            self.frozen_at = self.add_variable((), dtype="int64", name="frozen_at")
        # Sum of the second moments, and the learning rate, at the last comparison
        self.last_sum = self.add_variable((), dtype="float32", name="last_sum")
        self.last_rate = self.add_variable((), dtype="float32", name="last_rate")

    def carried(self, variable: keras.Variable | tf.Variable) -> tf.Tensor:
        """Return the momentum in the unit of gradients."""
        # Its sum with a gradient, times 1 - beta_1, is Adam's next momentum. Residuals have the
        # unit of gradients, too, so they may come from another optimizer, or be taken over by one
        return self.beta_1 / (1 - self.beta_1) * self.momentum_of(variable)

    def receive(self, moved: tf.Tensor, variable: keras.Variable | tf.Variable) -> tf.Tensor:
        """Set the momentum to the received one; return Adam's update without its rate, bounded."""
        momentum = self.momentum_of(variable)
        momentum.assign((1 - self.beta_1) * tf.cast(moved, momentum.dtype))
        correction = 1 - tf.pow(self.beta_1, tf.cast(self.iterations + 1, tf.float32))
        scale = tf.sqrt(self.second_moment_of(variable)) + self.epsilon
        update = momentum / tf.cast(correction, momentum.dtype) / scale
        # In 1 bit an entry without momentum receives the mean magnitude of its block. Where v is
        # small, updates of up to 50 were measured, which Adam itself does not take, and a language
        # model diverged by them. By a clip, Inf would be 1, and go unnoticed
        return update / tf.maximum(tf.abs(update), 1)

    def freeze_if_due(self, learning_rate: Any) -> None:
        """End the first phase, if this is its last update."""
        if not any(map(self.sends_momentum, trainable_variables(self))):
            return
        step = tf.cast(self.iterations + 1, tf.int64)
        if self.freeze_after is not None:
            due = step >= self.freeze_after
        else:
            due = tf.cond(
                step % round(1 / (1 - self.beta_2)) == 0,
                lambda: self._has_settled(step, learning_rate),
                lambda: tf.constant(False),
            )
        tf.cond(due, lambda: self._freeze(step), lambda: None)

    def _second_moments(self) -> list[tf.Variable]:
        """Return the second moments that are frozen in the second phase."""
        variables = trainable_variables(self)
        return [
            self.second_moment_of(variable)
            for variable in variables
            if self.sends_momentum(variable)
        ]

    def _correction(self, step: tf.Tensor) -> tf.Tensor:
        """Return the divisor that corrects v for its start at 0 at this step, float32."""
        return 1 - tf.pow(self.beta_2, tf.cast(step, tf.float32))

    def _has_settled(self, step: tf.Tensor, learning_rate: Any) -> tf.Tensor:
        """Return True if v and the rate have settled since the last comparison; record them."""
        sums = [tf.reduce_sum(tf.cast(moment, tf.float32)) for moment in self._second_moments()]
        total = self._equal(tf.reshape(tf.add_n(sums), [1]))[0] / self._correction(step)
        before, rate = tf.identity(self.last_sum.value), tf.cast(learning_rate, tf.float32)
        settled = (STABLE * before <= total) & (STABLE * total <= before) & (before > 0)
        settled &= rate <= self.last_rate.value
        self.assign(self.last_sum, total)
        self.assign(self.last_rate, rate)
        return settled

    def _freeze(self, step: tf.Tensor) -> None:
        """Correct v for its first steps, raise its smallest entries, and begin the second phase."""
        moments = self._second_moments()
        wide = [tf.cast(moment, tf.float32) for moment in moments]
        # Counts are exact, so all ranks have the same; the last bits of sums depend on the order of
        # additions
        counts = tf.cast(tf.stack(list(map(tf.math.count_nonzero, wide))), tf.float32)
        sums = self._equal(tf.stack([tf.reduce_sum(moment) for moment in wide]))
        # Used for a variable whose gradients were all 0, because it has no nonzero second moments
        mean_of_all = tf.math.divide_no_nan(tf.reduce_sum(sums), tf.reduce_sum(counts))
        means = tf.where(counts > 0, tf.math.divide_no_nan(sums, counts), mean_of_all)
        for moment, value, mean in zip(moments, wide, tf.unstack(means), strict=True):
            corrected = tf.maximum(value, FLOOR * mean) / self._correction(step)
            moment.assign(tf.cast(corrected, moment.dtype))
        # Not while all gradients have been 0
        self.assign(self.frozen_at, tf.where(mean_of_all > 0, step, 0))

    def _equal(self, numbers: tf.Tensor) -> tf.Tensor:
        """Return numbers, equal across ranks up to rounding, with the same bits on every rank."""
        return self.exchanger.guard.mean_over_ranks(numbers) if self.is_wrapped else numbers

    def get_config(self) -> dict[str, Any]:
        options = {"freeze_after": self.freeze_after, "learning_wire": self.learning_wire}
        return {**super().get_config(), **options}

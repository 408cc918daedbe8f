"""OneBitAdam: Adam that sends its momentum in 1 bit an entry after learning its second moments."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import keras
import tensorflow as tf

from tfcommx.core import (
    NARROW,
    ConfigurationError,
    check_name,
    check_whole,
)
from tfcommx.keras_internals import LearnsThenSendsMomentum, trainable_variables
from tfcommx.optimizers.layerwise import check_number, check_patterns, is_large_matrix

# Second moments are stable if their sum changes by less than this factor in 1 / (1 - beta_2)
# updates
STABLE = 0.96
# Wire formats of gradients while second moments are learnt; 2 bits and 1 spoil Adam
LEARNING_WIRES = tuple(wire for wire in NARROW if wire not in ("int2", "int1"))
# Lower bound of frozen second moments, as a share of the mean of their variable's nonzero ones. In
# 1 bit an entry without momentum receives the mean magnitude of its block, about .3 of the root of
# the mean second moment; divided by the root of this share it is about the largest step that Adam
# itself takes, (1 - beta_1) / sqrt(1 - beta_2) = 3 times the rate.
FLOOR = 0.01


@keras.saving.register_keras_serializable("tfcommx")
class OneBitAdam(LearnsThenSendsMomentum, keras.optimizers.Adam):
    """Adam that sends its momentum, in few bits, after a phase in which it learns its scales.

    Gradients in 1 bit spoil Adam, because squares of their noise enter the second moments, and
    momentum amplifies it. Training therefore has two phases. In the first, ranks exchange gradients
    g in `learning_wire`, and every rank runs Keras's Adam. Then the second moments v are frozen, at
    the same step on all ranks. From then on rank i adds the momentum m, which is equal on all
    ranks, to its own gradient, and sends the result by the scheme, with error feedback:

        u_i = g_i + beta_1 / (1 - beta_1) m
        m = (1 - beta_1) (mean over the ranks of u_i, as received)
        w = w - learning_rate m / (1 - beta_1^t) / (sqrt(v) + epsilon)

    where v is v / (1 - beta_2^t) of the step t at which it was frozen. It is raised to at least 1 %
    of the mean of its variable's nonzero entries, because entries that are 0 by then, such as rows
    of an embedding that have not occurred, would turn noise into huge steps.

    Variables of one dimension or of few entries, and those that `exclude` matches, are always
    updated by Adam, with gradients in bfloat16, because they are few or sensitive.

    >>> import keras
    >>> import tfcommx as cx
    >>> _ = cx.init()
    >>> adam = cx.optimizers.OneBitAdam(0.001, freeze_after=1000)
    >>> optimizer = cx.DistributedOptimizer(adam, cx.Scheme("asa", wire="int1"))

    The graph of a step contains both phases, so nothing is traced again at the change, in `fit` or
    in a custom loop. Without a wrap, v is frozen alike and nothing is sent.

    Args:
        learning_rate, beta_1, beta_2, epsilon: as in Keras's Adam.
        freeze_after: updates after which v is frozen, >= 1; 5 to 20 % of the run is usual. None: by
            the change of v. Every 1 / (1 - beta_2) updates the sum of v / (1 - beta_2^t) is
            compared with the previous one; v is frozen if it has changed by less than 4 %, and the
            learning rate has not risen.
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
    Convergence Speed" (2021), algorithm 1. The paper has no floor for v, does not correct m and v
    for their first steps, freezes v of all variables, and also while v still grows.

    docs/laboratory/miniatures.md has its accuracy on a small Transformer. Other models, and the
    rule for `freeze_after=None` in a training, have not been measured.
    """

    default_wire: ClassVar[str] = "int1"

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
            check_number("epsilon", epsilon, "above 0"),
            **keras_options,
        )
        if freeze_after is not None:
            freeze_after = check_whole("freeze_after", freeze_after, least=1)
        self.freeze_after, self.exclude = freeze_after, check_patterns(exclude)
        self.dense_below = check_whole("dense_below", dense_below, least=0)
        check_name("learning_wire", learning_wire, LEARNING_WIRES)
        self.learning_wire = learning_wire

    def build(self, variables: Sequence[keras.Variable]) -> None:
        """Create Adam's moments, and the state of the phases."""
        if self.built:
            return
        super().build(variables)
        with tf.init_scope():  # Outside the graph: tracing the first step reads its value
            self.frozen_at = self.add_variable((), dtype="int64", name="frozen_at")
        # Sum of the second moments, and the learning rate, at the last comparison
        self.last_sum = self.add_variable((), dtype="float32", name="last_sum")
        self.last_rate = self.add_variable((), dtype="float32", name="last_rate")

    def sends_momentum(self, variable: keras.Variable | tf.Variable) -> bool:
        """Return True if this variable's momentum is sent once v is frozen."""
        return is_large_matrix(variable, self.exclude, self.dense_below)

    def moved(self, gradient: tf.Tensor, variable: keras.Variable | tf.Variable) -> tf.Tensor:
        """Return this rank's gradient and the momentum, in the unit of gradients.

        So residuals have that unit too, and may come from, or go to, another optimizer.
        """
        momentum = self.momentum_of(variable)
        return tf.cast(gradient, momentum.dtype) + self.beta_1 / (1 - self.beta_1) * momentum

    def update_by_momenta(
        self, received: Sequence[tf.Tensor], variables: Sequence[keras.Variable], learning_rate: Any
    ) -> None:
        """Update by the received momenta and the frozen second moments."""
        if getattr(self, "exchanger", None) is None:  # Not wrapped: these are gradients
            received = self.momenta(received, variables)
        correction = 1 - tf.pow(self.beta_1, tf.cast(self.iterations + 1, tf.float32))
        rate = tf.cast(learning_rate, tf.float32) / correction
        for result, variable in zip(received, variables, strict=True):
            if not self.sends_momentum(variable):
                self.update_step(result, variable, learning_rate)
                continue
            momentum = (1 - self.beta_1) * tf.cast(result, variable.dtype)
            scale = tf.sqrt(self.second_moment_of(variable)) + self.epsilon
            self.assign(self.momentum_of(variable), momentum)
            self.assign_sub(variable, tf.cast(rate, momentum.dtype) * momentum / scale)

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
        """Correct v for its first steps, raise its smallest entries, and begin the second phase.

        The second phase does not begin while all gradients have been 0.
        """
        moments = self._second_moments()
        wide = [tf.cast(moment, tf.float32) for moment in moments]
        counts = tf.cast(tf.stack(list(map(tf.math.count_nonzero, wide))), tf.float32)
        sums = self._equal(tf.stack([tf.reduce_sum(moment) for moment in wide]))
        # Used for a variable whose gradients were all 0, because it has no nonzero second moments
        mean_of_all = tf.math.divide_no_nan(tf.reduce_sum(sums), tf.reduce_sum(counts))
        means = tf.where(counts > 0, tf.math.divide_no_nan(sums, counts), mean_of_all)
        for moment, value, mean in zip(moments, wide, tf.unstack(means), strict=True):
            corrected = tf.maximum(value, FLOOR * mean) / self._correction(step)
            moment.assign(tf.cast(corrected, moment.dtype))
        self.assign(self.frozen_at, tf.where(mean_of_all > 0, step, 0))

    def _equal(self, numbers: tf.Tensor) -> tf.Tensor:
        """Return numbers, equal across ranks up to rounding, with the same bits on every rank."""
        exchanger = getattr(self, "exchanger", None)
        return numbers if exchanger is None else exchanger.guard.mean_over_ranks(numbers)

    def get_config(self) -> dict[str, Any]:
        """Return the arguments that make an equal optimizer."""
        config = super().get_config()
        del config["amsgrad"]
        return {
            **config,
            "freeze_after": self.freeze_after,
            "exclude": list(self.exclude),
            "dense_below": self.dense_below,
            "learning_wire": self.learning_wire,
        }

"""Mixin of optimizers that update all their variables together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from tfcommx.terms import PlanError


class UpdatesTogether:
    """Mixed into an optimizer's class: one call updates all variables, weight decay included.

    The class has `update_together(gradients, variables, positions, learning_rate)`: gradients are
    dense, variables TensorFlow's, positions those among the variables that it was built for.
    """

    # What follows is a graph already, also in a caller's loop.
    @tf.autograph.experimental.do_not_convert
    def _backend_update_step(
        self,
        grads: Sequence[tf.Tensor],
        trainable_variables: Sequence[keras.Variable],
        learning_rate: Any,
    ) -> None:
        replicas = tf.distribute.get_strategy().num_replicas_in_sync
        if replicas > 1:
            raise PlanError(
                f"{type(self).__name__} updates one replica in a process. Received a "
                f"tf.distribute strategy of {replicas}. Start one process for each GPU: "
                "horovodrun, cx.init(), cx.DistributedOptimizer."
            )
        values = [
            variable if isinstance(variable, tf.Variable) else variable.value
            for variable in trainable_variables
        ]
        positions = [self._get_variable_index(variable) for variable in trainable_variables]
        gradients = [tf.convert_to_tensor(grad) for grad in grads]
        # The run that finds no more data has no gradients, and updates nothing
        with tf.control_dependencies(gradients[-1:]):
            self.update_together(gradients, values, positions, learning_rate)

    def uses_weight_decay(self, variable: keras.Variable | tf.Variable) -> bool:
        """Tell whether `exclude_from_weight_decay` has left the variable in."""
        return self._use_weight_decay(variable)

    def _apply_weight_decay(self, variables: Sequence[keras.Variable]) -> None:
        """Leave weight decay to `update_together`."""

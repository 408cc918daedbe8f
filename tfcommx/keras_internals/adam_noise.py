"""Adam's update by the gradients of one node, corrected for the noise of its second moments."""

from collections.abc import Sequence

import keras
import tensorflow as tf

from tfcommx.keras_internals.optimizers import inner_optimizer


def noise_factors(
    optimizer: keras.optimizers.Optimizer, variables: Sequence[keras.Variable], nodes: int
) -> list[tf.Tensor]:
    """Return factors that make Adam's last update that of gradients averaged over `nodes` nodes.

    The second moment of a node's gradients is signal plus noise, and an average over n nodes has
    1/n of the noise. With m and v the moments, t the step and n the nodes

        s  = min((m / (1 - beta_1^t))^2 (1 - beta_2^t), v)
        v' = s + (v - s) / n
        factor = (sqrt(v) + epsilon) / (sqrt(v') + epsilon), in [1, sqrt(n)]

    so that update times factor is Keras's update with v' in place of v. Weight decay is not part
    of it.

    Args:
        optimizer: after its update of this step, before it counts the step.
        nodes: n, >= 1.

    Returns:
        For each variable a tensor of its shape. An empty list, which means no correction, if the
        optimizer's step is not that of Keras's Adam, with amsgrad, and for one node.

    **Ranks:** local. **Cost:** some seven passes over the weights, or one if XLA or Grappler fuses
    them.
    """
    optimizer = inner_optimizer(optimizer)
    adam = keras.optimizers.Adam
    if nodes == 1 or not isinstance(optimizer, adam) or optimizer.amsgrad:
        return []
    if type(optimizer).update_step is not adam.update_step:
        return []
    return [_factor(optimizer, variable, nodes) for variable in variables]


def _factor(optimizer: keras.optimizers.Adam, variable: keras.Variable, nodes: int) -> tf.Tensor:
    index = optimizer._get_variable_index(variable)
    m = tf.convert_to_tensor(optimizer._momentums[index].value)
    v = tf.convert_to_tensor(optimizer._velocities[index].value)
    # A tensor with gradient_accumulation_steps, and a variable without
    step = tf.cast(tf.convert_to_tensor(optimizer.iterations) + 1, m.dtype)
    unbiased = m / (1 - tf.pow(tf.cast(optimizer.beta_1, m.dtype), step))
    # At most v, so that the noise, v - s, is not negative
    signal = tf.minimum(
        tf.square(unbiased) * (1 - tf.pow(tf.cast(optimizer.beta_2, m.dtype), step)), v
    )
    reduced = signal + (v - signal) / nodes
    epsilon = tf.cast(optimizer.epsilon, m.dtype)
    return (tf.sqrt(v) + epsilon) / (tf.sqrt(reduced) + epsilon)

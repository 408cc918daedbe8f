"""What several benchmarks compare with or take steps by: plain Horovod, and bare updates."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import horovod.tensorflow as hvd
import keras
import tensorflow as tf

import tfcommx as cx


def plain_allreduce(gradients: dict[str, tf.Tensor]) -> dict[str, tf.Tensor]:
    """Average each gradient by an allreduce of its own, in this order."""
    return {
        name: hvd.allreduce(gradient, op=hvd.Average, name=f"plain/{name}")
        for name, gradient in gradients.items()
    }


class PlainHorovod(keras.optimizers.SGD):
    """What a user of plain Horovod has: an allreduce of each gradient, before the update.

    As with its option `sparse_as_dense`, which wrapped optimizers do always. Without it the rows
    of an embedding are gathered, and added in any order: the ranks drift apart.
    """

    def apply(self, grads: Any, trainable_variables: Any = None) -> None:
        """Average the gradients over all ranks, then apply them."""
        averages = [
            hvd.allreduce(tf.convert_to_tensor(one), op=hvd.Average, name=f"{self.name}/{place}")
            for place, one in enumerate(grads)
        ]
        with cx.allow_plain_optimizers():
            super().apply(averages, trainable_variables)


def bare_step(
    optimizer: keras.optimizers.Optimizer,
    weights: Sequence[keras.Variable],
    gradients: Sequence[tf.Tensor],
) -> Callable[[], float]:
    """Return a traced step of exchange and update, which returns when it is done."""
    optimizer.build(weights)

    # Arguments, because TensorFlow computes the exchange of constants once for all steps; a result,
    # because a step without one returns before it is done
    @tf.function
    def step(gradients: Sequence[tf.Tensor]) -> tf.Tensor:
        optimizer.apply(gradients, weights)
        return tf.reshape(weights[0], [-1])[0]

    return lambda: float(step(gradients))


def threads(intra: int, inter: int | None = None) -> None:
    """Set TensorFlow's threads, unless it has begun: smoke runs share a process."""
    with contextlib.suppress(RuntimeError):
        tf.config.threading.set_intra_op_parallelism_threads(intra)
        if inter is not None:
            tf.config.threading.set_inter_op_parallelism_threads(inter)

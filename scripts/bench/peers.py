"""Plain Horovod, which several benchmarks compare with."""

from __future__ import annotations

from typing import Any

import horovod.tensorflow as hvd
import keras
import tensorflow as tf

import tfcommx as cx


def plain_allreduce(
    gradients: dict[str, tf.Tensor], compression: Any = hvd.Compression.none
) -> dict[str, tf.Tensor]:
    """Average each gradient by a separate allreduce, in this order; `compression` is Horovod's.

    **Ranks:** all.
    """
    return {
        name: hvd.allreduce(gradient, op=hvd.Average, name=f"plain/{name}", compression=compression)
        for name, gradient in gradients.items()
    }


class PlainHorovod(keras.optimizers.SGD):
    """SGD of a user of plain Horovod, with an allreduce of each gradient before the update.

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

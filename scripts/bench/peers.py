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


def plain_optimizer(
    optimizer: keras.optimizers.Optimizer, compression: Any = hvd.Compression.none
) -> keras.optimizers.Optimizer:
    """Let an optimizer average each gradient as a user of plain Horovod does; return it.

    As with Horovod's option `sparse_as_dense`, which wrapped optimizers do always. Without it the
    rows of an embedding are gathered, and added in any order: the ranks drift apart.

    Args:
        compression: Horovod's; None: nothing is exchanged.
    """
    apply = optimizer.apply

    def averaged(gradients: Any, variables: Any = None) -> None:
        dense = {str(place): tf.convert_to_tensor(one) for place, one in enumerate(gradients)}
        if compression is not None:
            dense = plain_allreduce(dense, compression)
        with cx.allow_plain_optimizers():
            apply(list(dense.values()), variables)

    optimizer.apply = averaged
    return optimizer

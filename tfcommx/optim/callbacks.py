"""Keras callbacks for training over several ranks. Every rank adds the same ones, in the same order."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Mapping
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfcommx import comm
from tfcommx.optim import wrap
from tfcommx.terms import Scheme

log = logging.getLogger("tfcommx")


def exchanger_of(model: keras.Model) -> Any:
    """Return the exchanger of the model's optimizer. **Raises:** RuntimeError where the optimizer is not wrapped."""
    for optimizer in (model.optimizer, getattr(model.optimizer, "inner_optimizer", None)):
        if getattr(optimizer, "exchanger", None) is not None:
            return optimizer.exchanger
    raise RuntimeError("A wrapped optimizer is required. Compile the model with tfcommx.DistributedOptimizer(optimizer, ...).")


class BroadcastState(keras.callbacks.Callback):
    """Start all ranks from the same point: weights, optimizer state and seeds of rank `root`; no XLA, one loss scale.

    **Ranks:** all. **Cost:** one broadcast per variable, once.
    """

    def __init__(self, root: int = 0) -> None:
        super().__init__()
        self.root = root

    def on_train_begin(self, logs: Any = None) -> None:
        model, here = self.model, comm.current()
        exchanger = exchanger_of(model)
        if exchanger.loss_scale == "local":
            wrap.agree_on_loss_scale(model.optimizer)
        if model.jit_compile:
            log.warning("jit_compile is turned off: Horovod's collectives cannot be compiled by XLA.")
            model.jit_compile = False
            model.make_train_function(force=True)
        if not model.optimizer.built:
            model.optimizer.build(model.trainable_variables)
        for number, variable in enumerate([*model.variables, *model.optimizer.variables]):
            value = tf.convert_to_tensor(variable)
            if value.dtype in (tf.bfloat16, tf.bool):  # Horovod has no bfloat16
                variable.assign(tf.cast(here.broadcast(tf.cast(value, tf.float32), self.root, f"tfcommx/state{number}"), value.dtype))
            else:
                variable.assign(here.broadcast(value, self.root, f"tfcommx/state{number}"))


class AverageMetrics(keras.callbacks.Callback):
    """Replace each epoch's metrics by their average over the ranks; put it before callbacks that read them. **Ranks:** all."""

    def on_epoch_end(self, epoch: int, logs: dict[str, float] | None = None) -> None:
        if logs:
            parts = comm.current().gather_objects({name: float(value) for name, value in logs.items()})
            for name in parts[0]:
                logs[name] = float(np.mean([part[name] for part in parts]))


class AverageBatchNorm(keras.callbacks.Callback):
    """Average the non-trainable float weights, such as the moving statistics of batch norm, over the ranks.

    Done before every evaluation inside `fit` and at each epoch's end, so that all replicas are the same model.
    **Ranks:** all. **Cost:** one allreduce of all those weights in one buffer.
    """

    def on_test_begin(self, logs: Any = None) -> None:
        self._average()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self._average()

    def _average(self) -> None:
        here = comm.current()
        weights = [v for v in self.model.non_trainable_variables if keras.backend.is_float_dtype(keras.backend.standardize_dtype(v.dtype))]
        if not weights or here.topology.size == 1:
            return
        flat = tf.concat([tf.reshape(tf.cast(weight, tf.float32), [-1]) for weight in weights], axis=0)
        mean = here.allreduce(flat, "world", "tfcommx/statistics") / here.topology.size
        for weight, part in zip(weights, tf.split(mean, [int(np.prod(weight.shape)) for weight in weights]), strict=True):
            weight.assign(tf.cast(tf.reshape(part, weight.shape), weight.dtype))


class WarmUp(keras.callbacks.Callback):
    """Raise the learning rate linearly from the rate of one rank to the full rate, over the first steps.

    Args:
        learning_rate: the full rate, > 0.
        steps: number of optimizer steps until it is reached, >= 1.
        start: the rate of the first step; None: learning_rate / number of ranks.

    **Source:** Goyal et al., "Accurate, Large Minibatch SGD" (2017), section 2.2.
    """

    def __init__(self, learning_rate: float, steps: int, start: float | None = None) -> None:
        super().__init__()
        if learning_rate <= 0 or steps < 1:
            raise ValueError(f"`learning_rate` must be > 0 and `steps` >= 1. Received {learning_rate} and {steps}.")
        self.learning_rate, self.steps, self.start, self.done = learning_rate, steps, start, 0

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        if self.done <= self.steps:
            start = self.learning_rate / comm.size() if self.start is None else self.start
            part = min(self.done / self.steps, 1.0)
            self.model.optimizer.learning_rate = start + (self.learning_rate - start) * part
            self.done += 1


class SwitchScheme(keras.callbacks.Callback):
    """Change how gradients travel, and the resolution of the pictures, at the start of given epochs; nothing owed is lost.

    Args:
        schemes: epoch (from 0) -> Scheme (or pattern -> Scheme) from this epoch on.
        resolutions: epoch -> pixels from this epoch on.
        resolution: the integer tf.Variable that the input pipeline reads; needed with `resolutions`.

    **Ranks:** all, with equal arguments. **Cost:** the training step is traced again after a change of scheme.
    """

    def __init__(self, schemes: Mapping[int, Scheme | Mapping[str, Scheme]] | None = None,
                 resolutions: Mapping[int, int] | None = None, resolution: tf.Variable | None = None) -> None:
        super().__init__()
        if resolutions and resolution is None:
            raise ValueError("`resolution`, the variable that the input pipeline reads, is required with `resolutions`. Received None.")
        self.schemes, self.resolutions, self.resolution = dict(schemes or {}), dict(resolutions or {}), resolution

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        if epoch in self.resolutions:
            self.resolution.assign(self.resolutions[epoch])
        if epoch in self.schemes:
            exchanger_of(self.model).switch(self.schemes[epoch])
            self.model.make_train_function(force=True)


class CompareReplicas(keras.callbacks.Callback):
    """Compare a hash of all trainable weights over the ranks at the end of every epoch.

    `identical` is True while no difference was seen. **Ranks:** all. **Raises:** RuntimeError that names the ranks that
    differ, unless `strict` is False.
    """

    def __init__(self, strict: bool = True) -> None:
        super().__init__()
        self.strict, self.identical = strict, True

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        digest = hashlib.sha256()
        for variable in self.model.trainable_variables:
            digest.update(np.ascontiguousarray(keras.ops.convert_to_numpy(variable)).tobytes())
        digests = comm.current().gather_objects(digest.hexdigest())
        odd = [rank for rank, other in enumerate(digests) if other != digests[0]]
        if odd:
            self.identical = False
            message = f"All ranks must hold the same trainable weights. After epoch {epoch}, ranks {odd} differ from rank 0."
            if self.strict:
                raise RuntimeError(f"{message} Was the state broadcast (BroadcastState), and are all updates exchanged?")
            log.error(message)

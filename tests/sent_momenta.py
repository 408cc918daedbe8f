"""For tests of optimizers that send momenta: wrapped on threads, with weights and gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import keras
import numpy as np
import tensorflow as tf

from tfcommx.collectives.comm import Comm
from tfcommx.collectives.threads import ThreadComm
from tfcommx.core import Scheme, Topology
from tfcommx.core.wire_formats import DENSE_CODE_BLOCKS
from tfcommx.keras_internals.momenta import SendsMomentum
from tfcommx.keras_internals.optimizers import copy_with
from tfcommx.keras_internals.step import ExchangesGradients
from tfcommx.optim.exchanger import Exchanger
from tfcommx.optim.requested_plan import ExchangeSettings

SHAPES = {"kernel": (16, 64), "bias": (8,)}


def wrap(
    optimizer: keras.optimizers.Optimizer,
    comm: Comm,
    scheme: Scheme | None = None,
    check_replicas_every: int = 3,
) -> keras.optimizers.Optimizer:
    """Wrap an optimizer as DistributedOptimizer does, for the rank of a thread.

    `scheme` None: of the optimizer's own wire, on asa.
    """
    wrapped = copy_with(ExchangesGradients, optimizer)
    sender = type(optimizer) if isinstance(optimizer, SendsMomentum) else None
    settings = ExchangeSettings(check_replicas_every=check_replicas_every, sender=sender)
    scheme = scheme or Scheme("asa", wire=optimizer.default_wire)
    wrapped.exchanger = Exchanger(comm, scheme, settings)
    wrapped.exchanger.serve(wrapped)
    return wrapped


def new_weights() -> list[keras.Variable]:
    """Return a kernel, whose momentum travels, and a bias, whose gradient does."""
    numbers = np.random.default_rng(1)
    return [
        keras.Variable(numbers.normal(size=shape).astype("float32"), name=name)
        for name, shape in SHAPES.items()
    ]


def gradients(rank: int, step: int) -> list[np.ndarray]:
    """Return a rank's gradients of these weights, float32; the kernel's differ in size."""
    numbers = np.random.default_rng([3, rank, step])
    scales = np.exp(np.random.default_rng(4).normal(size=SHAPES["kernel"]))
    kernel = scales * numbers.normal(0.5, 1, SHAPES["kernel"])
    return [kernel.astype("float32"), numbers.normal(size=SHAPES["bias"]).astype("float32")]


def one_bit(vector: np.ndarray) -> np.ndarray:
    """Return a vector as it is received: signs times the mean magnitude of each block."""
    blocks = vector.reshape(-1, DENSE_CODE_BLOCKS["int1"])
    steps = np.abs(blocks).mean(axis=1, dtype=np.float32, keepdims=True)
    steps = tf.cast(tf.cast(steps, tf.bfloat16), tf.float32).numpy()
    return np.where(np.signbit(blocks), -steps, steps).reshape(vector.shape)


class MomentumInOneBit:
    """The momentum of the second phase on all ranks, with error feedback on both hops."""

    def __init__(self, residuals: np.ndarray, mean: np.ndarray, beta: float):
        """Begin with the residuals of the first phase, [ranks, entries]."""
        self.residuals, self.mean, self.beta = residuals, mean.ravel(), beta

    def step(self, gradients: Sequence[np.ndarray]) -> None:
        """Move by the gradients of all ranks."""
        ranks, total = len(gradients), []
        waiting = [
            self.beta / (1 - self.beta) * self.mean + gradient.ravel() + residual
            for gradient, residual in zip(gradients, self.residuals, strict=True)
        ]
        sent = [one_bit(one.astype(np.float32)) for one in waiting]
        self.residuals = np.stack(waiting) - np.stack(sent)
        shards = np.split(np.arange(self.mean.size), ranks)
        for owner, shard in enumerate(shards):
            part = sum(one[shard] for one in sent) + self.residuals[owner, shard]
            total.append(one_bit(part.astype(np.float32)))
            self.residuals[owner, shard] = part - total[-1]
        self.mean = (1 - self.beta) * np.concatenate(total) / ranks


INPUTS, OUTPUTS, ROWS, STEPS = 32, 32, 16, 150


def final_error(make: Callable[[], keras.optimizers.Optimizer], scheme: Scheme) -> float:
    """Fit a noisy linear model of inputs whose sizes differ; return the error without the noise."""
    numbers = np.random.default_rng(0)
    sizes = numbers.permutation(np.geomspace(0.1, 1, INPUTS))
    truth = numbers.normal(size=(INPUTS, OUTPUTS))

    def work(comm: Comm) -> np.ndarray:
        optimizer = wrap(make(), comm, scheme, check_replicas_every=50)
        weights = [keras.Variable(np.zeros(truth.shape, "float32"), name="kernel")]
        batches = np.random.default_rng([1, comm.rank])
        for step in range(STEPS):
            optimizer.learning_rate = 0.1 * (1 - step / STEPS)
            x = sizes * batches.normal(size=(ROWS, INPUTS))
            noise = 2 * batches.normal(size=(ROWS, OUTPUTS))
            gradient = x.T @ (x @ (weights[0].numpy() - truth) - noise) / ROWS
            optimizer.apply([tf.constant(gradient, tf.float32)], weights)
        return weights[0].numpy()

    first, second = ThreadComm.run(Topology(2, 1), work)
    np.testing.assert_array_equal(first, second)
    return float(np.square(sizes[:, None] * (first - truth)).sum() / OUTPUTS)

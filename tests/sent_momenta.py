"""For tests of optimizers that send momenta: wrapped on threads, with weights and gradients."""

from __future__ import annotations

import keras
import numpy as np

from tfcommx.collectives.comm import Comm
from tfcommx.core import Scheme
from tfcommx.keras_internals import ExchangesGradients, SendsMomentum, copy_with
from tfcommx.optim.exchanger import Exchanger
from tfcommx.optim.requested_plan import ExchangeSettings

SHAPES = {"kernel": (16, 64), "bias": (8,)}


def wrap(
    optimizer: keras.optimizers.Optimizer, comm: Comm, scheme: Scheme | None = None
) -> keras.optimizers.Optimizer:
    """Wrap an optimizer as DistributedOptimizer does, for the rank of a thread.

    `scheme` None: of the optimizer's own wire, on asa.
    """
    wrapped = copy_with(ExchangesGradients, optimizer)
    sender = type(optimizer) if isinstance(optimizer, SendsMomentum) else None
    settings = ExchangeSettings(check_replicas_every=1, sender=sender)
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

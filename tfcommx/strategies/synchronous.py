"""Synchronous: every rank applies the exchanged gradients. The identity of the strategies."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from tfcommx.strategies.base import Strategy


@dataclass(frozen=True)
class Synchronous(Strategy):
    """Exchange gradients at every step and apply them on every rank, as plain Horovod does.

    The gradients have the same bits on all ranks, so the weights do not drift apart.
    """

    updates_alike: ClassVar[bool] = True

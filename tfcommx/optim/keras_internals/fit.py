"""Where `fit` begins: an epoch, and a step of it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import keras


def begin_at_epoch(model: keras.Model, epoch: int | None) -> None:
    """Let `fit` begin at an epoch (from 0), whatever its `initial_epoch`; None: no more.

    To be called before the end of `on_train_begin`. Keras's own BackupAndRestore does the same.
    """
    model._initial_epoch = epoch


def skip_steps(model: keras.Model, steps: int) -> None:
    """Let the next steps of `fit` take their batches and do nothing with them.

    Args:
        model: in `fit`, before the first step of an epoch.
        steps: >= 0, a multiple of `steps_per_execution`.
    """
    if not steps:
        return
    train, together, left = model.train_function, model.steps_per_execution, steps

    def skip(iterator: Iterator[Any]) -> dict[str, Any]:
        nonlocal left
        for _ in range(together):
            next(iterator)
        left -= together
        if left <= 0:
            model.train_function = train
        return {}

    model.train_function = skip

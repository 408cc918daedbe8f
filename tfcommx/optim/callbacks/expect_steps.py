"""Tell "auto" how many training steps follow, as far as `fit` knows."""

from __future__ import annotations

from typing import Any

import keras

from tfcommx.optim.wrapped import exchanger_in, steps_of_update


def expect_steps(
    optimizer: keras.optimizers.Optimizer,
    params: dict[str, Any] | None,
    epoch: int,
    end: int | None = None,
) -> None:
    """Tell "auto" how many steps follow, unless a recipe has told it of the whole run.

    Args:
        optimizer: a wrapped one.
        params: of a callback, as `fit` sets them.
        epoch, end: the epoch that begins, and the one that has another scheme; None: there is none.
    """
    requested = exchanger_in(optimizer).requested
    if requested.expected_run.whole_run:
        return
    steps, epochs = (params or {}).get("steps"), (params or {}).get("epochs")
    follow = None  # What an earlier fit has told is not true any more
    if steps is not None and epochs is not None:
        last = epochs if end is None else min(end, epochs)
        follow = steps * (last - epoch) // steps_of_update(optimizer)
    requested.expected_run = requested.expected_run._replace(steps=follow, steps_of_epoch=steps)

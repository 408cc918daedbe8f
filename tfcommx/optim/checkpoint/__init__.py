"""Checkpoints that lose nothing: model, optimizers, and the residuals of every rank.

first = cx.checkpoint.restore(model, "run/checkpoint")     # 0 if there is none
model.fit(..., initial_epoch=first, callbacks=[
    cx.callbacks.BroadcastState(), ..., cx.checkpoint.Checkpoint("run/checkpoint")])
"""

from tfcommx.optim.checkpoint.files import Head
from tfcommx.optim.checkpoint.save_restore import (
    Checkpoint,
    RestoreOwn,
    last,
    next_epoch,
    restore,
    save,
)

__all__ = ["Checkpoint", "Head", "RestoreOwn", "last", "next_epoch", "restore", "save"]

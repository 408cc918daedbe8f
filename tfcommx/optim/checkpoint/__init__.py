"""Checkpoints that lose nothing: model, optimizers, and the residuals of every rank.

first = cx.checkpoint.restore(model, "run/checkpoint")     # 0 if there is none
model.fit(..., initial_epoch=first, callbacks=[
    cx.callbacks.BroadcastState(), ..., cx.checkpoint.Checkpoint("run/checkpoint")])
"""

from tfcommx.optim.checkpoint.callback import Checkpoint
from tfcommx.optim.checkpoint.files import Head
from tfcommx.optim.checkpoint.own_values import RestoreOwn
from tfcommx.optim.checkpoint.restoring import last, next_epoch, restore
from tfcommx.optim.checkpoint.saving import save

__all__ = ["Checkpoint", "Head", "RestoreOwn", "last", "next_epoch", "restore", "save"]

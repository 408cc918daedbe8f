"""Checkpoints of model, optimizers and every rank's residuals.

first = cx.checkpoint.restore(model, "run/checkpoint")     # 0 without a checkpoint
model.fit(..., initial_epoch=first, callbacks=[
    cx.callbacks.BroadcastState(), ..., cx.checkpoint.Checkpoint("run/checkpoint")])

saving, restoring, records, files, lock   on disk; snapshots, mirror, place   in memory;
newest: the newest complete one of both; state: arrays of a model, compared bitwise
"""

from tfcommx.checkpoint.callback import Checkpoint
from tfcommx.checkpoint.files import Head
from tfcommx.checkpoint.restoring import last, next_epoch, restore
from tfcommx.checkpoint.saving import Patience, SaveError, save
from tfcommx.checkpoint.snapshots import RestoreRankValues, Snapshots

__all__ = [
    "Checkpoint",
    "Head",
    "Patience",
    "RestoreRankValues",
    "SaveError",
    "Snapshots",
    "last",
    "next_epoch",
    "restore",
    "save",
]

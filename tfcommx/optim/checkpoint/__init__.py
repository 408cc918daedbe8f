"""Checkpoints that lose nothing: model, optimizers, and the residuals of every rank."""

from tfcommx.optim.checkpoint.save_restore import Checkpoint, next_epoch, restore, save

__all__ = ["Checkpoint", "next_epoch", "restore", "save"]

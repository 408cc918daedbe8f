"""Checkpoints of model, optimizers and every rank's residuals.

first = cx.checkpoint.restore(model, "run/checkpoint")     # 0 if there is none
model.fit(..., initial_epoch=first, callbacks=[
    cx.callbacks.BroadcastState(), ..., cx.checkpoint.Checkpoint("run/checkpoint")])
"""

import warnings
from typing import Any

from tfcommx.optim.checkpoint.callback import Checkpoint
from tfcommx.optim.checkpoint.files import Head
from tfcommx.optim.checkpoint.memory.snapshots import Snapshots
from tfcommx.optim.checkpoint.rank_values import RestoreRankValues
from tfcommx.optim.checkpoint.restoring import last, next_epoch, restore
from tfcommx.optim.checkpoint.saving import Patience, SaveError, save

# Old name -> new name; both work until 1.0
_RENAMED = {"RestoreOwn": "RestoreRankValues"}

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


def __getattr__(name: str) -> Any:
    if name not in _RENAMED:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    new = _RENAMED[name]
    warnings.warn(
        f"{name} is called {new} now; the old name works until 1.0.",
        DeprecationWarning,
        stacklevel=2,
    )
    return globals()[new]

"""Keras callbacks for training over several ranks.

Every rank adds the same callbacks, in the same order.
"""

from typing import Any

from tfcommx.callbacks.agree import AgreeOnStop, CompareReplicas
from tfcommx.callbacks.average import AverageBatchNorm, AverageMetrics, RecalibrateBatchNorm
from tfcommx.callbacks.broadcast_state import BroadcastState
from tfcommx.callbacks.choose_again import ChooseAgain
from tfcommx.callbacks.standard import Standard
from tfcommx.callbacks.switch import SwitchScheme, WarmUp

__all__ = [
    "AgreeOnStop",
    "AverageBatchNorm",
    "AverageMetrics",
    "BroadcastState",
    "ChooseAgain",
    "CompareReplicas",
    "RecalibrateBatchNorm",
    "Standard",
    "SwitchScheme",
    "WarmUp",
]

# Horovod's callbacks -> what replaces them
_HOROVODS = {
    "BroadcastGlobalVariablesCallback": "BroadcastState(root=0)",
    "MetricAverageCallback": "BroadcastState, which averages metrics, or AverageMetrics",
    "LearningRateWarmupCallback": "WarmUp(rate, steps=...)",
    "LearningRateScheduleCallback": "a schedule of Keras",
    "CommitStateCallback": "cx.checkpoint.Checkpoint",
    "BestModelCheckpoint": "keras.callbacks.ModelCheckpoint on rank 0",
}


def __getattr__(name: str) -> Any:
    remedy = ""
    if name in _HOROVODS:
        remedy = f" Take {_HOROVODS[name]}: docs/how-to/move-from-horovod.md."
    raise AttributeError(f"module 'tfcommx.callbacks' has no attribute {name!r}.{remedy}")

"""Keras callbacks for training over several ranks.

Every rank adds the same callbacks, in the same order.
"""

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

"""Keras callbacks for training over several ranks.

Every rank adds the same ones, in the same order.
"""

from tfcommx.optim.callbacks.agree import AgreeOnStop, CompareReplicas
from tfcommx.optim.callbacks.average import AverageBatchNorm, AverageMetrics
from tfcommx.optim.callbacks.broadcast_state import BroadcastState
from tfcommx.optim.callbacks.choose_again import ChooseAgain
from tfcommx.optim.callbacks.recalibrate import RecalibrateBatchNorm
from tfcommx.optim.callbacks.standard import Standard
from tfcommx.optim.callbacks.switch import SwitchScheme, WarmUp

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

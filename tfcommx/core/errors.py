"""The errors of tfcommx, which all derive from TfcommxError, and the logger of its warnings.

A message has the requirement, the value received, the rank or variable, and the remedy.

    TfcommxError
        ConfigurationError   a setting, an argument, or the model and optimizer that were given
            PlanError        a scheme, plan or topology that cannot be carried out
        LaunchError          ranks that cannot be started, or that have not found each other
        RankLostError        a rank that is missing or has left
        DataError            samples, or a file that is damaged or does not fit
        CheckpointError      a checkpoint that cannot be saved or restored
"""

import logging

log = logging.getLogger("tfcommx")


class TfcommxError(Exception):
    """Base of all errors of tfcommx; the message names the remedy."""


# In place of the other base's constructor, such as ValueError's: AutoGraph, which converts a user's
# tf.function, raises an error again as its own class only with this one, otherwise as StagingError
TfcommxError.__init__ = Exception.__init__  # type: ignore[method-assign]


class ConfigurationError(TfcommxError, ValueError):
    """A setting or argument that cannot be used; no collective has started yet."""


class PlanError(ConfigurationError):
    """A scheme, plan or topology that cannot be carried out; no collective has started yet."""


class LaunchError(TfcommxError, RuntimeError):
    """Ranks that cannot be started or have not found each other.

    Args:
        status: exit status of `tfcommx`: that of the rank that failed first, or 2 for a wrong
            setting.
    """

    def __init__(self, message: str, status: int = 2) -> None:
        super().__init__(message)
        self.status = status


class RankLostError(TfcommxError, RuntimeError):
    """A rank that is missing, or that has left while others need it."""


class DataError(TfcommxError, ValueError):
    """Samples that cannot be used, or a file that is damaged or does not fit."""


class CheckpointError(TfcommxError, ValueError):
    """A checkpoint that cannot be saved or restored."""

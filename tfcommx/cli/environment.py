"""What the commands set before TensorFlow and Horovod are loaded."""

from __future__ import annotations

import os


def quiet_tensorflow() -> None:
    """Let TensorFlow, oneDNN and absl print no start-up messages; call it before they are loaded.

    Processes that are started from here inherit it: horovodrun loads TensorFlow too. Errors still
    come as exceptions. If the user has set TF_CPP_MIN_LOG_LEVEL, that level stays.
    """
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")


def quiet_horovod() -> None:
    """Let Horovod print no messages of its own if a rank is gone; the launcher names that rank.

    If the user has set HOROVOD_LOG_LEVEL, that level stays.
    """
    os.environ.setdefault("HOROVOD_LOG_LEVEL", "fatal")

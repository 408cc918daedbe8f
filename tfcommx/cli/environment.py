"""What the commands set before TensorFlow is loaded."""

from __future__ import annotations

import os


def quiet_tensorflow() -> None:
    """Let TensorFlow, oneDNN and absl print no start-up messages; call it before they are loaded.

    Errors still come as exceptions. Who sets TF_CPP_MIN_LOG_LEVEL gets the messages of that level.
    """
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

"""cx.init() in scripts of TensorFlow 1."""

from __future__ import annotations

import pytest
import tensorflow as tf

import tfcommx as cx
from tfcommx.collectives import process


def test_a_graph_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error was about a SymbolicTensor that has no `numpy`."""
    monkeypatch.setattr(process, "started", lambda: False)
    with tf.Graph().as_default(), pytest.raises(cx.ConfigurationError, match=r"eagerly.*`fit`"):
        cx.init()

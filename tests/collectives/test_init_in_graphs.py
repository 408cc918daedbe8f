"""cx.init() in scripts of TensorFlow 1, and after Horovod has ended."""

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


def test_a_second_call_after_hvd_shutdown_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """It returned a Comm whose first collective asked for hvd.init()."""
    comm = cx.init()
    assert cx.init() is comm
    monkeypatch.setattr(comm._hvd, "is_initialized", lambda: False)
    with pytest.raises(cx.ConfigurationError, match=r"after hvd\.shutdown\(\)"):
        cx.init()

"""Several calls of `fit` in one process of a supervised run."""

from __future__ import annotations

import shutil
import time
from pathlib import Path
from typing import Any

import keras
import pytest

import tfcommx as cx
from tfcommx.checkpoint import snapshots as module
from tfcommx.checkpoint.mirror import mirrors_of
from tfcommx.launch.supervision import Supervision
from tfcommx.supervisor.generation import RankZeroListener, RunSecret


def test_all_fits_have_one_connection_and_one_listener(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each `fit` left a thread and a connection: a cross-validation ended without descriptors."""
    cx.init()
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3)])
    model.compile(cx.DistributedOptimizer(keras.optimizers.SGD(0.1)), "mse", jit_compile=False)
    heard: list[dict[str, Any]] = []
    ours = RunSecret()
    link = RankZeroListener(ours, 0, heard.append, [], local=True)
    port = link._listening.getsockname()[1]
    run = Supervision(ours.run, 0, ours.secret, (("127.0.0.1", port),), "here")
    monkeypatch.setattr(module, "supervision", lambda: run)
    try:
        links = [cx.checkpoint.Snapshots(model, tmp_path, 5)._link for _ in range(2)]
        assert links[0] is links[1] and links[0] is not None
        links[0].say(epoch_ended=0)
        deadline = time.monotonic() + 60
        while {"epoch_ended": 0} not in heard and time.monotonic() < deadline:
            time.sleep(0.01)
        assert [*map(list, heard)] == [["connected"], ["epoch_ended"]]
        listeners = [mirrors_of(run, (), tmp_path / name) for name in "aab"]
        assert listeners[0] is listeners[1] is not listeners[2]
    finally:
        link.close()
        shutil.rmtree(run.memory)

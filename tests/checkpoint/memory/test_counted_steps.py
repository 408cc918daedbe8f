"""Steps of a supervised run: the last execution of an epoch may be shorter than the others."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

import tfcommx as cx
from tfcommx.checkpoint import callback as module
from tfcommx.checkpoint.callback import Checkpoint


@pytest.mark.parametrize(("steps", "together"), [(5, 2), (6, 2), (1, 4), (3, 1), (None, 2)])
def test_all_steps_of_an_epoch_count_once(
    steps: int | None, together: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With steps_per_execution=2, five steps counted as six: `total` grew by one an epoch."""
    monkeypatch.setattr(module, "save", lambda *_, **__: None)
    counted: list[int] = []
    callback = Checkpoint(tmp_path)
    callback._snapshots = SimpleNamespace(  # type: ignore[assignment]
        after_step=lambda epoch, step, steps, taken: counted.append(taken),
        end_epoch=lambda epoch, taken: counted.append(taken),
        notes=dict,
    )
    callback._model = SimpleNamespace(steps_per_execution=together)
    callback.set_params({"steps": steps, "epochs": 1})
    callback.on_epoch_begin(0)
    for batch in range(0, steps or 4, together):
        callback.on_train_batch_begin(batch)
    callback.on_epoch_end(0)
    assert sum(counted) == (steps or 4)


def test_snapshots_need_whole_steps(tmp_path: Path) -> None:
    with pytest.raises(cx.ConfigurationError, match="`every`"):
        cx.checkpoint.Snapshots(None, tmp_path, 0)

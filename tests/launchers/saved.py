"""The last checkpoint of a run of a recipe on 4 ranks, for comparison."""

from __future__ import annotations

import io
import json
import zipfile
from pathlib import Path

import h5py
import numpy as np


def left(folder: Path) -> dict[str, bytes]:
    """Return the content of a run's last checkpoint: weights, optimizer, residuals of all ranks."""
    files = folder / "checkpoint"
    save = json.loads((files / "checkpoint.json").read_text())["save"]
    found: dict[str, bytes] = {}

    def keep(name: str, item: object) -> None:
        # Keras does not save the seeds, which are part of each rank's own state
        if isinstance(item, h5py.Dataset) and "seed_generator" not in name:
            found[name] = item[()].tobytes()

    with zipfile.ZipFile(files / f"tfcommx-{save:04d}.keras") as archive:
        model = io.BytesIO(archive.read("model.weights.h5"))
    with h5py.File(model) as stored:
        stored.visititems(keep)
    for rank in range(4):
        with np.load(files / f"residuals-{save:04d}-rank-{rank:04d}.npz") as stored:
            found |= {f"{rank} {name}": stored[name].tobytes() for name in stored.files}
    assert found
    return found

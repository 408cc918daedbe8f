"""Everything that a run leaves in its folder."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from tfcommx.report.events import write_events
from tfcommx.report.figures import draw


def write(summary: dict[str, Any], folder: Path) -> None:
    """Write summary.json, learning_curve.png, time_breakdown.png and TensorBoard events into
    `folder`.

    **Ranks:** rank 0 only.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    half = folder / "summary.json.part"
    half.write_text(json.dumps(summary, indent=1) + "\n")
    os.replace(half, folder / "summary.json")
    draw(summary, folder)
    write_events(summary, folder / "tensorboard")

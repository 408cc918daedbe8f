"""Everything that a run writes into its folder at its end."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from tfcommx.report.figures import draw


def write(summary: dict[str, Any], folder: Path) -> None:
    """Write summary.json and the pictures into the run's folder.

    Args:
        summary: as `training.train` made it.
        folder: of the run; made if it is not there.

    **Ranks:** rank 0 only.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    half = folder / "summary.json.part"
    half.write_text(json.dumps(summary, indent=1) + "\n")
    os.replace(half, folder / "summary.json")
    draw(summary, folder)

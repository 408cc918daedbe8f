"""Everything that a run writes into its folder at its end."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tfcommx.report.figures import draw
from tfcommx.report.page import write_page
from tfcommx.report.summary import write_json


def write(summary: dict[str, Any], folder: Path) -> None:
    """Write summary.json, the pictures and the page into the run's folder.

    Args:
        summary: as `training.train` made it.
        folder: of the run; made if it is not there.

    **Ranks:** rank 0 only.
    """
    folder = Path(folder)
    write_json(summary, folder / "summary.json")
    draw(summary, folder)
    write_page({summary.get("name", "run"): summary}, folder)

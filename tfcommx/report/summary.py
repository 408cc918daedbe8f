"""summary.json: written at the end of a run, read by `tfcommx report`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

# The parts of an epoch, as training.timing.Timing measures them, in the order of the stacked bars.
PARTS = {
    "data": "waiting for data",
    "compute": "forward and backward pass",
    "gradients": "waiting for gradients",
    "update": "update",
    "step": "steps (older runs)",
    "first_step": "first step of a phase: tracing",
    "evaluation": "evaluation",
    "saving": "saving checkpoints",
    "other": "averaging, comparing, reporting",
}
# What a summary must hold so that it can be shown
REQUIRED = (
    "test_accuracy",
    "ranks",
    "nodes",
    "epochs",
    "seconds",
    "images_per_second",
    "bytes_between_nodes",
    "bytes_between_nodes_dense",
    "replicas_identical",
    "rows",
)


class ReportError(ValueError):
    """A run folder without a summary that can be shown."""


def scheme_text(row: dict[str, Any]) -> str:
    """Return the route and, of a sparse scheme, the rule and density of an epoch's row."""
    sparse = "" if row["selection"] == "all" else f" {row['selection']} {row['density']:g}"
    return f"{row['route']}{sparse}"


def seconds_by_part(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Return the seconds of all epochs' rows, by part; 0 for what was not measured."""
    return {part: sum(row["seconds"].get(part, 0.0) for row in rows) for part in PARTS}


def read(folder: Path) -> dict[str, Any]:
    """Read a run's summary.json.

    Args:
        folder: of the run.

    Returns:
        The summary, as `training.train` made it.

    **Raises:** ReportError if there is none, or if it lacks a key.
    """
    path = Path(folder) / "summary.json"
    try:
        summary: dict[str, Any] = json.loads(path.read_text())
    except OSError as error:
        raise ReportError(
            f"A run folder with a summary.json is required. {path}: {error.strerror}."
        ) from error
    except ValueError as error:
        raise ReportError(f"{path} is not JSON: {error}.") from error
    missing = [key for key in REQUIRED if key not in summary]
    if missing:
        raise ReportError(f"{path} lacks {', '.join(missing)}. Train again to write it anew.")
    return summary

"""summary.json: written at the end of a run, read by `tfcommx report`."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

# The parts of an epoch, as training.timing.Timing measures them, in the order of the stacked bars.
PARTS = {
    "data": "waiting for data",
    "compute": "forward and backward pass",
    "gradients": "waiting for gradients",
    "update": "update",
    "step": "steps (older runs)",
    "first_step": "first steps: tracing",
    "evaluation": "evaluation",
    "saving": "saving checkpoints",
    "other": "averaging, comparing, reporting",
}
# Of these, what a phase's throughput counts
STEADY = ("data", "compute", "gradients", "update")
# What a summary must hold so that it can be shown
REQUIRED = (
    "test_accuracy",
    "ranks",
    "nodes",
    "epochs",
    "seconds",
    "throughput",
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


def of_today(found: dict[str, Any]) -> dict[str, Any]:
    """Return an epoch's row, or a summary without its rows, with the names of today.

    >>> of_today({"images_per_second": 5.0})
    {'counted': 'images', 'throughput': 5.0}
    """
    names = {"images_per_second": "throughput"}
    renamed = {names.get(name, name): value for name, value in found.items()}
    return {"counted": "images"} | renamed


def size_text(row: dict[str, Any]) -> str:
    """Return a row's resolution and its unit, if that is known.

    >>> size_text({"resolution": 96, "counted": "images"})
    '96 px'
    """
    units = {"images": " px", "word pieces": " pieces"}
    return f"{row['resolution']}{units.get(row['counted'], '')}"


def more_scores(row: dict[str, Any]) -> dict[str, float]:
    """Return the scores on the test set beside the accuracy, by what they are called in tables.

    >>> more_scores({"test_accuracy": 0.7, "test_top5": 0.9, "loss": 1.2})
    {'top5': 0.9}
    """
    return {
        name.removeprefix("test_"): value
        for name, value in row.items()
        if name.startswith("test_") and name != "test_accuracy"
    }


def time_to_target(rows: list[dict[str, Any]], score: str, at_least: float) -> dict[str, Any]:
    """Return when a score was reached first: its epoch and the clock then, None if it was not.

    >>> rows = [{"epoch": n, "test_top5": n / 4, "clock_seconds": 10.0 * n} for n in (1, 2, 3)]
    >>> time_to_target(rows, "top5", 0.5)
    {'score': 'top5', 'at_least': 0.5, 'best': 0.75, 'epoch': 2, 'seconds': 20.0}

    Args:
        rows: of the epochs that have ended. Those of an earlier process may lack the score, and the
            clock.
        score: its name, without `test_`.
        at_least: what it must be.
    """
    name = f"test_{score}"
    scored = [row for row in rows if name in row]
    reached = next((row for row in scored if row[name] >= at_least), {})
    return {
        "score": score,
        "at_least": at_least,
        "best": max((row[name] for row in scored), default=None),
        "epoch": reached.get("epoch"),
        "seconds": reached.get("clock_seconds"),
    }


def target_text(target: dict[str, Any]) -> str:
    """Say when a target was reached, in one sentence.

    >>> target_text(dict(score="top5", at_least=0.93, best=0.934, epoch=28, seconds=151.2))
    'top5 >= 0.93 in epoch 28 after 151.2 s, without evaluation and saving'
    """
    wanted = f"{target['score']} >= {target['at_least']:g}"
    if target["epoch"] is None:
        best = target["best"]
        seen = "it was not measured" if best is None else f"the best was {best:.4f}"
        return f"{wanted} was not reached; {seen}"
    if target["seconds"] is None:
        return f"{wanted} in epoch {target['epoch']}, time not known"
    return (
        f"{wanted} in epoch {target['epoch']} after {target['seconds']:.1f} s, without evaluation "
        "and saving"
    )


def seconds_by_part(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Return the seconds of all epochs' rows, by part; 0 for what was not measured."""
    return {part: sum(row["seconds"].get(part, 0.0) for row in rows) for part in PARTS}


def phase_rows(summary: dict[str, Any]) -> list[dict[str, Any]]:
    """Return a row for each phase that has ended an epoch, as in the paper's table 4.

    Throughput counts the time in steps and waiting for data, without first steps, which trace.
    Scaling efficiency is the throughput over that of as many processes as one alone would give; it
    is None if one alone was not measured.

    **Source:** Shi et al., "Towards Scalable Distributed Training of Deep Learning on Public Cloud
    Clusters" (2021), section 5.6, table 4.
    """
    found = []
    for phase in sorted({row["phase"] for row in summary["rows"] if "phase" in row}):
        rows = [row for row in summary["rows"] if row.get("phase") == phase]
        samples = busy = processes = 0.0
        for row in rows:  # A process that resumed the run may have had other ranks and batches
            # Rows of older runs do not say how many steps are in `first_step`: one, or none
            first_steps = row.get("first_steps", row["seconds"]["first_step"] > 0)
            samples += (row["steps"] - first_steps) * row["global_batch"]
            seconds = sum(row["seconds"][kind] for kind in STEADY)
            busy += seconds
            processes += seconds * row.get("ranks", summary["ranks"])
        rate = samples / busy if busy else 0.0
        alone = dict(enumerate(summary.get("alone", ()), 1)).get(phase)
        found.append(
            {
                "phase": phase,
                "epochs": len(rows),
                "size": size_text(rows[0]),
                "global_batch": rows[0]["global_batch"],
                "scheme": scheme_text(rows[-1]),
                "counted": rows[0]["counted"],
                "throughput": rate,
                "alone": alone,
                "efficiency": samples / (alone * (processes or 1.0)) if alone else None,
            }
        )
    return found


def plural(count: int, word: str) -> str:
    """Write a number of things for people.

    >>> plural(2, "node"), plural(1, "process")
    ('2 nodes', '1 process')
    """
    ending = "" if count == 1 else "es" if word.endswith("s") else "s"
    return f"{count} {word}{ending}"


def bytes_text(count: float) -> str:
    """Write a number of bytes for people.

    >>> bytes_text(1234), bytes_text(2e6), bytes_text(0)
    ('1.23 kB', '2 MB', '0 B')
    """
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000 or unit == "GB":
            return f"{count:.3g} {unit}" if count < 1000 else f"{count:.0f} {unit}"
        count /= 1000
    raise AssertionError


def time_text(seconds: float) -> str:
    """Write a time for people.

    >>> time_text(12.3), time_text(150), time_text(4000)
    ('12 s', '2 min 30 s', '1 h 6 min')
    """
    minutes, rest = divmod(round(seconds), 60)
    if minutes == 0:
        return f"{rest} s"
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


def write_json(found: dict[str, Any], path: Path) -> None:
    """Write a report as JSON, as a whole or not at all; its folder is made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    half = path.with_name(f"{path.name}.part")
    half.write_text(json.dumps(found, indent=1) + "\n")
    os.replace(half, path)


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
    if not isinstance(summary, dict):
        raise ReportError(f"{path} is no summary of a run. Train again to write it anew.")
    summary = of_today(summary)
    missing = [key for key in REQUIRED if key not in summary]
    if missing:
        raise ReportError(f"{path} lacks {', '.join(missing)}. Train again to write it anew.")
    return summary | {"rows": list(map(of_today, summary["rows"]))}

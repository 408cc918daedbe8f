"""summary.json, written at the end of a run and read by `tfcommx report`, and texts from it."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich import filesize

from tfcommx.core import DataError, json_text, reading, write_text

FILE = "summary.json"
# What to do about a missing or damaged summary
REMEDY = (
    "Give the folder of a run, or train again to write it anew. A run that was stopped in its "
    "first epoch has none: continue it by `tfcommx train ... --resume`."
)
# The parts of an epoch, as training.steps.Timing measures them
PARTS = {
    "data": "waiting for data",
    "compute": "forward and backward pass",
    "gradients": "waiting for gradients",
    "update": "update",
    "first_step": "first steps: tracing",
    "evaluation": "evaluation",
    "saving": "saving checkpoints",
    "other": "averaging, comparing, reporting",
}
# The parts that a phase's throughput counts
STEADY = ("data", "compute", "gradients", "update")
# Keys that a summary must have to be shown
REQUIRED = (
    *("test_accuracy", "ranks", "nodes", "epochs", "seconds", "throughput", "rows"),
    *("bytes_between_nodes", "bytes_between_nodes_dense", "replicas_identical"),
)


class ReportError(DataError):
    """A run folder without a summary that can be shown."""


def scheme_text(row: dict[str, Any]) -> str:
    """Return the route of an epoch's row and, if its scheme is sparse, the rule and density."""
    sparse = "" if row["selection"] == "all" else f" {row['selection']} {row['density']:g}"
    return f"{row['route']}{sparse}"


def size_text(row: dict[str, Any]) -> str:
    """Return a row's resolution with its unit, if the unit is known.

    >>> size_text({"resolution": 96, "counted": "images"})
    '96 px'
    """
    units = {"images": " px", "word pieces": " pieces"}
    return f"{row['resolution']}{units.get(row['counted'], '')}"


def more_scores(row: dict[str, Any]) -> dict[str, float]:
    """Return the test scores other than accuracy, by their names in tables.

    >>> more_scores({"test_accuracy": 0.7, "test_top5": 0.9, "loss": 1.2})
    {'top5': 0.9}
    """
    return {
        name.removeprefix("test_"): value
        for name, value in row.items()
        if name.startswith("test_") and name != "test_accuracy"
    }


def time_to_target(rows: list[dict[str, Any]], score: str, at_least: float) -> dict[str, Any]:
    """Return the epoch and the seconds at which a score was reached; both None if it was not.

    >>> rows = [{"epoch": n, "test_top5": n / 4, "clock_seconds": 10.0 * n} for n in (1, 2, 3)]
    >>> time_to_target(rows, "top5", 0.5)
    {'score': 'top5', 'at_least': 0.5, 'best': 0.75, 'epoch': 2, 'seconds': 20.0}

    Args:
        rows: rows of the finished epochs. Rows of an earlier process may lack score and clock.
        score: the name of the score, without `test_`.
        at_least: the value to reach.
    """
    name = f"test_{score}"
    # Without NaN, which is neither less nor greater than the scores before a divergence
    scored = [row for row in rows if name in row and not math.isnan(row[name])]
    reached = next((row for row in scored if row[name] >= at_least), {})
    return {
        "score": score,
        "at_least": at_least,
        "best": max((row[name] for row in scored), default=None),
        "epoch": reached.get("epoch"),
        "seconds": reached.get("clock_seconds"),
    }


def target_text(target: dict[str, Any]) -> str:
    """Return a sentence on when a target was reached.

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


def snapshots_text(cost: dict[str, Any]) -> str:
    """Return a sentence on the cost of snapshots in memory.

    >>> snapshots_text(dict(count=12, copy_seconds=0.0041, write_seconds=0.21, bytes=2_000_000))
    '12 of 2.00 MB; for each one steps waited 4.1 ms, and it was written within 0.21 s beside them'
    """
    return (
        f"{cost['count']} of {bytes_text(cost['bytes'])}; for each one steps waited "
        f"{time_text(cost['copy_seconds'])}, and it was written within "
        f"{time_text(cost['write_seconds'])} beside them"
    )


def seconds_by_part(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Return the seconds of all epochs' rows by part; 0 for a part that was not measured."""
    return {part: sum(row["seconds"].get(part, 0.0) for row in rows) for part in PARTS}


def phase_rows(summary: dict[str, Any]) -> list[dict[str, Any]]:
    """Return a row for each phase with a finished epoch, as in the paper's table 4.

    Scaling efficiency is the throughput divided by that of one process times the number of
    processes; None if the throughput of one process was not measured.

    **Source:** Shi et al., "Towards Scalable Distributed Training of Deep Learning on Public Cloud
    Clusters" (2021), section 5.6, table 4.
    """
    phases = []
    for phase in sorted({row["phase"] for row in summary["rows"]}):
        rows = [row for row in summary["rows"] if row["phase"] == phase]
        samples = busy = processes = 0.0
        for row in rows:  # A process that resumed the run may have had other ranks and batches
            # Without first steps, because these trace
            samples += (row["steps"] - row["first_steps"]) * row["global_batch"]
            seconds = sum(row["seconds"][kind] for kind in STEADY)
            busy += seconds
            processes += seconds * row["ranks"]
        rate = samples / busy if busy else 0.0
        alone = dict(enumerate(summary.get("alone", ()), 1)).get(phase)
        phases.append(
            {
                "phase": phase,
                "epochs": len(rows),
                "size": size_text(rows[0]),
                "global_batch": rows[0]["global_batch"],
                # The last epoch's, because the first ones may have the densities of a warm-up
                "scheme": scheme_text(rows[-1]),
                "counted": rows[0]["counted"],
                "throughput": rate,
                "alone": alone,
                "efficiency": samples / (alone * (processes or 1.0)) if alone else None,
            }
        )
    return phases


def phase_cells(row: dict[str, Any]) -> tuple[str, ...]:
    alone = row["alone"]
    return (
        f"{row['epochs']}",
        row["size"],
        f"{row['global_batch']}",
        row["scheme"],
        f"{row['throughput']:.0f}",
        f"{alone:.0f}" if alone else "not measured",
        f"{100 * row['efficiency']:.0f} %" if alone else "",
    )


def epoch_cells(row: dict[str, Any]) -> tuple[str, ...]:
    return (
        f"{row['epoch']}",
        size_text(row),
        scheme_text(row),
        f"{row['loss']:.3f}",
        f"{row['train_accuracy']:.4f}",
        f"{row['test_accuracy']:.4f}",
        f"{row['throughput']:.0f}",
        f"{sum(row['seconds'].values()):.1f}",
    )


def plural(count: int, word: str) -> str:
    """Return a count with its noun, in the plural unless it is 1.

    >>> plural(2, "node"), plural(1, "process")
    ('2 nodes', '1 process')
    """
    ending = "" if count == 1 else "es" if word.endswith("s") else "s"
    return f"{count} {word}{ending}"


def bytes_text(count: float) -> str:
    """Return a number of bytes with a unit.

    >>> bytes_text(1234), bytes_text(2e6), bytes_text(0)
    ('1.23 kB', '2.00 MB', '0 bytes')
    """
    return filesize.decimal(round(count), precision=2)


def time_text(seconds: float) -> str:
    """Return seconds with a unit that suits them.

    >>> time_text(0.0041), time_text(0.412), time_text(12.34), time_text(150), time_text(4000)
    ('4.1 ms', '0.412 s', '12.3 s', '2 min 30 s', '1 h 6 min')
    """
    # From 59.95 on, three digits round to a minute
    if seconds < 59.95:
        return f"{1e3 * seconds:.3g} ms" if seconds < 0.0995 else f"{seconds:.3g} s"
    minutes, rest = divmod(round(seconds), 60)
    hours = minutes // 60
    return f"{hours} h {minutes % 60} min" if hours else f"{minutes} min {rest} s"


def write_json(contents: dict[str, Any], path: Path) -> None:
    """Write a JSON file atomically, with null for NaN; create its folder."""
    write_text(path, json_text(contents, indent=1) + "\n")


def write_summary(summary: dict[str, Any], folder: Path) -> None:
    """Write summary.json into a run's folder, created if needed. **Ranks:** rank 0 only."""
    write_json(summary, Path(folder) / FILE)


def read(folder: Path) -> dict[str, Any]:
    """Read the summary.json that `training.train` made in a run's folder.

    **Raises:** ReportError if there is none, or if it lacks a key.
    """
    path = Path(folder) / FILE
    with reading("The summary of a run", path, REMEDY, ReportError):
        summary: dict[str, Any] = json.loads(path.read_text())
        if missing := sorted(set(REQUIRED) - summary.keys()):
            raise ValueError(f"one without {', '.join(missing)}")
        return with_nan(summary) | {"rows": list(map(with_nan, summary["rows"]))}


def with_nan(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row of a file with NaN where a diverged run's loss or score was written as null.

    >>> with_nan({"loss": None, "test_accuracy": 0.5, "density": None})
    {'loss': nan, 'test_accuracy': 0.5, 'density': None}
    """
    result = {name: with_nan(x) if isinstance(x, dict) else x for name, x in row.items()}
    for name, value in row.items():
        is_score = name.startswith("test_") or name in ("loss", "train_accuracy")
        if value is None and (is_score or name == "loader_wait_seconds"):
            result[name] = math.nan
    return result

"""Record a training, a comparison, or the simulator's predictions, as docs/records/NAME.json.

A row of `tfcommx machines` is a cell, with the seconds of exchange that each scheme exposes.

    tfcommx train configs/fashion_mnist.yaml --processes 4
    python scripts/bench record runs/fashion_mnist demo --command \\
        "tfcommx train configs/fashion_mnist.yaml --processes 4"
    python scripts/bench record rows.json predicted --command "tfcommx simulate ..."

Of a training it reads the summary in the run's folder, of the others the file of `--json`. Call
it on the machine that trained, at the commit that did. A training's row `run` has the last epoch's
scores, the seconds of the whole run, the bytes that a rank sent to other nodes, and those that
plain Horovod would have sent; `bytes_share` is the one over the other.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench import records
from tfcommx.report.summary import read

KEPT = ("test_accuracy", "bleu", "ranks", "nodes", "epochs", "parameters", "seconds", "throughput")
BYTES = ("bytes_between_nodes", "bytes_between_nodes_dense")


def row_of(folder: Path) -> dict[str, Any]:
    """Return the row of a run from its folder. **Raises:** SystemExit for one that was stopped."""
    summary = read(folder)
    if "stopped" in summary:
        raise SystemExit(f"A finished run is required. That in {folder} was stopped: --resume it.")
    sent, dense = (summary[name] for name in BYTES)
    kept = {name: summary[name] for name in summary if name in KEPT or name.startswith("test_")}
    return {
        "name": "run",
        **kept,
        "bytes_between": sent,
        "bytes_between_dense": dense,
        # Without another node nothing is sent to one
        "bytes_share": sent / dense if dense else None,
        "tracing_seconds": sum(one["seconds"]["first_step"] for one in summary["rows"]),
        "evaluation_seconds": sum(one["seconds"]["evaluation"] for one in summary["rows"]),
        "verified": summary["replicas_identical"],
    }


def cells_of(lines: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return a row for each cell of `tfcommx machines`; seconds have four digits."""
    cells: dict[str, dict[str, Any]] = {}
    for line in lines:
        names = {name: line[name] for name in ("machine", "model", "nodes", "between_gbit")}
        exposed_s = line["exposed_seconds"]
        cell = cells.setdefault(
            ", ".join(map(str, names.values())),
            {**names, "compute_seconds": float(f"{line['step_seconds'] - exposed_s:.4g}")},
        )
        exposed = cell.setdefault("exposed_seconds", {})
        exposed[line["scheme"]] = float(f"{exposed_s:.4g}")
    return [{"name": name, **cell} for name, cell in cells.items()]


def rows_of(file: Path) -> tuple[list[dict[str, Any]], str]:
    """Return the rows of a simulation or a comparison from its file, and the record's note."""
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    if not lines:
        raise SystemExit(f"Rows of --json are required in {file}. Received an empty file.")
    if "published_s" in lines[0]:
        return lines, "predictions of published steps; nothing of this was measured here"
    if "machine" in lines[0]:
        return cells_of(lines), "a prediction: nothing of this was measured"
    if "scheme" in lines[0]:
        rows = [{"name": one["scheme"], **one} for one in lines]
        return rows, "a prediction: nothing of this was measured"
    rates = sorted({one["bandwidth_mbit"] for one in lines if one.get("measured")})
    measured = f", except at {rates[0]:g} Mbit/s, where they were measured" if rates else ""
    return lines, f"trained on this machine; times of steps are predicted{measured}"


def main(words: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(
        prog="bench record",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("run", type=Path, help="the run's folder, or the file of --json")
    parser.add_argument("name", type=records.checked, help="of the record")
    parser.add_argument("--command", required=True, help="that trained")
    chosen = parser.parse_args(words)
    if chosen.run.is_file():
        rows, note = rows_of(chosen.run)
    else:
        rows = [row_of(chosen.run)]
        note = f"{rows[0]['ranks']} ranks as {rows[0]['nodes']} nodes on this machine"
        if not rows[0]["verified"]:
            raise SystemExit(f"Ranks of {chosen.run} had different weights: not recorded.")
    print(f"recorded: {records.write(chosen.name, rows, chosen.command, note)}")

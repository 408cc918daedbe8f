"""Train a method with one seed, in a separate process, and keep one file for each training.

    folder/trainings/dense-seed-0-1f2e3d4c.json    the training: written once, at its end
    folder/trainings/dense-seed-0-1f2e3d4c/        output of `tfcommx train`: log, report, figures

The last part of the name is a digest of the recipe, the changes, the nodes and their slots. An
interrupted comparison therefore continues where it was, and an edited recipe or method is trained
anew. The digest does not include the version of tfcommx: where that matters, use a new folder.
"""

import hashlib
import json
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from tfcommx.core import TfcommxError, reading
from tfcommx.launch.horovodrun import on_end_signals
from tfcommx.recipes.reader import parse
from tfcommx.report.summary import read, with_nan, write_json

# Fields kept of an epoch's row in a summary, besides its test scores
KEPT = ("epoch", "phase", "steps", "bytes_between_nodes", "clock_seconds")
LOG = "log.txt"


class TrainingError(TfcommxError, RuntimeError):
    """A training or a measurement failed; the message names its log."""


@dataclass(frozen=True)
class Setup:
    """Settings that all trainings of a comparison share."""

    # A YAML file
    recipe: Path
    # Changes of the recipe, applied before those of a method
    changes: tuple[str, ...]
    # Nodes, and ranks on each; all ranks run on this machine
    nodes: int
    slots: int
    # Output folder of the comparison
    folder: Path

    def settings(self, of_method: Sequence[str], seed: int | None = None) -> list[str]:
        seeds = [] if seed is None else [f"seed={seed}"]
        return [*self.changes, *of_method, f"node_size={self.slots}", *seeds]

    def name(self, method: str, settings: Sequence[str]) -> str:
        """Return a unique name of a training or a measurement."""
        # Parsed, because a change of its comments must not change the name
        recipe = parse(self.recipe.read_text(encoding="utf-8"))
        decides = [recipe, list(settings), self.nodes, self.slots]
        digest = hashlib.sha256(json.dumps(decides).encode()).hexdigest()[:8]
        # The last one counts, because a later change of a field replaces an earlier one
        seed = [setting for setting in settings if setting.startswith("seed=")]
        return "-".join([method, *(setting.replace("=", "-") for setting in seed[-1:]), digest])


def trained(setup: Setup, method: str, settings: Sequence[str]) -> dict[str, Any] | None:
    file = setup.folder / "trainings" / f"{setup.name(method, settings)}.json"
    if not file.exists():
        return None
    with reading("A training", file, "Delete the file: it is trained anew.", TrainingError):
        training = json.loads(file.read_text())
        return {**training, "epochs": list(map(with_nan, training["epochs"]))}


def train(setup: Setup, method: str, settings: Sequence[str]) -> dict[str, Any]:
    """Train a method with one seed, and write its results to a file.

    Returns:
        The training: `epochs` has scores, steps, and cumulative bytes and seconds of each epoch.

    **Raises:** TrainingError if a rank failed, or if the ranks' weights differed; SystemExit after
    a signal: the next call continues after the last checkpoint.
    """
    name = setup.name(method, settings)
    run = setup.folder / "trainings" / name
    words = ["train", str(setup.recipe), "--output", str(run), "--resume"]
    words += ["--processes", str(setup.nodes * setup.slots), "--no-report"]
    words += [word for setting in settings for word in ("--set", setting)]
    # "stopped": a signal ended the run, and its summary covers only the epochs before
    if not (run / "summary.json").exists() or "stopped" in read(run):
        run_command(words, run / LOG)
    summary = read(run)
    if not summary["replicas_identical"] or "stopped" in summary:
        raise TrainingError(f"Ranks had different weights, or were stopped: {run / LOG}.")
    names = ("parameters", "ranks", "nodes", "seconds", "bytes_between_nodes_dense")
    training = {name: summary[name] for name in names} | {
        "epochs": [
            {key: row[key] for key in row if key in KEPT or key.startswith("test_")}
            for row in summary["rows"]
        ],
        "method": method,
        "settings": list(settings),
    }
    # After all checks, because an existing file counts as a finished training
    write_json(training, run.parent / f"{name}.json")
    # Only now, because an interrupted comparison resumes from it
    shutil.rmtree(run / "checkpoint", ignore_errors=True)
    return training


def run_command(words: Sequence[str], log: Path) -> None:
    """Run `tfcommx WORDS...` in a separate process, with its output appended to a file.

    **Raises:** TrainingError; SystemExit after a signal.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "tfcommx", *words]
    seen: list[int] = []
    with log.open("a") as file:
        # In a new session, because Ctrl-C would otherwise reach the process twice
        process = subprocess.Popen(
            command, stdout=file, stderr=file, stdin=subprocess.DEVNULL, start_new_session=True
        )

        # A training saves before it ends
        def hand_on(number: int, frame: FrameType | None) -> None:
            seen.append(number)
            process.send_signal(signal.SIGTERM)

        on_end_signals(hand_on)
        try:
            status = process.wait()
        finally:
            # A signal ends this process at once from here on, because no training is left that
            # could save
            on_end_signals(lambda number, frame: sys.exit(128 + number))
    if seen:
        sys.exit(128 + seen[0])
    if status:
        tail = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-3:]
        raise TrainingError(f"`tfcommx {words[0]}` failed, see {log}: {' '.join(tail)}")

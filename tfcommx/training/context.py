"""RunContext: the state that the callbacks of a run share."""

import time
from dataclasses import dataclass, field
from typing import Any

import keras

from tfcommx import callbacks, checkpoint
from tfcommx.report import ProgressDisplay, TensorBoardEvents
from tfcommx.training.run import Run
from tfcommx.training.steps import StepCounter, Timing
from tfcommx.training.stop_requests import StopRequests


class Totals:
    """Bytes and seconds of the whole run, including those before a resume."""

    KEYS = ("bytes_between_nodes", "bytes_between_nodes_dense", "seconds")

    def __init__(
        self, notes: dict[str, Any], optimizer: keras.optimizers.Optimizer, start: float
    ) -> None:
        self.before = {key: notes.get(key, 0) for key in self.KEYS}
        self.exchanger, self.start = optimizer.exchanger, start
        # A process may train twice; earlier traffic does not count
        self.at_start = self.exchanger.traffic()

    def seconds(self) -> float:
        return float(self.before["seconds"] + time.monotonic() - self.start)

    def so_far(self) -> dict[str, Any]:
        totals = {
            key: self.before[key] + value - self.at_start[key]
            for key, value in self.exchanger.traffic().items()
        } | {"seconds": self.seconds()}
        return {key: round(value, 1 if key == "seconds" else None) for key, value in totals.items()}


@dataclass
class RunContext:
    """State that the callbacks of a run share; each takes it as its argument."""

    run: Run
    # Requests to stop this rank
    requests: StopRequests
    # Time at which the run must end, by `time.monotonic`; None: at its last epoch
    end: float | None
    totals: Totals
    # Checkpoints in memory; they handle SIGTERM in a supervised run
    snapshots: checkpoint.Snapshots
    progress: ProgressDisplay
    events: TensorBoardEvents | None = None
    # One row per epoch, including those of an earlier process
    rows: list[dict[str, Any]] = field(default_factory=list)
    counter: StepCounter = field(default_factory=StepCounter)
    timing: Timing = field(default_factory=Timing)
    compare: callbacks.CompareReplicas = field(default_factory=callbacks.CompareReplicas)

    def clock(self) -> float:
        """Return the seconds of the run so far, without evaluation and saving.

        **Source:** DAWNBench's rules for ImageNet, as its organisers explained in issues 9, 12 and
        21 of github.com/stanford-futuredata/dawn-bench-entries.
        """
        parts: list[dict[str, float]] = [self.timing.seconds]
        parts += [row["seconds"] for row in self.rows]
        return self.totals.seconds() - sum(part["evaluation"] + part["saving"] for part in parts)

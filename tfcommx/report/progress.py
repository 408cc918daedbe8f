"""Progress of a run: a bar on a terminal, otherwise a line for each epoch."""

from __future__ import annotations

import contextlib
import itertools
import os
import sys
import time
from typing import IO, Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.progress import Progress as Bar

from tfcommx.core import log
from tfcommx.report.summary import more_scores, scheme_text, size_text

# Without a terminal: seconds between two lines in long epochs
LINE_SECONDS = 60.0
# Columns of the terminal that the bar, the count and the times need
FIXED_COLUMNS = 50


class ProgressDisplay:
    """One bar over all steps of a run on a terminal; elsewhere one plain line per epoch.

    Args:
        steps: of the whole run, >= 1.
        epochs: of the whole run, >= 1.
        shown: True on rank 0 only.
        stream: the output stream; None: stdout.
        terminal: device file of a terminal, to which the bar is written if stdout is no terminal.
    """

    def __init__(
        self,
        steps: int,
        epochs: int,
        shown: bool = True,
        stream: IO[str] | None = None,
        terminal: str | None = None,
    ) -> None:
        width = None
        # Under horovodrun stdout is a pipe
        if shown and stream is None and terminal and not sys.stdout.isatty():
            # Without such a device, or without the right to open it: plain lines
            with contextlib.suppress(OSError):
                # Not as the controlling terminal, whose Ctrl-C would also reach this rank
                device = os.open(terminal, os.O_WRONLY | os.O_NOCTTY)
                stream = os.fdopen(device, "w") if os.isatty(device) else None
                width = os.get_terminal_size(device).columns or None
        self.steps, self.epochs, self.shown, self.done = steps, epochs, shown, 0
        # Brackets and colons in names of the user are no markup
        self.console = Console(
            file=stream or sys.stdout,
            highlight=False,
            markup=False,
            emoji=False,
            # Rich would wrap at 80 columns where the output is a file
            soft_wrap=True,
            width=width,
        )
        self.started = self.last_line = time.monotonic()
        self.bar: Bar | None = None
        # Number of lines that could not be written
        self.lines_lost = 0

    def __enter__(self) -> ProgressDisplay:
        self.started = time.monotonic()
        if self.shown and self.console.is_terminal:
            self.bar = Bar(
                TextColumn("{task.description}", markup=False),
                BarColumn(None),
                MofNCompleteColumn(),
                TimeElapsedColumn(),
                TimeRemainingColumn(),
                TextColumn("{task.fields[status]}", markup=False),
                console=self.console,
                expand=True,
                # Only a stream that is a terminal is shown above the bar. A file of the user gets
                # its lines itself, and so does the pipe to the launcher, which stays open if the
                # connection to `terminal` is dropped
                redirect_stdout=sys.stdout.isatty(),
                redirect_stderr=sys.stderr.isatty(),
            )
            self.task = self.bar.add_task(f"epoch 1/{self.epochs}", total=self.steps, status="")
            self.bar.start()
        return self

    def __exit__(self, *exception: object) -> None:
        if self.bar:
            # A terminal that has gone, as by a dropped connection, must not end the training
            with contextlib.suppress(OSError):
                self.bar.stop()

    def step(self, status: dict[str, Any] | None = None) -> None:
        """Count one step, and show the status of the epoch.

        Args:
            status: epoch and step, from 1; steps of the epoch; loss and accuracy so far;
                throughput, in `counted` per second; data and gradients: shares of the time in steps
                that were spent waiting for them. None: unknown.
        """
        self.done += 1
        if self.done == 1:
            # Restart the clock of plain lines, because the time before includes tracing
            self.last_line = time.monotonic()
        if self.bar:
            self.bar.update(self.task, advance=1)
            if status is not None:
                self.bar.update(
                    self.task,
                    description=f"epoch {status['epoch']}/{self.epochs}",
                    status=self._fitting(status_parts(status)),
                )
        elif self.shown and status and time.monotonic() - self.last_line > LINE_SECONDS:
            self._print(
                f"step {status['step']}/{status['steps']} of epoch {status['epoch']}/{self.epochs}"
                f"  {'  '.join(status_parts(status))}"
            )

    def _fitting(self, parts: list[str]) -> str:
        texts = list(itertools.accumulate(parts, "{}  {}".format))
        room = self.console.width - FIXED_COLUMNS
        return next((text for text in reversed(texts) if len(text) <= room), texts[0])

    def _print(self, line: str) -> None:
        # The remaining time is extrapolated from the steps so far
        self.last_line = time.monotonic()
        elapsed = self.last_line - self.started
        remaining = elapsed / self.done * (self.steps - self.done) if self.done else 0.0
        percent = 100 * self.done // self.steps
        self._show(f"{line}  {percent:3} %, {elapsed:.0f} s, {remaining:.0f} s remaining")

    def _show(self, line: str) -> None:
        try:
            (self.bar.console if self.bar else self.console).print(line)
        except OSError as error:  # A full disk under the log must not end the training
            if not self.lines_lost:
                log.warning("Lines of progress are lost: %s.", error)
            self.lines_lost += 1

    def epoch(self, row: dict[str, Any]) -> None:
        """Show the row of a finished epoch."""
        if not self.shown:
            return
        line = (
            f"epoch {row['epoch']:2}/{self.epochs}  {size_text(row):>6}  "
            f"{scheme_text(row):24}  loss {row['loss']:.3f}  "
            f"train {row['train_accuracy']:.4f}  test {row['test_accuracy']:.4f}  "
            + "".join(f"{name} {value:.4f}  " for name, value in more_scores(row).items())
            + f"{row['throughput']:7.0f} {row['counted']}/s"
        )
        if self.bar:
            self._show(line)
        else:
            self._print(line)

    def say(self, line: str) -> None:
        if self.shown:
            self._show(line)


def status_parts(status: dict[str, Any]) -> list[str]:
    """Return the status of an epoch in parts, the most important first.

    >>> status_parts({"loss": 0.5, "accuracy": 0.81, "throughput": 1234.5,
    ...               "counted": "images", "data": 0.02, "gradients": 0.3})
    ['loss 0.500', 'accuracy 0.8100', '1234 images/s', 'waiting: data 2 %, gradients 30 %']
    """
    return [
        f"loss {status['loss']:.3f}",
        f"accuracy {status['accuracy']:.4f}",
        f"{status['throughput']:.0f} {status['counted']}/s",
        f"waiting: data {100 * status['data']:.0f} %, gradients {100 * status['gradients']:.0f} %",
    ]

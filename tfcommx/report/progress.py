"""Progress of a run: a bar on a terminal, otherwise a line for each epoch."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Sequence
from types import TracebackType
from typing import IO, Any

from rich.console import Console, RenderableType
from rich.progress import Progress as Bar
from rich.progress import ProgressColumn, Task
from rich.progress_bar import ProgressBar
from rich.table import Table

from tfcommx.report.summary import more_scores, scheme_text, size_text

# Without a terminal: seconds between two lines in long epochs
LINE_SECONDS = 60.0
# Smallest and largest number of columns of the bar; with less space there is no bar
BAR_COLUMNS = 8, 40


class ProgressDisplay:
    """One bar over all steps of a run on a terminal; elsewhere one plain line per epoch.

    Args:
        steps: the number of steps of the whole run, >= 1.
        epochs: the number of epochs of the whole run, >= 1.
        shown: whether anything is shown; True on rank 0 only.
        stream: the output stream; None: stdout.
        terminal: device file of a terminal, to which the bar is written if stdout is no terminal,
            because under horovodrun stdout is a pipe. Used only if it is a writable terminal.
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
        if shown and stream is None and terminal and not sys.stdout.isatty():
            # Without such a device, or without the right to open it: plain lines
            with contextlib.suppress(OSError):
                device = os.open(terminal, os.O_WRONLY | os.O_NOCTTY)
                stream = os.fdopen(device, "w") if os.isatty(device) else None
                width = os.get_terminal_size(device).columns or None
        self.steps, self.epochs, self.shown, self.done = steps, epochs, shown, 0
        self.console = Console(
            file=stream or sys.stdout, highlight=False, soft_wrap=True, width=width
        )
        self.started = self.last_line = time.monotonic()
        self.bar: Bar | None = None

    def __enter__(self) -> ProgressDisplay:
        self.started = time.monotonic()
        if self.shown and self.console.is_terminal:
            self.bar = Bar(Line(self.console), console=self.console)
            self.task = self.bar.add_task(f"epoch 1/{self.epochs}", total=self.steps, status=[])
            self.bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self.bar:
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
            parts = [] if status is None else status_parts(status)
            self.bar.update(self.task, advance=1, status=parts)
            if status is not None:
                self.bar.update(self.task, description=f"epoch {status['epoch']}/{self.epochs}")
        elif self.shown and status and time.monotonic() - self.last_line > LINE_SECONDS:
            self._print(
                f"step {status['step']}/{status['steps']} of epoch {status['epoch']}/{self.epochs}"
                f"  {'  '.join(status_parts(status))}"
            )

    def _print(self, line: str) -> None:
        """Print a line with the remaining time, extrapolated from the steps so far."""
        self.last_line = time.monotonic()
        elapsed = self.last_line - self.started
        remaining = elapsed / self.done * (self.steps - self.done) if self.done else 0.0
        percent = 100 * self.done // self.steps
        self.console.print(f"{line}  {percent:3} %, {elapsed:.0f} s, {remaining:.0f} s remaining")

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
            self.bar.console.print(line)
        else:
            self._print(line)

    def say(self, line: str) -> None:
        """Show a separate line."""
        if self.shown:
            (self.bar.console if self.bar else self.console).print(line)


class Line(ProgressColumn):
    """The line of a running task, cut to the columns of the terminal.

    epoch 6/11 ━━━━━━╺━━━━━ 530/990 1:04, 0:55 left  loss 0.500  accuracy 0.8100  1234 images/s ...

    Count, times and loss are always shown. The bar and then the other parts of the status are
    added as long as they fit; the bar is widened to the remaining columns, up to its largest size.
    """

    def __init__(self, console: Console) -> None:
        super().__init__()
        self.console = console

    def render(self, task: Task) -> Table:
        """Return the line as a table of one row."""
        count = f"{int(task.completed):{len(f'{task.total:.0f}')}}/{task.total:.0f}"
        times = f"{clock(task.elapsed)}, {clock(task.time_remaining)} left"
        status: Sequence[str] = task.fields["status"]
        loss, *optional = [*status, ""]
        shown = f"{count} {times}  {loss}".rstrip()
        least, most = BAR_COLUMNS
        room = self.console.width - len(task.description) - len(shown) - 1
        bar = room > least
        room -= (least + 1) * bar
        for part in filter(None, optional):
            if len(part) + 2 > room:
                break
            shown, room = f"{shown}  {part}", room - len(part) - 2
        line = Table.grid(padding=(0, 1))
        cells: list[RenderableType] = [f"[progress.description]{task.description}"]
        if bar:
            width = min(most, least + room)
            cells += [ProgressBar(task.total, task.completed, width=width)]
        for _ in (*cells, shown):
            line.add_column(no_wrap=True)
        line.add_row(*cells, shown)
        return line


def clock(seconds: float | None) -> str:
    """Return seconds in the form of a clock.

    >>> clock(64.2), clock(3665), clock(None)
    ('1:04', '1:01:05', '-:--')
    """
    if seconds is None:
        return "-:--"
    minutes, seconds = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"


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

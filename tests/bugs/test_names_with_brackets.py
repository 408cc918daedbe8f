"""Names of the user that a library took for its own language, and so lost or refused.

`p4d [spot]` was printed as `p4d`, because rich takes words in brackets for styles; `[/data]` was a
MarkupError (docarray's issue 733), after hours of training if it was in the report of a run.
"""

from __future__ import annotations

import io
from typing import Any

import pytest

from tfcommx.report import terminal
from tfcommx.report.progress import ProgressDisplay
from tfcommx.report.terminal import show_rows

NAMES = ["p4d [spot]", "[/data/run]", "a [bold]b[/] c", "x:warning:y", "[link=a]"]


@pytest.mark.parametrize("name", NAMES)
def test_tables_show_them(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    show_rows([{"machine": name, f"in {name}": "1"}], title=f"of {name}")
    shown = capsys.readouterr().out
    assert shown.count(name) == 3


@pytest.mark.parametrize("name", NAMES)
def test_the_lines_of_a_run_show_them(name: str) -> None:
    stream = io.StringIO()
    with ProgressDisplay(1, 1, stream=stream) as progress:
        progress.say(f"{name} is reached")
    assert stream.getvalue() == f"{name} is reached\n"


def test_the_bar_shows_them() -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    stream = Terminal()
    status: dict[str, Any] = {"epoch": 1, "step": 1, "steps": 1, "loss": 0.5, "accuracy": 0.5}
    status |= {"throughput": 1.0, "counted": "[/x]", "data": 0.0, "gradients": 0.0}
    with ProgressDisplay(1, 1, stream=stream) as progress:
        progress.console.width = 200
        progress.step(status)
    assert "[/x]" in stream.getvalue()


def test_replicas_that_differ_stand_out() -> None:
    """The only styled cell is no text of the user."""
    summary = {
        **{name: 1.0 for name in ("test_accuracy", "seconds", "throughput")},
        **{name: 1 for name in ("ranks", "nodes", "epochs")},
        **{name: 1 for name in ("bytes_between_nodes", "bytes_between_nodes_dense")},
        "replicas_identical": False,
        "counted": "images",
        "rows": [],
    }
    console = terminal.terminal_console()
    with console.capture() as captured:
        terminal.show(summary, console)
    assert "NOT IDENTICAL" in captured.get() and "[bold" not in captured.get()

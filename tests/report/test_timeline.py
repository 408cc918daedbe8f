"""A timeline drawn as text, as a picture and as trace events."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from matplotlib.figure import Figure

from tfcommx.core import Span, Timeline
from tfcommx.report.timeline import draw_sweep, draw_text, draw_timelines, trace_events

SPANS = (
    Span("host", "load", "batch", 0, 4),
    Span("compute", "forward", "f", 0, 2),
    Span("compute", "backward", "a", 2, 4),
    Span("between", "message", "bucket12", 4, 9, 12),
    Span("compute", "select", "bucket3", 4, 5, 3),
    Span("compute", "backward", "b", 5, 8),
    Span("between", "message", "bucket3", 9.6, 10, 3),
)
TIMELINE = Timeline(SPANS, 10.0, 7.0, batch=8, ranks=2)


def test_a_lane_for_each_resource_as_drawn() -> None:
    assert draw_text(TIMELINE, 10) == (
        "host         |llll      |\n"
        "compute      |ffbb3bbb  |\n"
        "port between |    22222 |\n"
        "0 to 10000.00 ms; l load, f forward, b backward; digits: messages and selections of "
        "buckets"
    )


def test_a_cell_shows_what_takes_most_of_it() -> None:
    """In 5 cells of 2 s: 1 s each of selection and backward pass shows the first; 5 s in 2.5."""
    lines = draw_text(TIMELINE, 5).splitlines()
    assert lines[1:3] == ["compute      |fb3b |", "port between |  222|"]


def test_trace_events_have_every_span_in_microseconds() -> None:
    events = json.loads(trace_events({"a step": TIMELINE, "another": TIMELINE}))["traceEvents"]
    named = [event for event in events if event["name"] == "process_name"]
    assert [(one["pid"], one["args"]["name"]) for one in named] == [(0, "a step"), (1, "another")]
    events = [event for event in events if event["pid"] == 0]
    names = {event["tid"]: event["args"]["name"] for event in events if "thread" in event["name"]}
    spans = [event for event in events if event["ph"] == "X"]
    assert list(names.values()) == ["host", "compute", "selection", "port between"]
    assert [names[one["tid"]] for one in spans if one["cat"] == "select"] == ["selection"]
    assert len(spans) == len(SPANS)
    assert [spans[3][key] for key in ("name", "cat", "ts", "dur")] == [
        "message bucket12",
        "message",
        4e6,
        5e6,
    ]
    assert names[spans[3]["tid"]] == "port between" and spans[3]["args"]["bucket"] == 12


@pytest.mark.parametrize("empty", [False, True])
def test_pictures_are_written(tmp_path: Path, empty: bool) -> None:
    timeline = Timeline((), 0.0, 0.0, 1, 1) if empty else TIMELINE
    draw_timelines({"a step": timeline}, tmp_path / "step.png")
    assert (tmp_path / "step.png").read_bytes()[:4] == b"\x89PNG"
    assert draw_text(timeline, 4).count("\n") == (0 if empty else 3)


@pytest.mark.parametrize("values", [(1, 2, 4), (0.0, 0.1), ("torus", "asa")])
def test_a_sweep_is_drawn(values: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The point of a spread of 0 was left out, because a logarithmic axis has no 0."""
    scales = []
    write = Figure.savefig

    def savefig(figure: Figure, *more: Any, **options: Any) -> None:
        scales.extend(axes.get_xscale() for axes in figure.axes)
        write(figure, *more, **options)

    monkeypatch.setattr(Figure, "savefig", savefig)
    rows = [{"swept": value, "throughput": 10.0, "scaling_efficiency": 0.9} for value in values]
    draw_sweep(rows, "swept", tmp_path / "sweep.png")
    assert (tmp_path / "sweep.png").read_bytes()[:4] == b"\x89PNG"
    assert scales == ["log" if values[0] == 1 else "linear"] * 2

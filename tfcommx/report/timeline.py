"""A step's timeline as text, as a picture, and for chrome://tracing and Perfetto."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tfcommx.core import RESOURCES, Span, Timeline, replacing

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MEANINGS = {
    "host": "host",
    "compute": "compute",
    "beside": "beside it",
    "inside": "port inside",
    "between": "port between",
}
# Tracks of a trace, from top to bottom
TRACKS = ("host", "compute", "selection", "beside it", "port inside", "port between")
# Kind of span -> its character in the text. A message or a selection is drawn as the last digit of
# its bucket's number.
SIGNS = {"load": "l", "forward": "f", "backward": "b", "update": "u"}
COLOURS = {
    "load": "tab:gray",
    "forward": "tab:blue",
    "backward": "tab:cyan",
    "select": "tab:red",
    "message": "tab:orange",
    "update": "tab:green",
}


def draw_text(timeline: Timeline, width: int = 80) -> str:
    """Draw a lane for each resource in use, from the start of the step to its end.

    >>> spans = (Span("compute", "forward", "f", 0, 1), Span("compute", "backward", "w", 1, 3),
    ...          Span("between", "message", "w", 3, 4, 0))
    >>> print(draw_text(Timeline(spans, 4.0, 3.0, batch=8, ranks=2), width=8))
    compute      |ffbbbb  |
    port between |      00|
    0 to 4000.00 ms; f forward, b backward; digits: messages and selections of buckets

    A cell shows the span that takes most of its time, or a blank if it is idle for more than half.
    """
    lines = []
    for resource in _lanes(timeline):
        spans = [span for span in timeline.spans if span.resource == resource]
        lines.append(f"{MEANINGS[resource]:<12} |{_cells(spans, timeline.step_s, width)}|")
    used = {span.kind for span in timeline.spans}
    signs = ", ".join(f"{sign} {kind}" for kind, sign in SIGNS.items() if kind in used)
    digits = "; digits: messages and selections of buckets" if used - set(SIGNS) else ""
    step_ms = timeline.step_s * 1e3
    # With an exponent where two decimals would make 10 digits
    end = f"{step_ms:.2f}" if step_ms < 1e7 else f"{step_ms:.3g}"
    lines.append(f"0 to {end} ms; {signs}{digits}")
    return "\n".join(lines)


def _lanes(timeline: Timeline) -> list[str]:
    used = {span.resource for span in timeline.spans}
    return [resource for resource in RESOURCES if resource in used]


def _cells(spans: list[Span], step_s: float, width: int) -> str:
    if step_s <= 0:
        return " " * width
    cell = step_s / width
    parts: list[Counter[str]] = [Counter() for _ in range(width)]
    for span in spans:
        sign = SIGNS.get(span.kind) or str(span.bucket % 10)
        # Limited, because the end of the step would be in a cell behind the last
        first = min(int(span.start_s / cell), width - 1)
        last = min(int(span.end_s / cell), width - 1)
        for position in range(first, last + 1):
            start, end = max(span.start_s, position * cell), min(span.end_s, (position + 1) * cell)
            if end > start:
                parts[position][sign] += end - start  # type: ignore[assignment]
    return "".join(_sign(part, cell) for part in parts)


def _sign(part: Counter[str], cell: float) -> str:
    # Tolerance, because a cell is a sum of rounded parts
    if sum(part.values()) < cell / 2 * (1 - 1e-9):
        return " "
    return max(part, key=lambda sign: part[sign])


def draw_timelines(timelines: dict[str, Timeline], path: Path) -> None:
    """Draw timelines below each other, by their titles, on one scale of time."""
    from matplotlib.figure import Figure  # Without pyplot: no display, no global state

    height = sum(0.6 + 0.6 * len(_lanes(timeline)) for timeline in timelines.values())
    figure = Figure(figsize=(10, 0.6 + height), layout="constrained")
    panels = figure.subplots(len(timelines), 1, squeeze=False)[:, 0]
    longest = max(timeline.step_s for timeline in timelines.values())
    for axes, (title, timeline) in zip(panels, timelines.items(), strict=True):
        _draw_lanes(axes, timeline, title, longest)
    if all(map(_lanes, timelines.values())):  # A step without spans has no legend
        legend = max((axes.get_legend_handles_labels() for axes in panels), key=lambda h: len(h[1]))
        figure.legend(*legend, loc="outside lower center", ncols=len(COLOURS), fontsize=8)
    with replacing(path) as part:
        figure.savefig(part, dpi=120)


def _draw_lanes(axes: Axes, timeline: Timeline, title: str, longest_s: float) -> None:
    lanes = _lanes(timeline)
    for kind, colour in COLOURS.items():
        spans = [span for span in timeline.spans if span.kind == kind]
        if spans:
            axes.barh(
                [lanes.index(span.resource) for span in spans],
                [1e3 * (span.end_s - span.start_s) for span in spans],
                left=[1e3 * span.start_s for span in spans],
                height=0.7,
                color=colour,
                edgecolor="white",
                linewidth=0.3,
                label=kind,
            )
    axes.set(
        xlabel="ms",
        yticks=range(len(lanes)),
        yticklabels=[MEANINGS[lane] for lane in lanes],
        xlim=(0, 1e3 * longest_s or 1),
        title=title,
    )
    axes.invert_yaxis()


def trace_events(timelines: dict[str, Timeline]) -> str:
    """Write timelines in the trace-event format, which chrome://tracing and Perfetto read.

    Each timeline becomes a process under its title. Its threads are the resources, and one of
    selections, because a selection on the compute stream pauses the backward pass there.

    Source: Google, "Trace Event Format": complete events (ph X), microseconds.
    """
    events: list[dict[str, Any]] = []
    for process, (title, timeline) in enumerate(timelines.items()):
        tracks = sorted({*map(_track, timeline.spans)}, key=TRACKS.index)
        events.append(_named("process", title, process, 0))
        events += [_named("thread", name, process, n) for n, name in enumerate(tracks)]
        events += [
            {
                "name": span.kind if span.name == span.kind else f"{span.kind} {span.name}",
                "cat": span.kind,
                "ph": "X",
                "ts": span.start_s * 1e6,
                "dur": (span.end_s - span.start_s) * 1e6,
                "pid": process,
                "tid": tracks.index(_track(span)),
                "args": {"bucket": span.bucket},
            }
            for span in timeline.spans
        ]
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}) + "\n"


def _track(span: Span) -> str:
    return "selection" if span.kind == "select" else MEANINGS[span.resource]


def _named(kind: str, name: str, process: int, thread: int) -> dict[str, Any]:
    args = {"name": name}
    return {"name": f"{kind}_name", "ph": "M", "pid": process, "tid": thread, "args": args}


def draw_sweep(rows: list[dict[str, Any]], swept: str, path: Path) -> None:
    """Draw the throughput of simulated steps over the swept setting, next to perfect scaling."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.5), layout="constrained")
    rate_axes, efficiency_axes = figure.subplots(1, 2)
    values = [row[swept] for row in rows]
    perfect = [row["throughput"] / row["scaling_efficiency"] for row in rows]
    rate_axes.plot(values, perfect, "--", color="0.7", label="without exchange")
    rate_axes.plot(values, [row["throughput"] for row in rows], "o-", label="simulated")
    # A logarithmic axis would drop 0, as of `spread`
    scale = "linear" if any(isinstance(x, str) or x <= 0 for x in values) else "log"
    rate_axes.set(xlabel=swept, ylabel="samples per second", xscale=scale, yscale="log")
    rate_axes.legend()
    efficiency_axes.plot(values, [row["scaling_efficiency"] for row in rows], "o-")
    efficiency_axes.set(xlabel=swept, ylabel="scaling efficiency", xscale=scale, ylim=(0, 1.05))
    with replacing(path) as part:
        figure.savefig(part, dpi=120)

"""The files that a run writes at its end, and the report as one HTML page with its figures."""

from __future__ import annotations

import base64
import html
import io
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tfcommx.core import replacing, write_text
from tfcommx.report.figures import Runs, between_nodes, bytes_sent, curves, draw, panels, time_spent
from tfcommx.report.summary import (
    PARTS,
    bytes_text,
    epoch_cells,
    epoch_headings,
    more_scores,
    phase_cells,
    phase_rows,
    plural,
    seconds_by_part,
    snapshots_text,
    target_text,
    time_text,
    write_json,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PAGE, PICTURE = "report.html", "comparison.png"
STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; max-width: 70rem; margin: 2rem auto; padding: 0 1rem;
       color: #222; background: #fff; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.15rem; margin-top: 2rem; }
.wide { overflow-x: auto; } img { width: 100%; height: auto; }
.pictures { display: grid; gap: 1rem; align-items: start;
            grid-template-columns: repeat(auto-fill, minmax(min(100%, 26rem), 1fr)); }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: .25rem .5rem; text-align: right; white-space: nowrap;
         border-bottom: 1px solid #ddd; }
th:first-child, td:first-child, .text { text-align: left; }
th { font-weight: 600; border-bottom: 2px solid #999; white-space: normal; vertical-align: bottom; }
.bad { color: #b00; font-weight: 600; }
@media (max-width: 60rem) {
  table, tbody, tr { display: block; } th { display: none; }
  tr:not(:first-child) { border-bottom: 2px solid #999; padding: .3rem 0; }
  td, td:first-child { display: flex; justify-content: space-between; gap: 1rem;
                       white-space: normal; text-align: right; border: 0; }
  td::before { content: attr(data-heading); color: #666; text-align: left; }
  td:first-child { font-weight: 600; } td:empty { display: none; }
}
""".strip()


def write_report(summary: dict[str, Any], folder: Path) -> None:
    """Write summary.json, the pictures and the page into a run's folder, created if needed.

    Args:
        summary: the summary that `training.train` made.
        folder: the folder of the run.

    **Ranks:** rank 0 only.
    """
    folder = Path(folder)
    write_json(summary, folder / "summary.json")
    draw(summary, folder)
    write_page({summary.get("name", "run"): summary}, folder)


def write_page(runs: Runs, folder: Path) -> list[Path]:
    """Write the page, and its curves as a picture, into a folder, created if needed.

    Args:
        runs: name -> summary, as `summary.read` returns it; at least one.
        folder: the folder of the page.

    Returns:
        The files.

    **Cost:** about a second for the figures. **Ranks:** rank 0 only.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    with replacing(folder / PICTURE) as part:
        curves(runs).savefig(part, dpi=120)
    write_text(folder / PAGE, page(runs))
    return [folder / PAGE, folder / PICTURE]


def page(runs: Runs) -> str:
    """Return the page as text: summaries, curves, phases, the breakdown of time, and epochs."""
    title = " and ".join(runs) if len(runs) < 4 else f"{len(runs)} runs"
    costs = {"time": time_spent(runs)}
    if between_nodes(runs):
        costs["bytes"] = bytes_sent(runs)
    parts = [
        "<!DOCTYPE html>",
        '<html lang="en"><head><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width">',
        f"<title>{html.escape(title)}</title><style>{STYLE}</style></head><body>",
        f"<h1>{html.escape(title)}</h1>",
        _runs_table(runs),
        "<h2>How they learned</h2>" if len(runs) > 1 else "<h2>How it learned</h2>",
        _pictures(panels(runs)),
        f"<h2>Where {' and '.join(costs)} went</h2>",
        _pictures(costs),
        _breakdown_table(runs),
        "<h2>Phases</h2>",
        "<p>Throughput without the first step of each phase, which traces.</p>",
        _phases_table(runs),
        "<h2>Epochs</h2>",
        *(_epochs_table(name, summary) for name, summary in runs.items()),
        "</body></html>",
    ]
    return "\n".join(parts) + "\n"


def _pictures(figures: Mapping[str, Figure]) -> str:
    """Return figures next to each other where the page is wide enough."""
    drawn = "\n".join(_picture(figure, title) for title, figure in figures.items())
    return f'<div class="pictures">{drawn}</div>'


def _picture(figure: Figure, title: str) -> str:
    import matplotlib

    drawn = io.BytesIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "font.family": "sans-serif"}):
        figure.savefig(drawn, format="svg")
    data = base64.b64encode(drawn.getvalue()).decode()
    return f'<img alt="{title}" src="data:image/svg+xml;base64,{data}">'


def _table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table; cells are escaped."""
    head = "".join(f"<th>{html.escape(heading)}</th>" for heading in headings)
    names = [html.escape(heading) for heading in headings]
    body = "\n".join(
        "<tr>"
        + "".join(
            f'<td data-heading="{name}">{html.escape(cell)}</td>'
            for name, cell in zip(names, row, strict=True)
        )
        + "</tr>"
        for row in rows
    )
    return f'<div class="wide"><table><tr>{head}</tr>\n{body}</table></div>'


def _scores(row: dict[str, Any]) -> str:
    """Return the accuracy on the test set, and the other test scores."""
    further = "".join(f", {name} {value:.4f}" for name, value in more_scores(row).items())
    return f"{row['test_accuracy']:.4f}{further}"


def _runs_table(runs: Runs) -> str:
    rows = []
    for name, summary in runs.items():
        sent, dense = summary["bytes_between_nodes"], summary["bytes_between_nodes_dense"]
        rows.append(
            (
                name,
                _scores(summary),
                f"{summary['ranks']} on {plural(summary['nodes'], 'node')}",
                f"{len(summary['rows'])} of {summary['epochs']}",
                time_text(summary["seconds"]),
                f"{summary['throughput']:.0f} {summary['counted']}/s",
                bytes_text(sent),
                f"{dense / sent:.1f}" if sent else "",
                "identical" if summary["replicas_identical"] else "NOT IDENTICAL",
            )
        )
    headings = ("run", "test accuracy", "processes", "epochs", "time", "in steps")
    table = _table((*headings, "sent per rank", "times less", "replicas"), rows)
    table = table.replace(">NOT IDENTICAL", ' class="bad">NOT IDENTICAL')
    stops = [
        f"<p>{html.escape(name)} was stopped by {html.escape(str(summary['stopped']['reason']))}"
        f" in epoch {summary['stopped']['epoch'] + 1}.</p>"
        for name, summary in runs.items()
        if "stopped" in summary
    ]
    targets = [
        f"<p>{html.escape(name)}: {html.escape(target_text(summary['target']))}.</p>"
        for name, summary in runs.items()
        if "target" in summary
    ]
    costs = [
        f"<p>{html.escape(name)}, snapshots in memory: "
        f"{html.escape(snapshots_text(summary['snapshots']))}.</p>"
        for name, summary in runs.items()
        if "snapshots" in summary
    ]
    return table + "".join([*targets, *costs, *stops])


def _breakdown_table(runs: Runs) -> str:
    seconds = {name: seconds_by_part(summary["rows"]) for name, summary in runs.items()}
    totals = {name: sum(parts.values()) or 1.0 for name, parts in seconds.items()}
    rows = [
        (
            meaning,
            *(
                f"{parts[part]:.1f} s, {100 * parts[part] / totals[name]:.0f} %"
                for name, parts in seconds.items()
            ),
        )
        for part, meaning in PARTS.items()
        if any(parts[part] for parts in seconds.values())
    ]
    return _table(("on rank 0", *runs), rows)


def _phases_table(runs: Runs) -> str:
    rows = []
    for name, summary in runs.items():
        for row in phase_rows(summary):
            *how, rate, alone, efficiency = phase_cells(row)
            rate = f"{rate} {row['counted']}/s"
            rows.append((name, f"{row['phase']}", *how, rate, alone, efficiency))
    headings = ("run", "phase", "epochs", "size", "batch", "exchange", "in steps")
    return _table((*headings, "one process", "scaling efficiency"), rows)


def _epochs_table(name: str, summary: dict[str, Any]) -> str:
    rows = [epoch_cells(row, _scores(row)) for row in summary["rows"]]
    table = _table(epoch_headings(summary), rows)
    return f"<details><summary>{html.escape(name)}</summary>{table}</details>"

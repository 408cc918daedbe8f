"""Tables and sentences of a comparison, on the terminal."""

from collections.abc import Callable, Sequence
from typing import Any

from rich.table import Table

from tfcommx.comparison.rows import (
    BYTES_SHARES,
    TIME_SHARES,
    Comparison,
    Row,
    Steps,
    choices,
    method_rows,
    pareto_words,
    time_rows,
)
from tfcommx.report.summary import bytes_text, time_text
from tfcommx.report.terminal import table_of, terminal_console

# Losses for which the fastest method is named, as multiples of the score's allowed loss
LOSSES = (1.0, 2.5, 5.0)
# Heading, and row -> text of the cell
Column = tuple[str, Callable[[Row], str]]


def show(comparison: Comparison) -> None:
    console = terminal_console()
    for table in (_methods(comparison), *(_times(comparison, steps) for steps in comparison.steps)):
        console.print(table)
    if comparison.steps:
        console.print(_choices(comparison))
    for sentence in sentences(comparison):
        console.print(sentence)


def sentences(comparison: Comparison) -> list[str]:
    """Return the Pareto sets in words, and the ratios of predicted to measured time."""
    lines = [pareto_words(comparison.points(), bytes_text, "bytes")]
    for steps in comparison.steps:
        cost = f"time at {rate_text(steps.bandwidth)}, {_how(steps)},"
        lines.append(pareto_words(comparison.points(steps.seconds), time_text, cost))
        if steps.ratios:
            listed = ", ".join(f"{name} {ratio:.2f}" for name, ratio in steps.ratios.items())
            lines.append(f"Predicted over measured time at {rate_text(steps.bandwidth)}: {listed}.")
    return lines


def rate_text(bandwidth: float) -> str:
    """Return bits per second with a unit.

    >>> rate_text(200e6), rate_text(2.5e9)
    ('200 Mbit/s', '2.5 Gbit/s')
    """
    return f"{bandwidth / 1e9:g} Gbit/s" if bandwidth >= 1e9 else f"{bandwidth / 1e6:g} Mbit/s"


def _how(steps: Steps) -> str:
    return "measured" if steps.ratios else "predicted"


def _methods(comparison: Comparison) -> Table:
    end = f"{comparison.score.text} at the end"
    columns: list[Column] = [
        ("seeds", lambda row: f"{row['seeds']}"),
        (end, _mean),
        ("loss", lambda row: f"{row['loss']:+.2f}"),
        ("bytes of a rank", lambda row: bytes_text(row["bytes_between"])),
        ("share", lambda row: f"{100 * row['bytes_share']:.1f} %"),
        *_within("bytes", BYTES_SHARES),
        (f"to {comparison.wanted():.2f}", _target("bytes_to_target", bytes_text)),
    ]
    title = f"at equal steps, and within shares of the bytes of {comparison.reference}"
    return _table(title, columns, method_rows(comparison))


def _times(comparison: Comparison, steps: Steps) -> Table:
    columns: list[Column] = [
        ("a step", lambda row: f"{1e3 * row['step_seconds']:.1f} ms"),
        ("all steps", lambda row: time_text(row["seconds"])),
        ("times faster", lambda row: f"{row['times_faster']:.2f}"),
        *_within("time", TIME_SHARES),
        (f"to {comparison.wanted():.2f}", _target("seconds_to_target", time_text)),
    ]
    if steps.ratios:
        columns.append(("predicted / measured", _cell("predicted_over_measured")))
    rate = f"{rate_text(steps.bandwidth)}, {_how(steps)}"
    title = f"{rate}: within shares of the time of {comparison.reference}"
    return _table(title, columns, time_rows(comparison, steps))


def _choices(comparison: Comparison) -> Table:
    losses = [factor * comparison.score.loss for factor in LOSSES]
    headings = ["between nodes", *(f"{loss:g}" for loss in losses)]
    rows = (
        [rate_text(bandwidth), *(f"{name}, {faster:.2f} times" for name, faster in chosen)]
        for bandwidth, chosen in choices(comparison, losses)
    )
    title = "the fastest method that loses at most so much"
    return table_of(title, headings, left=headings, rows=rows)


def _table(title: str, columns: list[Column], rows: dict[str, Row]) -> Table:
    headings = ["method", *(heading for heading, _ in columns)]
    cells = ([name, *(text(row) for _, text in columns)] for name, row in rows.items())
    return table_of(title, headings, left=["method"], rows=cells)


def _mean(row: Row) -> str:
    spread = f" ± {row['spread']:.2f}" if row["seeds"] > 1 else ""
    return f"{row['mean']:.2f}{spread}"


def _within(unit: str, shares: Sequence[float]) -> list[Column]:
    percents = [f"{100 * share:g}" for share in shares]
    return [(f"in {p} %", _cell(f"within_{p}_percent_of_{unit}")) for p in percents]


def _cell(key: str) -> Callable[[Row], str]:
    return lambda row: "" if row[key] is None else f"{row[key]:.2f}"


def _target(key: str, text: Callable[[Any], str]) -> Callable[[Row], str]:
    def cell(row: Row) -> str:
        if row[key] is None:
            return f"{row['seeds_at_target']} of {row['seeds']} seeds"
        return text(row[key])

    return cell

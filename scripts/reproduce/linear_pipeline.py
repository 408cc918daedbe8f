"""Predicts the speed-ups of the linear pipeline; see linear_pipeline.yaml. Columns are speed-ups.

python scripts/reproduce/linear_pipeline.py
"""

from __future__ import annotations

from typing import Any

from reproduction import NOT_SCORED, SCORED, main, read, row, verdict

from tfcommx.core import Link, cost

# Seconds of communication: of algorithm 1, by collective, and of algorithm 3 with the pipeline
Messages = dict[str, float]


def priced(data: dict[str, Any], name: str) -> Messages:
    """Return the seconds of communication at the assumed link, as the paper's table 1 counts."""
    known, size = data["assumed"], 1e6 * data["rows"][name]["megabytes"]
    link, ranks = Link(known["alpha_s"], 1e-9 / known["gbytes"]), known["ranks"]

    def pipeline(operation: str) -> float:
        return cost.linear_pipeline(operation, size, ranks, link, known["block_bytes"])

    def both(price: Any) -> float:
        return sum(price(operation, size, ranks, link) for operation in ("broadcast", "reduce"))

    return {
        "LP": pipeline("broadcast") + pipeline("reduce"),
        "MST": both(cost.spanning_tree),
        "BE": both(cost.bidirectional_exchange),
        "algorithm 3": pipeline("allreduce"),
    }


def shared(data: dict[str, Any], name: str) -> Messages:
    """Return the seconds of communication that the text's shares give."""
    about = data["rows"][name]
    pipeline = about["share"]["MST"] * about["messages"]
    return {
        "LP": pipeline,
        "MST": about["messages"],
        "BE": pipeline / about["share"]["BE"],
        # As in the paper's table 1: an allreduce takes as long as a broadcast and a reduce together
        "algorithm 3": pipeline,
    }


def speedup(known: Messages, compute_s: float, over: str) -> float:
    """Return how much faster the pipeline's iteration is."""
    if over == "algorithm 3":
        return (known["BE"] + compute_s) / max(known["algorithm 3"], compute_s)
    return (known[over] + compute_s) / (known["LP"] + compute_s)


def run() -> tuple[list[dict[str, Any]], list[str]]:
    """Return the rows and the verdict."""
    data, rows = read("linear_pipeline"), []
    for name, about in data["rows"].items():
        for over, published in about["speedup"].items():
            found = (speedup(make(data, name), about["compute"], over) for make in (priced, shared))
            what = "LP, algorithm 3, over BE" if over == "algorithm 3" else f"LP over {over}"
            reason = data["not_scored"].get(f"{name}, {what}", "")
            role = NOT_SCORED if reason else SCORED
            text = f"{name}, {what}: {reason}" if reason else ""
            named = f"{name}, {what}"
            rows.append(row("linear_pipeline", named, published, *found, None, role, text))
    return rows, [verdict("speed-ups of an iteration", rows, data["goal"])]


if __name__ == "__main__":
    main(__doc__, run)

"""How far published steps lie from predicted ones, and whether intervals of that width hold them.

python scripts/reproduce/intervals.py
python scripts/reproduce/intervals.py --rows horovod.json commlib.json    # files of --json

`tfcommx.planner.predict` has the three numbers fitted to all sources together. To test whether they
hold for a new source, each source is left out in turn, and its intervals are computed from the
numbers of the others. A source of several networks or tables counts as several.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import commlib
import horovod
import ibatch
import linear_pipeline
import omgs
import theano_mpi
from reproduction import SCORED

from tfcommx.planner.predict import MISSES, Misses, interval

# A step that waits for its exchange for less than this share of it shows how computing is missed,
# and one that waits for more than that share how messages are.
HIDDEN, EXPOSED = 0.1, 0.3
Rows = list[Mapping[str, Any]]


def source_of(row: Mapping[str, Any]) -> str:
    """Return the source of a row; a network of `horovod` is one by itself."""
    network = row["name"].split(",")[0]
    return f"horovod {network}" if row["source"] == "horovod" else str(row["source"])


def share(row: Mapping[str, Any]) -> float:
    """Return which share of the predicted value is exchange; of a speed-up, all of it."""
    return 1.0 - (row["compute_s"] or 0.0) / row["calibrated_s"]


def misses_of(rows: Iterable[Mapping[str, Any]]) -> Misses:
    """Return the misses beyond whose ends 2.5 % of some rows lie, at each end."""
    rows = list(rows)
    computes = [one["published_s"] / one["calibrated_s"] for one in rows if share(one) < HIDDEN]
    messages = []
    for one in rows:
        if share(one) >= EXPOSED:
            alone = one["compute_s"] or 0.0
            messages.append((one["published_s"] - alone) / (one["calibrated_s"] - alone))
    ends = statistics.quantiles(messages, n=40, method="inclusive")
    return Misses(ends[0], ends[-1], statistics.quantiles(computes, n=40, method="inclusive")[-1])


def held(rows: Rows, misses: Misses) -> int:
    """Count the rows whose published value is in the interval around the predicted one."""
    found = 0
    for one in rows:
        alone = one["compute_s"] or 0.0
        low, high = interval(alone, one["calibrated_s"] - alone, misses=misses)
        found += low <= one["published_s"] <= high
    return found


def main() -> None:
    """Print the misses of all, and how many rows the intervals of others and of all hold."""
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("--rows", type=Path, nargs="+", help="files that --json wrote")
    files = options.parse_args().rows
    if files:
        rows = [json.loads(line) for file in files for line in file.read_text().splitlines()]
    else:
        scripts = (horovod, commlib, theano_mpi, omgs, ibatch, linear_pipeline)
        rows = [row for script in scripts for row in script.run()[0]]
    scored = [one for one in rows if one["role"] == SCORED and one["calibrated_s"] is not None]
    sources = sorted({source_of(one) for one in scored})
    found = misses_of(scored)
    said = ", ".join(f"{name} {value:.2f}" for name, value in found._asdict().items())
    print(f"misses of {len(scored)} rows: {said}; in the product: {tuple(MISSES)}\n")
    print("| source | rows | held, numbers of the others | held, numbers of the product |")
    print("|---|---|---|---|")
    totals = [0, 0]
    for source in sources:
        mine = [one for one in scored if source_of(one) == source]
        others = misses_of(one for one in scored if source_of(one) != source)
        counts = [held(mine, others), held(mine, MISSES)]
        totals = [a + b for a, b in zip(totals, counts, strict=True)]
        print(f"| {source} | {len(mine)} | {counts[0]} | {counts[1]} |")
    shares = [f"{count} ({count / len(scored):.0%})" for count in totals]
    print(f"| all | {len(scored)} | {shares[0]} | {shares[1]} |")


if __name__ == "__main__":
    main()

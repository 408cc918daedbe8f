"""The command line of the benchmarks, which run in this process or on ranks started for them."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import bench
from bench import options
from bench.registry import BENCHMARKS, claim


def main(words: Sequence[str]) -> int:
    """Carry out a command; return the exit status: 1 if an answer was wrong."""
    name, rest = (words[0], list(words[1:])) if words else ("--help", [])
    if name in ("-h", "--help"):
        print(bench.__doc__)
    elif name == "--list":
        for one, benchmark in BENCHMARKS.items():
            print(f"{one:18} {benchmark.place():16} {claim(one)}")
    elif name in ("results", "record"):
        module = importlib.import_module(f"bench.{name}")
        return int(module.main(rest) or 0)
    elif name == "all":
        return run_all(rest)
    elif name in BENCHMARKS:
        return run(name, rest)
    else:
        known = ", ".join(["all", "results", "record", *BENCHMARKS])
        raise SystemExit(f"A benchmark is required: {known}. Received {name!r}.")
    return 0


def run(name: str, words: list[str]) -> int:
    """Run a benchmark in this process, or on ranks if it takes some and this is none of them."""
    benchmark = BENCHMARKS[name]
    if "--smoke" in words:
        words = [*benchmark.smoke.split(), *words]  # The last value of an option counts
    if not benchmark.ranks or {"-h", "--help"} & set(words):
        return run_here(name, words)
    from bench import ranks

    if ranks.in_launch():
        return run_here(name, words)
    chosen, own = ranks.parser().parse_known_args(words)
    places = ranks.places(chosen, benchmark)
    if [place.size for place in places] == [1]:
        return run_here(name, words)
    command = [name, *own, *["--smoke"] * chosen.smoke]
    rows, status = run_on(places, command, chosen.json)
    draw = options.save_picture
    if chosen.png and rows:
        module = importlib.import_module(f"bench.benchmarks.{name}")
        draw = getattr(module, "draw", draw)
    note = "; ".join(dict.fromkeys(place.note() for place in places if place.note()))
    return status or options.finish(rows, chosen, draw, note or None)


def run_on(
    places: Sequence[Any], command: list[str], kept: Path | None
) -> tuple[list[dict[str, Any]], int]:
    """Run a command at each place; return the rows, and the status of the first that failed.

    Args:
        places: see ranks.places.
        command: words after `python scripts/bench`.
        kept: a file that has each row as soon as it is measured, whatever happens afterwards.
    """
    from bench import ranks

    rows, status = [], 0
    with tempfile.TemporaryDirectory() as folder:
        file = (kept or Path(folder) / "rows.jsonl").resolve()
        file.write_text("")
        for place in places:
            status = ranks.launch(place, [*command, "--rows", str(file)]) or status
        rows = [json.loads(line) for line in file.read_text().splitlines()]
    return rows, status or int(not rows)


def run_here(name: str, words: Sequence[str], label: str | None = None) -> int:
    """Run a benchmark in this process, which may be a rank.

    Args:
        name: of the benchmark.
        words: its options; with `--rows` the rows go there, and whoever gave it judges them.
        label: a first column of the rows, which names the benchmark.
    """
    # Before NumPy: threads that verify one step would keep spinning during the next one
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    from tfcommx.cli.environment import load_tensorflow, quiet_tensorflow

    quiet_tensorflow()
    load_tensorflow()
    module = importlib.import_module(f"bench.benchmarks.{name}")
    parser, chief = module.parser(), True
    if BENCHMARKS[name].ranks:
        from bench import ranks

        ranks.add_options(parser)
        chief = ranks.is_chief()
    chosen, rows = parser.parse_args(words), []
    for table in module.measure(chosen):
        found = [{"benchmark": label} | row if label else row for row in table.rows]
        rows += found
        if chief:
            options.print_table(table)
            if chosen.rows:
                with chosen.rows.open("a") as file:
                    file.writelines(json.dumps(row) + "\n" for row in found)
    if chosen.rows or not chief:
        return 0
    note = module.note(chosen) if hasattr(module, "note") else None
    return options.finish(rows, chosen, getattr(module, "draw", options.save_picture), note)


def run_all(words: list[str]) -> int:
    """Run all benchmarks: each in its own process, or (--smoke) in as few launches as they take."""
    parser = argparse.ArgumentParser(prog="bench all", description=run_all.__doc__)
    parser.add_argument("--smoke", action="store_true", help="each at its smallest; not timed")
    parser.add_argument("--only", nargs="+", choices=BENCHMARKS)
    parser.add_argument("--json", type=Path, help="write one object a line to this file")
    parser.add_argument("--rows", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--node-size", help=argparse.SUPPRESS)
    chosen = parser.parse_args(words)
    if chosen.only is None:
        chosen.only = list(BENCHMARKS)
    if not chosen.smoke:
        if chosen.json:
            raise SystemExit("--json is of --smoke. Without it, start each benchmark with its own.")
        script = [sys.executable, str(Path(__file__).parent)]
        statuses = [subprocess.call([*script, name]) for name in chosen.only]
        return int(any(statuses))  # That of a killed process is negative
    if chosen.rows:
        for name in chosen.only:
            own = [*BENCHMARKS[name].smoke.split(), "--smoke", "--rows", str(chosen.rows)]
            if BENCHMARKS[name].ranks:
                own += ["--node-size", chosen.node_size]
            run_here(name, own, label=name)
        return 0
    from bench import ranks

    groups: dict[Any, list[str]] = {}
    for name in chosen.only:
        groups.setdefault(ranks.smoke_place(BENCHMARKS[name]), []).append(name)
    rows, status = [], 0
    for place, names in groups.items():
        found, ended = run_on([place], ["all", "--smoke", "--only", *names], None)
        rows, status = rows + found, status or ended
    if chosen.json:
        options.write(rows, chosen.json)
    missing = set(chosen.only) - {row["benchmark"] for row in rows}
    if missing:
        print(f"no rows: {', '.join(sorted(missing))}")
    return status or int(not options.right(rows))

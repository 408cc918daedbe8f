#!/usr/bin/env python3
"""Put the figures of the records into the pages that show them.

    python scripts/documents/figures.py          # rewrite README.md, docs/, headers of configs/
    python scripts/documents/figures.py --check  # change nothing, name what differs; status 1

A figure stands between markers, which GitHub does not show:

    accuracy <!--figure demo.test_accuracy .4f-->0.9084<!--/--> after ...
    <!--figure step("tfcommx").seconds / step("horovod").seconds .2f-->1.02<!--/--> times

The expression names records (docs/records/NAME.json, see scripts/bench/records.py). A row is
called by its name, and by other columns if several rows have that name:
`select("mstopk", density=0.01).seconds`. Of a record with one row, columns are attributes of the
record. The last word is Python's format. What can be computed from records is computed, never
typed: in the expression, or in docs/records/derived.txt, whose lines `name = expression` give it a
name.

A table over the rows of a record, its conditions, and a line in a comment of a YAML file, which is
made of the template below it:

    <!--table routes where slots == 2
    route: name
    time, ms: seconds * 1e3 .0f
    -->
    <!--/table-->

    <!--conditions routes-->
    <!--/conditions-->

    # Measured: test accuracy 0.9084 in 114 s
    # figures: Measured: test accuracy {demo.test_accuracy:.4f} in {demo.seconds:.0f} s

Columns are names in a table's expressions; a cell whose value is missing is empty.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "docs" / "records"

FIGURE = re.compile(
    r"(?P<head><!--figure (?P<what>(?:(?!-->).)+) (?P<form>[\w.,%+]+)-->)"
    r"(?:(?!<!--).)*?(?P<end><!--/-->)",
    re.S,
)
TABLE = re.compile(
    r"(?P<head><!--table (?P<record>\w+)(?: where (?P<where>[^\n]+))?\n(?P<columns>.*?)-->\n)"
    r".*?(?P<end><!--/table-->)",
    re.S,
)
CONDITIONS = re.compile(
    r"(?P<head><!--conditions (?P<record>\w+)-->\n).*?(?P<end><!--/conditions-->)", re.S
)
TEMPLATE = re.compile(r"(?m)^.*\n(?P<below>(?P<mark> *#) figures: (?P<template>.*))$")
HELPERS = {
    "abs": abs,
    "min": min,
    "max": max,
    "median": statistics.median,
    "mean": statistics.fmean,
    "sum": sum,
    "len": len,
}


class FigureError(Exception):
    """A marker that names no record, no row or no column."""


class Row:
    """A row of a record; its columns are attributes."""

    def __init__(self, where: str, columns: dict[str, Any]) -> None:
        self._where, self._columns = where, columns

    def __getattr__(self, name: str) -> Any:
        try:
            return self._columns[name]
        except KeyError:
            has = ", ".join(self._columns)
            raise FigureError(f"{self._where} has no column {name!r}. It has {has}.") from None


class Record:
    """A record as markers see it."""

    def __init__(self, content: dict[str, Any]) -> None:
        self.content = content

    def __call__(self, name: str, **where: Any) -> Row:
        """Return the row of a name, and of other columns if several have it."""
        record, wanted = self.content["name"], {"name": name, **where}
        rows = [
            row
            for row in self.content["rows"]
            if all(row.get(key) == value for key, value in wanted.items())
        ]
        if len(rows) != 1:
            names = ", ".join(sorted({row["name"] for row in self.content["rows"]}))
            raise FigureError(
                f"One row of {record!r} with {wanted} is required; {len(rows)} have that. "
                f"Its rows are called {names}."
            )
        return Row(f"{record}({name!r})", rows[0])

    def __getattr__(self, name: str) -> Any:
        if name in ("date", "commit", "command", "machine", "versions"):
            return self.content[name]
        rows = self.content["rows"]
        if len(rows) != 1:
            raise FigureError(f"{self.content['name']!r} has {len(rows)} rows: call one by name.")
        return getattr(Row(self.content["name"], rows[0]), name)


def read_records(folder: Path = FOLDER) -> dict[str, Any]:
    """Return the records by name, and what is derived from them."""
    found = (json.loads(path.read_text()) for path in sorted(folder.glob("*.json")))
    records: dict[str, Any] = {one["name"]: Record(one) for one in found}
    derived = folder / "derived.txt"
    for line in derived.read_text().splitlines() if derived.exists() else ():
        if line and not line.startswith("#"):
            name, _, expression = line.partition(" = ")
            records[name] = value_of(expression, records, {})
    return records


def value_of(expression: str, records: dict[str, Any], columns: dict[str, Any]) -> Any:
    """Evaluate a marker's expression.

    **Raises:** FigureError if it names what is not there.
    """
    try:
        # All in one: a comprehension sees no local names
        return eval(expression, {"__builtins__": {}, **HELPERS, **records, **columns})
    except NameError as error:
        has = ", ".join(records) or "none"
        raise FigureError(f"{expression}: {error}. Records in docs/records: {has}.") from None
    except (SyntaxError, TypeError, KeyError) as error:
        raise FigureError(f"{expression}: {error}.") from None


def shown(value: Any, form: str) -> str:
    """Write a value as its marker says; "" for what is missing."""
    return "" if value is None else format(value, form)


def table(found: re.Match[str], records: dict[str, Any]) -> str:
    """Make the text of a table from its marker."""
    if found["record"] not in records:
        raise FigureError(f"table {found['record']}: there is no such record.")
    columns = [line.partition(": ") for line in found["columns"].strip().splitlines()]
    lines = [[heading for heading, _, _ in columns], ["---"] + ["---:"] * (len(columns) - 1)]
    for row in records[found["record"]].content["rows"]:
        if found["where"] and not value_of(found["where"], records, row):
            continue
        empty = {name for name, value in row.items() if value is None}
        cells = []
        for _, _, wanted in columns:
            expression, _, form = wanted.rpartition(" ")
            missing = empty & set(re.findall(r"\w+", expression))
            cells.append("" if missing else shown(value_of(expression, records, row), form))
        lines.append(cells)
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def conditions(name: str, records: dict[str, Any]) -> str:
    """Make the text that says how a record was measured."""
    if name not in records:
        raise FigureError(f"conditions {name}: there is no such record.")
    one = records[name].content
    machine, versions = one["machine"], one["versions"]
    names = {"python": "Python", "tensorflow": "TensorFlow", "keras": "Keras", "horovod": "Horovod"}
    load = machine["load_before"]
    about = [
        f"{one['date']}, commit {one['commit']}",
        f"{machine['processor']}, {machine['cores']} cores, {machine['instruction_set']}, "
        f"{machine['memory_gib']} GiB" + ("" if load is None else f", load before {load:g}"),
        ", ".join(f"{text} {versions[key]}" for key, text in names.items() if versions.get(key)),
    ]
    note = f" {one['note'][:1].upper()}{one['note'][1:]}." if one["note"] else ""
    return f"\n    {one['command']}\n\n{'; '.join(about)}.{note}\n\n"


def filled(text: str, records: dict[str, Any]) -> str:
    """Return a page with all its figures as the records have them."""

    def figure(found: re.Match[str]) -> str:
        value = value_of(found["what"], records, {})
        return found["head"] + shown(value, found["form"]) + found["end"]

    def line(found: re.Match[str]) -> str:
        def part(inner: re.Match[str]) -> str:
            return shown(value_of(inner[1], records, {}), inner[2])

        template = re.sub(r"\{([^{}:]+):([^{}]*)\}", part, found["template"])
        return f"{found['mark']} {template}\n{found['below']}"

    for kind, pattern in (("figure", FIGURE), ("table", TABLE), ("conditions", CONDITIONS)):
        if text.count(f"<!--{kind} ") != len(pattern.findall(text)):
            raise FigureError(f"a marker <!--{kind} ...--> lacks its format or its end.")
    text = FIGURE.sub(figure, text)
    text = TABLE.sub(lambda one: f"{one['head']}\n{table(one, records)}\n{one['end']}", text)
    text = CONDITIONS.sub(
        lambda one: one["head"] + conditions(one["record"], records) + one["end"], text
    )
    return TEMPLATE.sub(line, text)


def pages() -> Iterator[Path]:
    """Yield the files that may show figures."""
    yield ROOT / "README.md"
    yield from sorted((ROOT / "docs").rglob("*.md"))
    yield from sorted((ROOT / "configs").glob("*.yaml"))


def differences(before: str, after: str) -> list[str]:
    """Return the lines that differ, as "is ...; must be ..."."""
    lines = zip(before.splitlines(), after.splitlines(), strict=False)
    found = [f"is {one!r}; must be {other!r}" for one, other in lines if one != other]
    return found or ([] if before == after else ["a table has another number of rows"])


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="change nothing, name what differs")
    chosen = parser.parse_args()
    records, different = read_records(), 0
    for page in pages():
        text = page.read_text()
        try:
            new = filled(text, records)
        except FigureError as error:
            raise SystemExit(f"{page.relative_to(ROOT)}: {error}") from None
        if new == text:
            continue
        different += 1
        for difference in differences(text, new):
            print(f"{page.relative_to(ROOT)}: {difference}")
        if not chosen.check:
            page.write_text(new)
    return int(chosen.check and different > 0)


if __name__ == "__main__":
    sys.exit(main())

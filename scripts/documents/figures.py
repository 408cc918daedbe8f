#!/usr/bin/env python3
"""Write the tables of the pages, and the conditions of their records.

    python scripts/documents/figures.py          # rewrite README.md and docs/
    python scripts/documents/figures.py --check  # change nothing, name differences; status 1

A table stands between two marker lines, which GitHub does not show; tables.py makes it from the
records in docs/records (see scripts/bench/records.py). So do the command and the machine of a
record:

    <!--table routes-->
    <!--/table-->

    <!--conditions routes-->
    <!--/conditions-->
"""

from __future__ import annotations

import argparse
import difflib
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts" / "documents"))
import scheme_map  # noqa: E402
import tables  # noqa: E402
import whole_trainings  # noqa: E402
from tables import FigureError, Records  # noqa: E402

TABLES = {**tables.TABLES, **scheme_map.TABLES, **whole_trainings.TABLES}

FOLDER = ROOT / "docs" / "records"
BLOCK = re.compile(
    r"(?P<head><!--(?P<kind>table|conditions) (?P<name>\w+)-->\n).*?(?P<end><!--/(?P=kind)-->)",
    re.S,
)


def read_records(folder: Path = FOLDER) -> Records:
    """Return the records of a folder."""
    return Records(json.loads(path.read_text()) for path in sorted(folder.glob("*.json")))


def conditions(name: str, records: Records) -> str:
    """Return the text that says how a record was measured."""
    record = records[name]
    machine, versions = record["machine"], record["versions"]
    names = {"python": "Python", "tensorflow": "TensorFlow", "keras": "Keras", "horovod": "Horovod"}
    load = machine["load_before"]
    about = [
        f"{record['date']}, commit {record['commit']}",
        f"{machine['processor']}, {machine['cores']} cores, {machine['instruction_set']}, "
        f"{machine['memory_gib']} GiB" + ("" if load is None else f", load before {load:g}"),
        ", ".join(f"{text} {versions[key]}" for key, text in names.items() if versions.get(key)),
    ]
    note = f" {record['note'][:1].upper()}{record['note'][1:]}." if record["note"] else ""
    return f"    {record['command']}\n\n{'; '.join(about)}.{note}\n"


def filled(text: str, records: Records) -> str:
    """Return a page with its tables and conditions as the records have them.

    **Raises:** FigureError for a marker without its end, or a name that is unknown.
    """
    blocks = [block["kind"] for block in BLOCK.finditer(text)]
    for kind in ("table", "conditions"):
        if text.count(f"<!--{kind} ") != blocks.count(kind):
            raise FigureError(
                f"A marker <!--{kind} NAME--> lacks its end, or is not on its own line."
            )

    def block(found: re.Match[str]) -> str:
        if found["kind"] == "conditions":
            content = conditions(found["name"], records)
        elif found["name"] in TABLES:
            content = TABLES[found["name"]](records)
        else:
            raise FigureError(f"No table is called {found['name']!r}. Tables: {', '.join(TABLES)}.")
        return f"{found['head']}\n{content}\n{found['end']}"

    return BLOCK.sub(block, text)


def pages() -> Iterator[Path]:
    """Yield the files that may have tables."""
    yield ROOT / "README.md"
    yield from sorted((ROOT / "docs").rglob("*.md"))


def differences(before: str, after: str) -> list[str]:
    """Return the lines that a page must lose (-) and gain (+)."""
    lines = difflib.unified_diff(before.splitlines(), after.splitlines(), lineterm="", n=0)
    return [line for line in list(lines)[2:] if line[0] != "@"]


def main() -> int:
    """Write or check all pages."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="change nothing, name differences")
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

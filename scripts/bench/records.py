"""Records of measurements: a figure is written once, by the program that measured it.

A record is one file, `docs/records/NAME.json`, of one call of a program:

    name, command, date, commit     the command as it was typed, without `--record`; the commit has
                                    a "+" if code had been changed since
    machine                         processor, cores, instruction_set, memory_gib, and load_before:
                                    the mean over the minute before the program began; null for
                                    rows of several launches
    versions                        python, tensorflow, keras, horovod, tfcommx
    note                            other conditions: a virtual cluster, say; may be null
    rows                            the measurements, one object each, with a unique `name`

Benchmarks write one with `--record NAME` (options.py), trainings get theirs from
their summary (`bench record`). Pages include figures from records (scripts/documents/figures.py).

The standard library suffices.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import re
import shlex
import subprocess
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import Any

from tfcommx.core import write_text

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "docs" / "records"
# A version's name in a record -> the packages that may provide it
PACKAGES = {
    "tensorflow": ("tensorflow", "tensorflow_cpu"),
    "keras": ("keras",),
    "horovod": ("horovod",),
    "tfcommx": ("tfcommx",),
}
# Programs that a measuring command can begin with; words before them (time, nice) are dropped
STARTERS = re.compile(r"(python[\d.]*|horovodrun|mpirun|tfcommx)$")
NAME = re.compile(r"[a-z][a-z0-9_]*$")

# Of the moment when this module is imported: the measurement itself is a load
LOAD_BEFORE = round(os.getloadavg()[0], 2)


def add_option(parser: argparse.ArgumentParser) -> None:
    """Add `--record NAME`, whose name is checked before anything is measured."""
    text = "keep rows and conditions as docs/records/NAME.json"
    parser.add_argument("--record", metavar="NAME", type=checked, help=text)


def checked(name: str) -> str:
    """Return a record's name. **Raises:** SystemExit for other characters than `write` names."""
    if not NAME.match(name):
        raise SystemExit(f"A record's name has a-z, 0-9 and _ only. Received {name!r}.")
    return name


def write(
    name: str,
    rows: Sequence[Mapping[str, Any]],
    command: str,
    note: str | None = None,
    folder: Path = FOLDER,
) -> Path:
    """Write a record, in place of an earlier one of that name.

    Args:
        name: letters, digits and `_`; pages refer to it.
        rows: the measurements; a record without rows is refused.
        command: as it was typed; see `command_of`.
        note: other conditions of the measurement.
        folder: of the records.

    Returns:
        The file.
    """
    if not rows:
        raise SystemExit(f"Nothing was measured, so there is nothing to record as {name!r}.")
    record = {
        "name": checked(name),
        "command": command,
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d"),
        "commit": commit(),
        "machine": machine(),
        "versions": versions(),
        "note": note,
        "rows": list(rows),
    }
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.json"
    lines = ",\n  ".join(json.dumps(row) for row in record.pop("rows"))
    write_text(path, f'{json.dumps(record, indent=1)[:-2]},\n "rows": [\n  {lines}\n ]\n}}\n')
    return path


def command_of(words: Sequence[str]) -> str:
    """Return the command that started this process, from the launcher if there is one.

    Args:
        words: arguments of this program; a launcher's command ends with them, too.
    """
    found, process = ["python", "scripts/bench", *words], os.getpid()
    while process > 1:
        try:
            command = os.fsdecode(Path(f"/proc/{process}/cmdline").read_bytes()).split("\0")[:-1]
            state = Path(f"/proc/{process}/stat").read_bytes().rpartition(b")")[2]
            parent = int(state.split()[1])
        except (OSError, ValueError):
            break
        if STARTERS.search(command[0]) and command[-len(words) :] == [*words]:
            found = command
        process = parent
    return tidied(found)


def tidied(words: Sequence[str]) -> str:
    """Return a command as a person types it.

    >>> tidied(["/v/bin/python", "/v/bin/horovodrun", "-np", "2", "/v/bin/python", "b.py"])
    'horovodrun -np 2 python b.py'
    >>> tidied(["python3.11", "b.py", "--record", "step", "--schemes", "auto sparse"])
    "python b.py --schemes 'auto sparse'"
    """
    kept = list(words)
    if len(kept) > 1 and STARTERS.search(kept[1]):
        del kept[0]  # The interpreter of a launcher that is itself a script
    if "--record" in kept:
        at = kept.index("--record")
        del kept[at : at + 2]
    for place, word in enumerate(kept):
        if STARTERS.search(word) and "/" in word:
            kept[place] = Path(word).name
        kept[place] = re.sub(r"^python[\d.]+$", "python", kept[place])
        if kept[place].startswith(f"{ROOT}/"):
            kept[place] = kept[place].removeprefix(f"{ROOT}/")
    return shlex.join(kept)


def commit() -> str:
    """Return the commit, with "+" if code differs from it; "" outside of a clone."""
    code = [".", ":!docs", ":!*.md"]
    head = _output("git", "rev-parse", "--short=9", "HEAD").strip()
    changed = _output("git", "status", "--porcelain", "--untracked-files=no", "--", *code)
    return head + ("+" if changed.strip() else "")


def machine() -> dict[str, Any]:
    """Return the processor, memory and load of this machine."""
    try:
        about = Path("/proc/cpuinfo").read_text()
    except OSError:
        about = ""
    processor = re.search(r"^model name\s*:\s*(.*)$", about, re.M)
    flags = re.search(r"^flags\s*:\s*(.*)$", about, re.M)
    has = set(flags[1].split()) if flags else set()
    vectors = {"avx512f": "AVX-512", "avx2": "AVX2"}
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "processor": processor[1].strip() if processor else platform.processor(),
        "cores": len(os.sched_getaffinity(0)),
        "instruction_set": next((text for flag, text in vectors.items() if flag in has), "base"),
        "memory_gib": round(memory / 2**30),
        "load_before": LOAD_BEFORE,
    }


def versions() -> dict[str, str | None]:
    """Return the versions of Python and of the packages that count; None if not installed."""
    found: dict[str, str | None] = {"python": platform.python_version()}
    for name, packages in PACKAGES.items():
        found[name] = None
        for package in packages:
            with contextlib.suppress(metadata.PackageNotFoundError):
                found[name] = metadata.version(package)
    return found


def _output(*words: str) -> str:
    try:
        return subprocess.run(words, cwd=ROOT, capture_output=True, text=True).stdout
    except OSError:
        return ""

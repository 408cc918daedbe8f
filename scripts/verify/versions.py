#!/usr/bin/env python3
"""Set up from nothing, train the demo and run tests, with one version of Python, TensorFlow and
Keras after another: `make test-versions`.

    python scripts/verify/versions.py --list
    python scripts/verify/versions.py --only py3.13 keras3.14
    python scripts/verify/versions.py --pythons ~/.pyenv/versions/*/bin/python --record versions

Each is tested in its own environment in build/versions/, in a clone of the last commit, so that the
native library is built there, too. This takes about 15 minutes each on 2 cores.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts"))

from bench import records  # noqa: E402

COMMAND = "make test-versions"

FOLDER = ROOT / "build" / "versions"
TESTS = (
    "tests/laws",
    "tests/keras_internals",
    "tests/optim",
    "tests/callbacks",
    "tests/checkpoint",
    "tests/optimizers",
    "tests/test_real_ranks.py",
    "tests/test_real_ranks_of_models.py",
)


class Case(NamedTuple):
    """Versions to set up; None: those that the set-up installs."""

    python: str
    keras: str | None = None
    tensorflow: str | None = None


CASES = {
    "py3.11": Case("3.11"),
    "py3.12": Case("3.12"),
    "py3.13": Case("3.13"),
    "keras3.13": Case("3.11", keras="3.13.*"),
    "keras3.14": Case("3.11", keras="3.14.*"),
    "tf2.20": Case("3.11", tensorflow="2.20.0"),
}


def version_of(python: str) -> str:
    """Return a Python's version, "" if it does not run."""
    code = "import platform; print(platform.python_version())"
    try:
        return subprocess.run([python, "-c", code], capture_output=True, text=True).stdout.strip()
    except OSError:
        return ""


def find_pythons(given: list[str]) -> dict[str, str]:
    """Return the path of each Python, by major and minor version."""
    found = {}
    for python in (*(f"python3.{minor}" for minor in range(10, 14)), sys.executable, *given):
        path, version = shutil.which(python), version_of(python)
        if path and version:
            found[".".join(version.split(".")[:2])] = path
    return found


def run(log: Path, folder: Path, environment: dict[str, str], *words: object) -> tuple[int, str]:
    """Run a command, add its output to a file; return its status and output."""
    done = subprocess.run(
        [str(word) for word in words],
        cwd=folder,
        env={**os.environ, **environment},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    with log.open("a") as file:
        file.write(f"$ {' '.join(map(str, words))}\n{done.stdout}\n")
    return done.returncode, done.stdout


def check(name: str, python: str, tests: list[str]) -> dict[str, Any]:
    """Set up one case with this Python, train and test with it; return its row."""
    tree, venv, log = FOLDER / name / "tree", FOLDER / name / "venv", FOLDER / name / "log"
    shutil.rmtree(FOLDER / name, ignore_errors=True)
    (FOLDER / name).mkdir(parents=True)
    subprocess.run(["git", "clone", "--quiet", ROOT, tree], check=True)
    environment = {
        "TFCOMMX_VENV": str(venv),
        "PATH": f"{venv / 'bin'}:{os.environ['PATH']}",
        "PYTHONPATH": "",
    }
    case = CASES[name]
    if case.tensorflow:
        environment["TFCOMMX_TENSORFLOW"] = case.tensorflow
    row: dict[str, Any] = {"name": name, "commit": records.commit()}
    start = time.monotonic()
    status, output = run(log, tree, environment, python, "scripts/setup")
    row["setup_seconds"] = round(time.monotonic() - start)
    if status == 0 and case.keras:
        keras = f"keras=={case.keras}"
        status, output = run(log, tree, environment, "python", "-m", "pip", "install", keras)
    if status:
        return {**row, "failed": f"set-up: {output.strip().splitlines()[-1]}"}
    code = (
        "import json, sys; sys.path.insert(0, 'scripts'); from bench import records; "
        "print(json.dumps(records.versions()))"
    )
    row |= json.loads(run(log, tree, environment, "python", "-c", code)[1].splitlines()[-1])
    train = ("tfcommx", "train", "configs/fashion_mnist.yaml", "--processes", 4)
    status, output = run(log, tree, environment, *train)
    summary = tree / "runs" / "fashion_mnist" / "summary.json"
    row["demo_accuracy"] = None if status else json.loads(summary.read_text())["test_accuracy"]
    status, output = run(log, tree, environment, "python", "-m", "pytest", *tests)
    last = output.strip().splitlines()[-1]
    for outcome in ("passed", "failed", "error"):
        counted = re.search(rf"(\d+) {outcome}", last)
        row[outcome] = int(counted[1]) if counted else 0
    if status:
        row["failed_tests"] = re.findall(r"^(?:FAILED|ERROR) (\S+)", output, re.M)[:20]
    return row


def is_wrong(row: dict[str, Any]) -> bool:
    """Return True if set-up, demo or tests failed; pytest also fails without a failed test."""
    return bool(row.get("failed")) or row["demo_accuracy"] is None or "failed_tests" in row


def with_others(record: str, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the rows in the order of the cases, and of an earlier record those of other cases."""
    path = records.FOLDER / f"{record}.json"
    before = json.loads(path.read_text())["rows"] if path.exists() else []
    known = {row["name"]: row for row in (*before, *rows)}
    return [known[name] for name in CASES if name in known]


def main() -> int:
    """Check the chosen cases; return 1 if one failed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", choices=CASES, metavar="NAME", help="these cases")
    parser.add_argument("--pythons", nargs="+", default=[], help="more Pythons than those on PATH")
    parser.add_argument("--tests", nargs="+", default=[*TESTS], help="arguments of pytest")
    parser.add_argument("--list", action="store_true", help="print the cases and their Pythons")
    records.add_option(parser)
    chosen = parser.parse_args()
    pythons, rows = find_pythons(chosen.pythons), []
    for name in chosen.only or CASES:
        case = CASES[name]
        python = pythons.get(case.python, "")
        if chosen.list or not python:
            print(name, python or f"not run: no Python {case.python} was found")
            continue
        rows.append(check(name, python, chosen.tests))
        print(json.dumps(rows[-1]), flush=True)
        if chosen.record:  # Case by case: a run takes more than an hour, and may be cut off
            records.write(chosen.record, with_others(chosen.record, rows), COMMAND)
    return int(any(map(is_wrong, rows)))


if __name__ == "__main__":
    sys.exit(main())

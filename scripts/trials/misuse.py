#!/usr/bin/env python3
"""Claim: whatever users forget, ranks end with equal weights or with an error that names it.

    python scripts/trials/misuse.py --minutes 60 --seed 1 --json misuse.jsonl
    python scripts/trials/misuse.py --only 17 23    # these cases again, with what they printed

Draws a small training by seed: callbacks, schedule, strategy, scheme, seeds of the ranks, and one
thing that is wrong (misuse_cases.py has the list, and which text counts as the error that names
it). Starts it with horovodrun on 2 or 4 ranks of this machine, and judges how it ends:

    equal           all ranks ended in order, with the same trainable weights
    named           the output has the text that names what is wrong
    silent drift    all ended in order, with different weights
    unnamed error   it failed with another error
    hang            nothing named it within the limit, counted from the first step of the last rank
    silent wait     likewise, and a rank that lives takes fewer steps than the others
    late            it was named, but did not end within the limit

All but the first two are findings. Exit status: 1 if there are any.
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import misuse_cases

ROOT = Path(__file__).resolve().parents[2]
WORKER = Path(__file__).with_name("misuse_worker.py")
LIMIT_SECONDS = 90.0
# For launching, importing TensorFlow and tracing the first step, on a crowded machine
START_SECONDS = 240.0
RIGHT = ("equal", "named")


def begun_at(folder: Path, ranks: int) -> float | None:
    """Return when the last rank began its first step, if all have."""
    times = [float(path.read_text() or 0) for path in folder.glob("begun*")]
    return max(times) if len(times) == ranks else None


def end_processes(launch: subprocess.Popen, folder: Path) -> None:
    """End what is left of a launch: its ranks by the numbers that they wrote down."""
    for path in folder.glob("process*"):
        number = path.read_text()
        command = Path(f"/proc/{number}/cmdline")
        if number and command.is_file() and str(folder).encode() in command.read_bytes():
            os.kill(int(number), signal.SIGKILL)
    if launch.poll() is None:
        os.killpg(launch.pid, signal.SIGKILL)
    launch.wait()


def run(case: misuse_cases.Case, choices: list[int]) -> misuse_cases.Outcome:
    """Launch a case, wait for its end, and return how it ended."""
    with tempfile.TemporaryDirectory(prefix="misuse") as name:
        folder = Path(name)
        hosts = ["-np", str(case.ranks), "-H", f"localhost:{case.ranks}", "--gloo"]
        numbers = [str(case.seed), ",".join(map(str, choices)), name]
        paths = [str(ROOT), str(WORKER.parent), os.environ.get("PYTHONPATH", "")]
        with (folder / "output").open("wb") as output:
            launch = subprocess.Popen(
                ["horovodrun", *hosts, sys.executable, str(WORKER), *numbers],
                env={**os.environ, "PYTHONPATH": ":".join(paths)},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        start = time.time()
        while launch.poll() is None:
            begun = begun_at(folder, case.ranks)
            if time.time() > (start + START_SECONDS if begun is None else begun + LIMIT_SECONDS):
                break
            time.sleep(0.2)
        status = launch.poll()
        seconds = time.time() - (begun_at(folder, case.ranks) or start)
        end_processes(launch, folder)
        ended = {int(path.name[5:]): path.read_text() for path in folder.glob("ended*")}
        said = (folder / "output").read_text(errors="replace")
        return misuse_cases.Outcome(status, said, ended, seconds)


def print_table(rows: list[dict]) -> None:
    """Print, for each misuse, how many cases ended how."""
    from rich.console import Console
    from rich.table import Table

    verdicts = [*RIGHT, *sorted({row["verdict"] for row in rows} - set(RIGHT))]
    table = Table("misuse", *verdicts, "longest, s")
    for misuse in misuse_cases.MISUSES:
        mine = [row for row in rows if row["case"]["misuse"] == misuse]
        if mine:
            counts = collections.Counter(row["verdict"] for row in mine)
            longest = max(row["seconds"] for row in mine)
            cells = [str(counts[verdict] or "") for verdict in verdicts]
            table.add_row(misuse, *cells, f"{longest:.0f}")
    Console(width=130).print(table)


def main() -> int:
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("--minutes", type=float, default=60.0, help="begin no case after these")
    options.add_argument(
        "--seed", type=int, default=1, help="of the first case; then one more each"
    )
    options.add_argument("--only", type=int, nargs="+", help="these seeds, with their output")
    options.add_argument("--ranks", type=int, nargs="+", default=[2, 4], help="numbers of ranks")
    options.add_argument("--json", type=Path, help="write one object a case to this file")
    chosen = options.parse_args()
    rows: list[dict] = []
    end, seed = time.monotonic() + 60 * chosen.minutes, chosen.seed
    seeds = iter(chosen.only or [])
    while chosen.only or time.monotonic() < end:
        if chosen.only:
            seed = next(seeds, None)
            if seed is None:
                break
        case = misuse_cases.draw(seed, chosen.ranks)
        outcome = run(case, chosen.ranks)
        verdict, said = misuse_cases.judge(case, outcome)
        rows.append(
            {
                "seed": seed,
                "verdict": verdict,
                "seconds": round(outcome.seconds, 1),
                "said": said,
                "case": misuse_cases.as_words(case),
            }
        )
        if chosen.only:
            print(outcome.output)
        print(f"{seed}: {case.ranks} ranks, {case.misuse}: {verdict}. {said[:200]}", flush=True)
        if chosen.json:
            with chosen.json.open("a" if len(rows) > 1 else "w") as file:
                file.write(json.dumps(rows[-1]) + "\n")
        seed += 1
    print_table(rows)
    return int(any(row["verdict"] not in RIGHT for row in rows))


if __name__ == "__main__":
    sys.exit(main())

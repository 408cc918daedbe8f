#!/usr/bin/env python3
"""Claim: a training continues after every loss, from the memory of the remaining nodes.

    python scripts/trials/losses.py                              # the table; needs root
    python scripts/trials/losses.py --setups hitopk --faults kill cut --record losses
    python scripts/trials/losses.py --minutes 60 --seed 1        # a fault every two minutes or so

On a virtual cluster, node0 has the supervisor and the other nodes the ranks. `tfcommx run` trains
with a snapshot every 20 steps of .1 s; when a generation has taken 50 steps it meets a fault:

    kill        SIGKILL to a rank
    node        a node loses power: its processes and its memory are gone, and it does not answer
    cut         a node's cable is pulled
    stop        SIGSTOP to a rank
    term        SIGTERM to a rank: its node leaves
    memory      the files of the newest snapshot are damaged on one node, then a rank is killed
    full        /dev/shm is filled; 40 steps later a rank is killed

A setup (losses_setups.py) defines a training and its nodes. `horovod` is Horovod's own elastic
mode, which commits every 20 steps; its discovery script stops naming a lost node.

Seconds of the table:

    cold start  from the start of the first generation to its first step
    detected    from the fault until the ranks have ended, and the supervisor has reported it; with
                Horovod, until a rank has raised the error
    next step   from the fault to the first step that counts
    more        next step - detected - cold start: the time of the recovery itself

`repeated` are steps that were taken twice. `same bits`: the weights at the end are those of a run
without a fault, where the number of ranks has not changed. A long run: losses_hour.py.

`--record` replaces the rows that were measured; others of that record stay. Each has its commit and
the machine's load before it: on a busy one a cold start takes minutes.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts"))
import losses_hour  # noqa: E402
from bench import records, virtual_cluster  # noqa: E402
from losses_runs import AWAY, FAULTS, SAME_RANKS, Length, Run  # noqa: E402
from losses_setups import SETUPS, STEPS_BEFORE, WAIT_SECONDS, left, undisturbed  # noqa: E402

LENGTH = Length(epochs=4)


def single(
    cluster: str, name: str, fault: str, folder: Path, reference: str | None
) -> dict[str, Any]:
    """Let a run meet one fault; return its row of the table.

    Args:
        cluster: name of one that is up.
        name: of the setup.
        fault: one of FAULTS.
        folder: of this run.
        reference: hash of the weights without a fault; None: not known.
    """
    setup = SETUPS[name]
    run = Run(cluster, folder, setup, LENGTH, own_memory=fault == "full")
    row: dict[str, Any] = {"name": f"{name}, {fault}", "setup": name, "fault": fault}
    row |= {"nodes": setup.nodes, "ranks": setup.ranks, "went_on": False}
    if not run.wait_for(0, STEPS_BEFORE):
        return row | {"status": run.end(0)}
    row["cold_start"] = run.steps(0)[0][0] - run.began
    met = run.meet(fault, setup.nodes)
    went_on = run.wait_for(1, 1, WAIT_SECONDS)
    row["status"] = run.end() if went_on else run.end(0)
    if fault in AWAY:
        virtual_cluster.call(cluster, "heal", setup.nodes)
    noticed = run.noticed(met)
    # horovodrun may end with an error though all that is left has been trained
    if not went_on or noticed is None or (row["status"] and not setup.horovod):
        return row
    first, last, end = run.steps(1)[0], run.steps(0)[-1], run.newest_generation()
    row |= {
        "went_on": True,
        "detected": noticed - met,
        "next_step": first[0] - met,
        "repeated": max(0, last[1] + 1 - first[1]),
        "ranks_after": run.steps(end)[-1][2],
    }
    if not setup.horovod:
        row["more"] = first[0] - noticed - row["cold_start"]
        table = json.loads((folder / "generations.json").read_text())["generations"]
        row["source"] = table[1]["resumed"]["source"]
    weights = run.weights(row["ranks_after"])
    row["replicas_equal"] = bool(weights)
    row["same_bits"] = weights == reference if reference and fault in SAME_RANKS else None
    return row


COLUMNS = ("cold_start", "detected", "next_step", "more")
HEADS = ("repeated", "source", "ranks", "same bits")


def line(row: dict[str, Any]) -> str:
    """Return a row of the table as text."""
    seconds = " ".join(f"{row[one]:10.1f}" if one in row else " " * 10 for one in COLUMNS)
    rest = (row.get(one, "") for one in ("repeated", "source", "ranks_after", "same_bits"))
    return f"{row['name']:24}{'yes' if row['went_on'] else 'NO':8}{seconds}  " + "  ".join(
        f"{one!s:>8}" for one in rest
    )


def failed(row: dict[str, Any]) -> bool:
    """Return True if a row contradicts the claim, which says nothing of Horovod after a fault."""
    if SETUPS[row["setup"]].horovod:
        return "cold_start" not in row
    return not row["went_on"] or not row["replicas_equal"] or row["same_bits"] is False


def measure(
    name: str, faults: Sequence[str], folder: Path
) -> tuple[list[dict[str, Any]], list[str]]:
    """Measure a setup; return its rows, and the processes and files left on the machine."""
    setup, rows = SETUPS[name], []
    with virtual_cluster.made(setup.nodes + 1, setup.slots, "500mbit") as cluster:
        reference = None
        if not setup.horovod and set(faults) & set(SAME_RANKS):
            reference = undisturbed(cluster, setup, LENGTH, folder / "undisturbed")
        for fault in faults:
            load = round(os.getloadavg()[0], 1)
            rows.append(single(cluster, name, fault, folder / fault, reference))
            print(line(rows[-1]), flush=True)
            rows[-1] |= {"load": load, "commit": records.commit()}
        # Horovod's remaining processes end with the cluster
        return rows, [] if setup.horovod else left(folder)


def record(name: str, rows: list[dict[str, Any]], command: str) -> None:
    """Write rows into a record; its rows that were not measured again stay."""
    path = records.FOLDER / f"{name}.json"
    before = json.loads(path.read_text())["rows"] if path.exists() else []
    found = {row["name"]: row for row in [*before, *rows]}
    order = [f"{setup}, {fault}" for setup in SETUPS for fault in FAULTS]
    kept = {one: found[one] for one in [*order, *found] if one in found}.values()
    # Columns that a row lacks are null
    columns = dict.fromkeys(column for row in kept for column in row)
    records.write(name, [columns | row for row in kept], command)


def main() -> int:
    """Run the chosen setups; return 1 if a training did not continue."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--setups", nargs="+", choices=SETUPS, default=list(SETUPS), metavar="NAME")
    parser.add_argument("--faults", nargs="+", choices=FAULTS, help="in place of the setup's")
    parser.add_argument("--minutes", type=float, help="a long run in place of the table")
    parser.add_argument("--seed", type=int, default=0, help="of a long run's faults")
    records.add_option(parser)
    chosen = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="tfcommx_losses"))
    print(f"Files and messages of the runs are in {folder} until all has gone well.")
    status = losses_hour.measure(folder, chosen) if chosen.minutes else measure_all(folder, chosen)
    if status == 0:
        shutil.rmtree(folder)
    return status


def measure_all(folder: Path, chosen: argparse.Namespace) -> int:
    """Measure the table; return 1 if a training did not continue, or has left something."""
    print(f"{'setup, fault':24}{'resumed':8}", *(f"{one:>10}" for one in COLUMNS), " ", *HEADS)
    rows, stays = [], []
    for name in chosen.setups:
        faults = chosen.faults or SETUPS[name].faults
        found, remains = measure(name, faults, folder / name.replace(" ", "_"))
        rows += found
        stays += remains
    print(f"left on the machine: {stays or 'nothing'}")
    if chosen.record:
        record(chosen.record, rows, "python scripts/trials/losses.py")
    return int(any(map(failed, rows)) or bool(stays))


if __name__ == "__main__":
    sys.exit(main())

"""A long run of losses.py: faults at random times, drawn by a seed.

The run meets a fault every two minutes of training in the mean, and a node that was lost comes back
after one. Then three seeds are trained without a fault on as many samples, as fast as they can be.
Columns:

    goodput            share of all seconds that were spent on steps that count
    predicted          the same, if each fault had cost as much as in the table of single faults:
                       next step + repeated steps, and a planned restart for a node that comes back
    predicted here     with this run's own first cold start in place of the table's
    accuracy           at the end, beside that of the seeds
    left               processes, ports and memory files that stay on the machine
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import statistics
import subprocess
import time
from pathlib import Path
from typing import Any

from bench import records, virtual_cluster
from losses_runs import AWAY, Length, Run, Setup
from losses_setups import SETUPS, STEPS_BEFORE, WAIT_SECONDS, left, undisturbed

MEAN_SECONDS, LEAST_SECONDS, AWAY_SECONDS = 120.0, 20.0, 60.0
# Minimum time of a step
STEP_SECONDS = 0.3
STEPS_OF_EPOCH, BATCH = 40, 32
# Without `full`, because its private /dev/shm could not be inspected after the run
FAULTS = ("kill", "node", "cut", "stop", "term", "memory")
SEEDS = (1, 2, 3)
SETUP = "hitopk"


def single_faults() -> dict[str, dict[str, Any]]:
    """Return the row of each fault in the record of single faults. **Raises:** SystemExit."""
    path = records.FOLDER / "losses.json"
    rows = json.loads(path.read_text())["rows"] if path.exists() else []
    by = {row["fault"]: row for row in rows if row["setup"] == SETUP and row["went_on"]}
    if missing := [fault for fault in FAULTS if fault not in by]:
        raise SystemExit(
            f"{path} must have a row of each fault that {SETUP!r} survives. It lacks "
            f"{', '.join(missing)}. Write it: python scripts/trials/losses.py --setups {SETUP} "
            "--record losses"
        )
    return by


def costs(by: dict[str, dict[str, Any]], cold_start: float | None = None) -> dict[str, float]:
    """Return the seconds that each fault costs.

    Args:
        by: the rows of single faults.
        cold_start: in place of the ones that were measured there; None: those.
    """

    def restart(fault: str) -> float:
        more = 0.0 if cold_start is None else cold_start - by[fault]["cold_start"]
        return float(by[fault]["next_step"] + more)

    found = {fault: restart(fault) + by[fault]["repeated"] * STEP_SECONDS for fault in FAULTS}
    for fault in (*AWAY, "term"):  # The host joins again
        found[fault] += restart("term")
    return found


def disturb(run: Run, setup: Setup, minutes: float, seed: int) -> list[str]:
    """Let a run meet faults until the minutes are over, and wait for its end; return the faults."""
    draw, met, away = random.Random(seed), [], {}
    over = time.monotonic() + minutes * 60

    def pause(seconds: float) -> None:
        """Wait; nodes come back meanwhile."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and run.process.poll() is None:
            time.sleep(0.5)
            for node in [node for node, back in away.items() if time.monotonic() >= back]:
                virtual_cluster.call(run.cluster, "heal", node)
                del away[node]

    while run.process.poll() is None and time.monotonic() < over:
        generation = run.newest_generation()
        if len(run.steps(generation)) < STEPS_BEFORE / 2:
            pause(1)
            continue
        pause(max(LEAST_SECONDS, draw.expovariate(1 / MEAN_SECONDS)))
        if time.monotonic() > over or generation != run.newest_generation():
            continue
        fault = draw.choice(FAULTS)
        node = draw.choice([one for one in range(1, setup.nodes + 1) if one not in away])
        try:
            run.meet(fault, node)
        except (ValueError, ProcessLookupError):  # No rank exists at the moment
            continue
        if fault in AWAY:
            away[node] = time.monotonic() + AWAY_SECONDS
        met.append(fault)
        print(f"{(time.time() - run.began) / 60:5.1f} min  {fault} on node{node}", flush=True)
        deadline = time.monotonic() + WAIT_SECONDS
        while run.newest_generation() == generation and time.monotonic() < deadline:
            pause(0.5)
    step = run.steps(run.newest_generation())[-1][1]
    (run.folder / "last_epoch").write_text(str(step // STEPS_OF_EPOCH + 2))
    while run.process.poll() is None and time.monotonic() < over + 600:
        pause(0.5)
    for node in away:
        virtual_cluster.call(run.cluster, "heal", node)
    return met


def scores(folder: Path) -> list[tuple[int, float]]:
    """Return epochs and accuracy after them."""
    lines = [line.split() for line in (folder / "scores").read_text().splitlines()]
    return [(int(epochs), float(accuracy)) for epochs, _, accuracy in lines]


def steps_that_count(run: Run) -> tuple[dict[int, int], float]:
    """Return the ranks that took each step, the last time it was taken, and seconds of a step."""
    counted: dict[int, int] = {}
    times = []
    for generation in range(run.newest_generation() + 1):
        taken = run.steps(generation)
        counted |= {step: ranks for _, step, ranks in taken}
        times += [after[0] - before[0] for before, after in itertools.pairwise(taken)]
    return counted, statistics.median(times)


def samples(run: Run) -> int:
    """Return how many samples have been trained in the steps that count."""
    return sum(steps_that_count(run)[0].values()) * BATCH


def ports(cluster: str, nodes: int) -> set[str]:
    """Return the ports on which any process listens, of all nodes."""
    found = set()
    for node in range(nodes + 1):
        space = virtual_cluster.space(cluster, node)
        command = ["ip", "netns", "exec", space, "cat", "/proc/net/tcp"]
        shown = subprocess.run(command, text=True, capture_output=True, check=True).stdout
        rows = [line.split() for line in shown.splitlines()[1:]]
        found |= {f"node{node} {row[1]}" for row in rows if row[3] == "0A"}
    return found


def measure(folder: Path, chosen: argparse.Namespace) -> int:
    """Carry out a long run; return 1 if it is against the claim.

    Args:
        folder: for all runs.
        chosen: minutes, seed and record, as losses.py was given them.
    """
    # Before the training of an hour, whose report needs them
    setup, by = SETUPS[SETUP], single_faults()
    epochs = round(chosen.minutes * 60 / STEPS_OF_EPOCH / STEP_SECONDS) + 1
    with virtual_cluster.made(setup.nodes + 1, setup.slots, "500mbit") as cluster:
        before = ports(cluster, setup.nodes)
        run = Run(cluster, folder / "long", setup, Length(epochs, STEP_SECONDS, SEEDS[0]))
        met = disturb(run, setup, chosen.minutes, chosen.seed)
        status = run.end(60)
        stays = [*left(folder), *(ports(cluster, setup.nodes) - before)]
        as_many = round(samples(run) / BATCH / STEPS_OF_EPOCH / setup.ranks)
        for seed in SEEDS:
            place = folder / f"seed{seed}"
            undisturbed(cluster, setup, Length(as_many, 0.0, seed), place)
            print(f"seed {seed} without a fault: {scores(place)[-1]}", flush=True)
    row = report(run, met, [scores(folder / f"seed{seed}") for seed in SEEDS], by)
    row |= {"status": status, "left": stays, "seed": chosen.seed}
    print(json.dumps(row, indent=1))
    if chosen.record:
        command = "python scripts/trials/losses.py --minutes"
        records.write(chosen.record, [row], f"{command} {chosen.minutes:g} --seed {chosen.seed}")
    return int(bool(status or stays) or not row["replicas_equal"])


def report(
    run: Run,
    met: list[str],
    seeds: list[list[tuple[int, float]]],
    by: dict[str, dict[str, Any]],
) -> dict[str, Any]:
    """Return the results of a run.

    Args:
        run: that has ended.
        met: its faults.
        seeds: scores without a fault, of each seed.
        by: the rows of single faults.
    """
    path = run.folder / "generations.json"
    found = json.loads(path.read_text())
    last = found["generations"][-1]
    counted, step = steps_that_count(run)
    seconds = found["goodput"]["seconds"]
    cold = found["generations"][0]["first_step"]
    beside = [one[-1][1] for one in seeds]

    def predicted(cost: dict[str, float]) -> float:
        return float(1 - (cold + sum(cost[fault] for fault in met)) / seconds)

    return {
        "name": "long run",
        "minutes": round(seconds / 60, 1),
        "faults": len(met),
        **{fault: met.count(fault) for fault in FAULTS},
        "generations": len(found["generations"]),
        "replicas_equal": bool(run.weights(last["ranks"])),
        "steps": found["goodput"]["steps"],
        "steps_taken": found["goodput"]["steps_taken"],
        "step_seconds": step,
        "goodput": len(counted) * step / seconds,
        "predicted": predicted(costs(by)),
        "predicted_here": predicted(costs(by, cold)),
        "samples": samples(run),
        "accuracy": scores(run.folder)[-1][1],
        "accuracy_least": min(beside),
        "accuracy_most": max(beside),
        "accuracy_seeds": beside,
    }

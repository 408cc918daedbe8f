#!/usr/bin/env python3
"""Claim: a training goes on after every loss, from the memory of what is left.

    python scripts/trials/losses.py                              # each fault once; needs root
    python scripts/trials/losses.py --only kill cut --record losses
    python scripts/trials/losses.py --minutes 60 --seed 1        # a fault every two minutes or so

On a virtual cluster, node0 has the supervisor and the other nodes the ranks, one each. `tfcommx
run` trains losses_worker.py with a snapshot every 20 steps; when a generation has taken 50 steps it
meets a fault:

    kill        SIGKILL to a rank
    node        a node loses power: its processes and its memory are gone, and it does not answer
    cut         a node's cable is pulled
    stop        SIGSTOP to a rank
    term        SIGTERM to a rank: its node leaves
    memory      the files of the newest snapshot are damaged on one node, then a rank is killed

Seconds of the table:

    cold start  from the start of the first generation to its first step
    detected    from the fault until the ranks have ended, and the supervisor has said so
    next step   from the fault to the first step that counts
    more        next step - detected - cold start: what the recovery itself costs

`repeated` are steps that were taken twice. `same bits`: the weights at the end are those of a run
without a fault, where the number of ranks has not changed. Of a long run: goodput, accuracy beside
that of undisturbed runs with as many samples, and what was left on the machine.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts"))

from bench import records  # noqa: E402

CLUSTER = str(ROOT / "scripts" / "cluster")
WORKER = str(Path(__file__).with_name("losses_worker.py"))
NAME = "losses"
FAULTS = ("kill", "node", "cut", "stop", "term", "memory")
# After them as many ranks go on as before
SAME_RANKS = ("kill", "stop", "memory")
STEPS_BEFORE = 50
EPOCHS = 4
MEAN_SECONDS = 120.0
MEMORY = Path("/dev/shm")


def cluster(*words: object) -> None:
    """Carry out a verb of scripts/cluster."""
    subprocess.run([CLUSTER, "--name", NAME, *map(str, words)], check=True, capture_output=True)


class Run:
    """One supervised run on the nodes after the first.

    Args:
        folder: for what ranks and supervisor write.
        nodes: that have ranks.
        setup: of losses_worker.py.
        epochs: that it trains.
    """

    def __init__(self, folder: Path, nodes: int, setup: str, epochs: int) -> None:
        self.folder, self.nodes = folder, nodes
        folder.mkdir(parents=True, exist_ok=True)
        hosts = ",".join(f"node{node}:1" for node in range(1, nodes + 1))
        words = [
            *("tfcommx", "run", "-H", hosts, "--min-np", "2", "--network-interfaces", "eth0"),
            # A node that is lost in a long run comes back
            *("--blacklist-cooldown-range", "60", "60"),
            *("--generations", str(folder / "generations.json"), "--grow-every", "1"),
            *("--", "python", WORKER, str(folder), setup, str(epochs)),
        ]
        environment = {
            **os.environ,
            "PATH": f"/run/tfcommx-{NAME}:{Path(sys.executable).parent}:{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT),
            "TF_CPP_MIN_LOG_LEVEL": "2",
        }
        self.began = time.time()
        self.process = subprocess.Popen(
            [CLUSTER, "--name", NAME, "run", "--node", "0", "--", *words],
            env=environment,
            text=True,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        # When the supervisor has said what
        self.said: list[tuple[float, str]] = []
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        assert self.process.stderr
        with (self.folder / "stderr").open("a") as log:
            for line in self.process.stderr:
                log.write(line)
                log.flush()
                if line.startswith("tfcommx: "):
                    self.said.append((time.time(), line.strip()))

    def steps(self, generation: int) -> list[tuple[float, int]]:
        """Return when rank 0 of a generation has taken which step."""
        path = self.folder / f"steps-{generation}"
        lines = path.read_text().splitlines() if path.exists() else []
        return [(float(when), int(step)) for when, step in map(str.split, lines)]

    def newest_generation(self) -> int:
        return max((int(path.name[6:]) for path in self.folder.glob("steps-*")), default=-1)

    def wait_for(self, generation: int, steps: int, seconds: float = 300) -> bool:
        """Wait until a generation has taken so many steps; return whether it has."""
        deadline = time.monotonic() + seconds
        while len(self.steps(generation)) < steps:
            if self.process.poll() is not None or time.monotonic() > deadline:
                return False
            time.sleep(0.05)
        return True

    def rank_on(self, node: int) -> int:
        """Return the process of the rank on a node."""
        space = f"tfcommx-{NAME}-{node}"
        pids = subprocess.run(["ip", "netns", "pids", space], text=True, capture_output=True)
        own = {int(path.read_text()) for path in self.folder.glob("pid-*")}
        (found,) = own & set(map(int, pids.stdout.split()))
        return found

    def memory_of(self, node: int) -> list[Path]:
        return [one for one in MEMORY.glob(f"tfcommx-*-node{node}") if one.is_dir()]

    def meet(self, fault: str, node: int) -> None:
        """Let a node meet a fault."""
        if fault in ("kill", "stop", "term", "memory"):
            if fault == "memory":
                for folder in self.memory_of(node % self.nodes + 1):
                    newest = max(folder.rglob("residuals-*.npz"), key=lambda one: one.name)
                    newest.write_bytes(newest.read_bytes()[:-100])
            kind = {"stop": signal.SIGSTOP, "term": signal.SIGTERM}.get(fault, signal.SIGKILL)
            os.kill(self.rank_on(node), kind)
        elif fault == "cut":
            cluster("cut", node)
        else:
            cluster("kill", node)
            for folder in self.memory_of(node):
                shutil.rmtree(folder)

    def end(self) -> int:
        """Wait for the end; return the exit status."""
        try:
            return self.process.wait(600)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGTERM)
            self.process.wait(60)
            return 124

    def weights(self, ranks: int) -> str:
        """Return the hash of the weights; empty if the ranks differ."""
        found = {(self.folder / f"weights-{rank}").read_text() for rank in range(ranks)}
        return found.pop() if len(found) == 1 else ""


def single(fault: str, nodes: int, setup: str, folder: Path, reference: str) -> dict[str, Any]:
    """Let a run meet one fault; return its row of the table."""
    run = Run(folder, nodes, setup, EPOCHS)
    row: dict[str, Any] = {"name": fault, "setup": setup, "nodes": nodes, "went_on": False}
    if not run.wait_for(0, STEPS_BEFORE):
        return row | {"status": run.end()}
    row["cold_start"] = run.steps(0)[0][0] - run.began
    met = time.time()
    run.meet(fault, nodes)
    went_on = run.wait_for(1, 1)
    status = run.end()
    if fault in ("cut", "node"):
        cluster("heal", nodes)
    row["status"] = status
    if not went_on or status:
        return row
    ended = next(when for when, line in run.said if when >= met)
    first, last = run.steps(1)[0], run.steps(0)[-1]
    row |= {
        "went_on": True,
        "detected": ended - met,
        "next_step": first[0] - met,
        "more": first[0] - ended - row["cold_start"],
        "repeated": max(0, last[1] + 1 - first[1]),
    }
    table = json.loads((folder / "generations.json").read_text())["generations"]
    row["source"], row["ranks_after"] = table[1]["resumed"]["source"], table[-1]["ranks"]
    weights = run.weights(row["ranks_after"])
    row["replicas_equal"] = bool(weights)
    row["same_bits"] = weights == reference if fault in SAME_RANKS else None
    return row


def undisturbed(nodes: int, setup: str, epochs: int, folder: Path) -> tuple[str, list[float]]:
    """Return weights and scores of a run without a fault."""
    run = Run(folder, nodes, setup, epochs)
    if run.end():
        sys.exit(f"The run without a fault has failed: see {folder / 'stderr'}")
    return run.weights(nodes), [float(word) for word in (folder / "scores").read_text().split()]


def long_run(minutes: float, seed: int, nodes: int, setup: str, folder: Path) -> dict[str, Any]:
    """Let a run meet faults until its time is over; return what became of it."""
    draw = random.Random(seed)
    # Steps take .1 s; what restarts cost comes on top
    epochs = max(1, round(minutes * 60 / 2 / 4.5))
    run, met, away = Run(folder, nodes, setup, epochs), [], {}
    while run.process.poll() is None:
        deadline = time.monotonic() + max(20.0, draw.expovariate(1 / MEAN_SECONDS))
        while time.monotonic() < deadline and run.process.poll() is None:
            time.sleep(0.5)
            for node in [node for node, back in away.items() if time.monotonic() >= back]:
                cluster("heal", node)
                del away[node]
        generation = run.newest_generation()
        if not run.wait_for(generation, 25, 120) or run.process.poll() is not None:
            continue
        fault = draw.choice(FAULTS)
        node = draw.choice([one for one in range(1, nodes + 1) if one not in away])
        try:
            run.meet(fault, node)
        except (ValueError, ProcessLookupError):  # No rank is there just now
            continue
        if fault in ("cut", "node"):
            away[node] = time.monotonic() + 60
        met.append(fault)
        print(f"{(time.time() - run.began) / 60:5.1f} min  {fault} on node{node}", flush=True)
        while run.newest_generation() == generation and run.process.poll() is None:
            time.sleep(0.5)
    status = run.end()
    for node in away:
        cluster("heal", node)
    found = json.loads((folder / "generations.json").read_text())
    return {
        "minutes": round((time.time() - run.began) / 60, 1),
        "status": status,
        "faults": {fault: met.count(fault) for fault in FAULTS},
        "generations": len(found["generations"]),
        "replicas_equal": bool(run.weights(found["generations"][-1]["ranks"])),
        "epochs": epochs,
        "scores": [float(word) for word in (folder / "scores").read_text().split()],
        **found["goodput"],
    }


def left(folder: Path) -> list[str]:
    """Return the processes and memory files that runs have left."""
    shown = subprocess.run(["pgrep", "-f", str(folder)], text=True, capture_output=True).stdout
    return [*shown.split(), *(str(one) for one in MEMORY.glob("tfcommx-*-node*"))]


COLUMNS = ("cold_start", "detected", "next_step", "more")


def line(row: dict[str, Any]) -> str:
    """Return a row of the table as text."""
    seconds = " ".join(f"{row[one]:10.1f}" if one in row else " " * 10 for one in COLUMNS)
    rest = (row.get(one, "") for one in ("repeated", "source", "ranks_after", "same_bits"))
    return f"{row['name']:8}{'yes' if row['went_on'] else 'NO':8}{seconds}  " + "  ".join(
        f"{one!s:>8}" for one in rest
    )


def main() -> int:
    """Run what is asked for; return 1 if something did not go on."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", choices=FAULTS, default=FAULTS, help="these faults")
    parser.add_argument("--nodes", type=int, default=4, help="that have a rank (default: 4)")
    parser.add_argument("--setup", default="hitopk", help="of losses_worker.py")
    parser.add_argument("--minutes", type=float, help="a long run in place of the table")
    parser.add_argument("--seed", type=int, default=0, help="of a long run's faults")
    parser.add_argument("--record", metavar="NAME", help="write docs/records/NAME.json")
    chosen = parser.parse_args()
    cluster("up", "--nodes", chosen.nodes + 1, "--rate", "500mbit")
    folder = Path(tempfile.mkdtemp(prefix="tfcommx_losses"))
    place = (chosen.nodes, chosen.setup)
    try:
        if chosen.minutes:
            found = [long_run(chosen.minutes, chosen.seed, *place, folder / "long")]
            print(json.dumps(found[0], indent=1))
            failed = bool(found[0]["status"]) or not found[0]["replicas_equal"]
        else:
            reference, _ = undisturbed(*place, EPOCHS, folder / "undisturbed")
            heads = ("repeated", "source", "ranks", "same bits")
            print(f"{'fault':8}{'went on':8}", *(f"{one:>10}" for one in COLUMNS), " ", *heads)
            found = []
            for fault in chosen.only:
                found.append(single(fault, *place, folder / fault, reference))
                print(line(found[-1]), flush=True)
            failed = not all(
                one["went_on"] and one["replicas_equal"] and one["same_bits"] is not False
                for one in found
            )
        stays = left(folder)
        print(f"left on the machine: {stays or 'nothing'}")
    finally:
        cluster("down")
    if chosen.record:
        records.write(chosen.record, found, "python scripts/trials/losses.py")
    return int(failed or bool(stays))


if __name__ == "__main__":
    sys.exit(main())

#!/usr/bin/env python3
"""Claim: with a slow network a step is shorter here than with the usual alternatives.

    python scripts/trials/frameworks.py                          # 4 x 1, 200 Mbit/s; needs root
    python scripts/trials/frameworks.py --only "ddp powersgd/4" --repeats 3

Each trains ResNet-50 at 64 x 64 pixels with SGD on the same virtual cluster, one after the other:
PyTorch's DistributedDataParallel over Gloo (plain, with its hooks for 16 bits and for PowerSGD),
TensorFlow's MultiWorkerMirroredStrategy in a custom training loop, and tfcommx and plain Horovod,
as `scripts/bench training` has them. PyTorch is installed into a separate environment,
build/frameworks, and computes with one thread per rank; TensorFlow has its default number. Columns:

    step            seconds: median over the steps of the slowest rank's time
    to no exchange  over a step of the same framework that exchanges nothing
    MB sent         sent by a node in a step: the count of its network interface, with protocol
                    headers, in the steps that count; for tfcommx and Horovod their own count,
                    without headers

Verified: the ranks' weights are equal in the end; without exchange they differ.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts"))
from bench import environments, records, virtual_cluster  # noqa: E402

FOLDER = Path(__file__).parent
# Name -> the worker and its argument
OTHERS = {
    "ddp none": ("frameworks_torch.py", "none"),
    "ddp": ("frameworks_torch.py", "plain"),
    "ddp fp16": ("frameworks_torch.py", "fp16"),
    "ddp powersgd/4": ("frameworks_torch.py", "powersgd/4"),
    "ddp powersgd/1": ("frameworks_torch.py", "powersgd/1"),
    "multi-worker none": ("frameworks_tensorflow.py", "none"),
    "multi-worker": ("frameworks_tensorflow.py", "ring"),
}
OURS = {
    "tfcommx none": "none",
    "horovod": "horovod",
    "horovod's fp16": "allreduce float16",
    "tfcommx powersgd/4": "allreduce powersgd/4",
    "tfcommx hitopk elias/int4 0.1": "hitopk elias/int4 0.1",
    "tfcommx auto sparse": "auto sparse",
    "tfcommx asa int4": "asa int4",
    "tfcommx momentum asa int1": "momentum asa int1",
}
# First word of a name -> the row without exchange with which it is compared
ALONE = {"ddp": "ddp none", "multi-worker": "multi-worker none"}


def other(name: str, cluster: str, options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Train by another framework, a worker on each node of a cluster; return its row."""
    worker, method = OTHERS[name]
    python = environments.torch_python() if worker == "frameworks_torch.py" else sys.executable
    words = [python, FOLDER / worker, method, options.batch, options.repeats]
    running: list[subprocess.Popen[str]] = []
    logs = [folder / f"{name.replace('/', '_')}-{rank}" for rank in range(options.nodes)]
    for rank, log in enumerate(logs):
        place = {"RANK": rank, "WORLD_SIZE": options.nodes, "GLOO_SOCKET_IFNAME": "eth0"}
        environment = os.environ | {key: str(value) for key, value in place.items()}
        command = virtual_cluster.command(cluster, "run", "--node", rank, "--", *words)
        with log.open("w") as errors:
            running.append(
                subprocess.Popen(
                    command, env=environment, stdout=subprocess.PIPE, stderr=errors, text=True
                )
            )
    # Ranks may wait for ever for one that has failed
    while None in (ended := [one.poll() for one in running]) and not any(ended):
        time.sleep(0.2)
    for rank, status in enumerate(ended):
        if status:
            for one in running:
                one.kill()
            last = logs[rank].read_text()[-2000:]
            sys.exit(f"{name}: rank {rank} ended with status {status}:\n{last}")
    found = [json.loads(one.communicate()[0].splitlines()[-1]) for one in running]
    equal = len({one["weights"] for one in found}) == 1
    slowest = [max(times) for times in zip(*(one["seconds"] for one in found), strict=True)]
    return {
        "name": name,
        "step_seconds": statistics.median(slowest),
        "lowest_seconds": min(slowest),
        "highest_seconds": max(slowest),
        "bytes_sent": statistics.fmean(one["bytes"] for one in found),
        "parameters": found[0]["parameters"],
        "version": found[0]["version"],
        "verified": equal != (method == "none"),
    }


def ours(names: list[str], options: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    """Train by tfcommx and plain Horovod, which take turns; return the rows."""
    path, shape = folder / "ours.jsonl", ("--nodes", str(options.nodes), "--slots", "1")
    command = [sys.executable, str(ROOT / "scripts" / "bench"), "training", *shape]
    command += ["--rates", options.rate, "--models", "resnet50", "--batch", str(options.batch)]
    command += ["--repeats", str(options.repeats), "--json", str(path)]
    # Its status is 1 also if a row is not verified, which is a column here
    subprocess.run([*command, "--schemes", *(OURS[name] for name in names)])
    if not path.exists() or not path.read_text():
        sys.exit("scripts/bench training has measured nothing; its message is above.")
    by = {row["scheme"]: row for row in map(json.loads, path.read_text().splitlines())}
    return [
        {
            "name": name,
            "step_seconds": by[OURS[name]]["step_seconds"],
            "lowest_seconds": by[OURS[name]]["lowest_seconds"],
            "highest_seconds": by[OURS[name]]["highest_seconds"],
            "bytes_sent": by[OURS[name]]["bytes_between"],
            "parameters": by[OURS[name]]["n"],
            "chosen": by[OURS[name]]["chosen"],
            "verified": by[OURS[name]]["verified"],
        }
        for name in names
    ]


def main() -> int:
    """Measure all that was asked for; return 1 if a row is not verified."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", choices=[*OTHERS, *OURS], metavar="NAME")
    parser.add_argument("--nodes", type=int, default=4)
    parser.add_argument("--rate", default="200mbit")
    parser.add_argument("--batch", type=int, default=4, help="of a rank")
    parser.add_argument("--repeats", type=int, default=5, help="steps that count")
    records.add_option(parser)
    options, found = parser.parse_args(), []
    names = options.only or [*OTHERS, *OURS]
    with tempfile.TemporaryDirectory(prefix="tfcommx_frameworks") as folder:
        with virtual_cluster.made(options.nodes, 1, options.rate) as cluster:
            for name in OTHERS:
                if name in names:
                    found.append(other(name, cluster, options, Path(folder)))
                    print(json.dumps(found[-1]), flush=True)
        own = [name for name in OURS if name in names]
        found += ours(own, options, Path(folder)) if own else []
    step = {row["name"]: row["step_seconds"] for row in found}
    for row in found:
        alone = step.get(ALONE.get(row["name"].split()[0], "tfcommx none"))
        row["to_alone"] = row["step_seconds"] / alone if alone else None
    print(json.dumps(found, indent=1))
    if options.record:
        command = records.tidied(["python", *sys.argv])
        note = f"a virtual cluster: {options.nodes} nodes of 1, links of {options.rate} each way"
        records.write(options.record, found, command, note)
    return int(not all(row["verified"] for row in found))


if __name__ == "__main__":
    sys.exit(main())

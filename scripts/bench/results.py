"""Measure the figures of README.md and docs/results.md, one by one, on a quiet machine.

    python scripts/bench results                    # all; needs root and iproute2
    python scripts/bench results --only select step
    python scripts/bench results --missing          # those that have no record yet
    python scripts/bench results --list

Each writes docs/records/NAME.json; `make figures` writes the tables of the pages. Before each the
cores must have been idle for some seconds. The most important ones come first.
"""

from __future__ import annotations

import argparse
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Collection, Sequence
from pathlib import Path

from bench.records import FOLDER, ROOT, commit

# Settings of the same training: their changes to the demo's recipe, whose three phases have 3, 2
# and 6 epochs
SPARSE = "{route: hitopk, selection: mstopk, density: 0.01, dense_route: torus}"
SHORT_ENTRIES = (
    "{route: hitopk, selection: mstopk, density: 0.04, wire: block16/float16, dense_route: torus}"
)
WARM_UP = "warm_up: [0.25, 0.063, 0.015]"
SETTINGS = {
    "demo": [],
    "dense": [f"phases.{number}.scheme={{route: torus}}" for number in (0, 1, 2)],
    "one_percent": [f"phases.{number}.scheme={SPARSE}" for number in (0, 1, 2)],
    "four_percent": [f"phases.{number}.scheme={SHORT_ENTRIES}" for number in (0, 1, 2)],
    "dense_end": [
        *(f"phases.{number}.scheme={SPARSE}" for number in (0, 1)),
        "phases.2.scheme={route: torus}",
        f"phases.0.{WARM_UP.replace(': ', '=', 1)}",
    ],
    "short_dense_end": [
        f"phases=[{{epochs: 3, resolution: 14, {WARM_UP}, scheme: {SPARSE}}}, "
        f"{{epochs: 2, resolution: 20, scheme: {SPARSE}}}, "
        f"{{epochs: 4, resolution: 28, scheme: {SPARSE}}}, "
        "{epochs: 2, resolution: 28, scheme: {route: torus}}]"
    ],
    "float16": [
        f"phases.{number}.scheme={{route: allreduce, wire: float16}}" for number in (0, 1, 2)
    ],
}
SIMULATE = (
    "tfcommx simulate --model resnet50 --batch 64 --throughput 250 --nodes 4 --slots 8 "
    "--sweep between_gbit=1,10,25"
)
COMPARE = (
    "tfcommx compare configs/fashion_mnist.yaml --nodes 2 --slots 2 --model resnet50 --batch 64 "
    "--throughput 250"
)
TRAINING = "python scripts/bench training --nodes 4 --slots 1 --rates 200mbit --models resnet50"


def train(setting: str, seed: int) -> str:
    """Return the command of a training."""
    words = ["tfcommx", "train", "configs/fashion_mnist.yaml", "--processes", "4"]
    changes = [*SETTINGS[setting], *([f"seed={seed}"] if seed else [])]
    for change in changes:
        words += ["--set", change]
    return shlex.join(words)


# Record -> command
COMMANDS = {
    "demo": train("demo", 0),
    "dense": train("dense", 0),
    "one_percent": train("one_percent", 0),
    "four_percent": train("four_percent", 0),
    "dense_end": train("dense_end", 0),
    "training": f"{TRAINING} --batch 4 --repeats 5 --schemes none horovod "
    '"allreduce float16" "auto sparse"',
    "training_densities": f"{TRAINING} --batch 4 --repeats 5 --schemes none "
    + " ".join(
        f'"hitopk block16/float16 {density}"' for density in (0.25, 0.063, 0.05, 0.04, 0.015)
    ),
    "training_short_wire": f"{TRAINING} --batch 4 --repeats 5 --schemes none "
    '"hitopk elias/int4 0.1"',
    "training_gains": f"{TRAINING} --batch 4 --repeats 5 --schemes none horovod "
    '"allreduce float16" "asa int4" "hitopk elias/int4 0.1"',
    "local_updates": "python scripts/bench local_updates --nodes 4 --slots 1 --rates 200mbit",
    **{
        f"training_{nodes}x{slots}": f"python scripts/bench training --nodes {nodes} "
        f"--slots {slots} --rates 50mbit 200mbit 1000mbit --schemes none horovod torus "
        '"hitopk block16/float16" "allgather block16/float16" auto "auto sparse"'
        for nodes, slots in ((4, 1), (4, 2), (8, 1))
    },
    "routes": "python scripts/bench routes --sizes 25000000 --probe "
    "--routes hitopk allgather allreduce torus "
    "--wires plain float16 bfloat16 pair32 block16/float16",
    "step": "python scripts/bench step",
    "select": "python scripts/bench select",
    "data": "python scripts/bench data --sizes 128",
    "predicted_dense": f"{SIMULATE} --scheme allreduce",
    "predicted_sparse": f"{SIMULATE} --scheme hitopk",
    "short_dense_end": train("short_dense_end", 0),
    **{f"{name}_seed1": train(name, 1) for name in SETTINGS if name != "float16"},
    "float16": train("float16", 0),
    "float16_seed1": train("float16", 1),
    "compare_methods": f"{COMPARE} --seeds 1 --methods "
    "dense,float16,one_percent,four_percent,elias_int8,elias_int4,local_sgd",
    "compare_glosses": "cd scripts/examples/glosses; tfcommx compare glosses.yaml --nodes 2 "
    "--slots 2 --model resnet50 --batch 64 --throughput 250 --seeds 3 "
    "--methods dense,elias_int4,powersgd_4",
    "compare_three_seeds": f"{COMPARE} --seeds 3 "
    "--methods dense,elias_int4,elias_int4_early,powersgd_4",
    "compare_translate": "tfcommx compare configs/translate_miniature.yaml --nodes 2 --slots 2 "
    "--model transformer_base --batch 64 --throughput 250 --seeds 3 --methods dense,elias_int4",
    "compare_translate_rate": "tfcommx compare configs/translate_miniature.yaml --nodes 2 "
    "--slots 2 --model transformer_base --batch 64 --throughput 250 "
    "--set learning_rate.peak=0.006 --seeds 2 --methods dense,elias_int4",
    "compare_four_nodes": "tfcommx compare configs/fashion_mnist.yaml --nodes 4 --slots 1 "
    "--model resnet50 --batch 4 --throughput 15 --seeds 3 --methods dense,float16,elias_int4",
    "compare_low_bit": "tfcommx compare configs/fashion_mnist.yaml --nodes 4 --slots 1 "
    "--model resnet50 --batch 4 --throughput 15 --seeds 3 --methods dense,int4,momentum_int2",
    "compare_dawnbench": "tfcommx compare configs/dawnbench_miniature.yaml --nodes 2 --slots 2 "
    "--model resnet50 --batch 64 --throughput 250 --seeds 3 "
    "--methods dense,elias_int4,elias_int4_early",
    "end_to_end_commlib": "python scripts/bench end_to_end --setup commlib --seeds 3 --contestants "
    "none horovod horovod_fp16 asa_int4 elias_int4 momentum_int2 ddp ddp_fp16 ddp_powersgd_4 "
    "--set 'model.filters=[48,64,64]'",
    # These two train as plain Horovod does, so one seed suffices for their time
    "end_to_end_lossless": "python scripts/bench end_to_end --setup commlib --seeds 1 "
    "--contestants horovod auto torus",
    "end_to_end_two_sites": "python scripts/bench end_to_end --setup two_sites --nodes 2 --seeds 3 "
    "--contestants horovod horovod_fp16 elias_int4 momentum_int2 step_ahead streaming_diloco",
    "end_to_end_translate": "python scripts/bench end_to_end --recipe translate --seeds 3 "
    "--score test_accuracy --loss 0.005 --evaluations 2 "
    "--contestants none horovod horovod_fp16 asa_int4 one_bit_adam",
    "scheme_map": "tfcommx machines docs/records/scheme_map.yaml "
    "--map docs/pictures/scheme_map.png",
    "commlib": "python scripts/reproduce/commlib.py",
    "wheels": "python scripts/verify/wheels.py",
    "losses": "python scripts/trials/losses.py",
    "losses_hour": "python scripts/trials/losses.py --minutes 60 --seed 1",
    "snapshots": "python scripts/trials/snapshots.py",
    "changing_network": "python scripts/trials/changing_network.py",
    "versions": "python scripts/verify/versions.py",
    "frameworks": "python scripts/trials/frameworks.py",
    "input_pipelines": "python scripts/trials/input_pipelines.py",
}


def idle_seconds(statistics: str, cores: Collection[int]) -> float:
    """Return the seconds that these cores together have been idle since the start.

    Other cores do not count: a process that may use 2 of 64 would find most of them idle.

    Args:
        statistics: the content of /proc/stat.
        cores: their numbers.
    """
    lines = (line.split() for line in statistics.splitlines())
    wanted = {f"cpu{core}" for core in cores}
    ticks = sum(int(words[4]) + int(words[5]) for words in lines if words and words[0] in wanted)
    return ticks / os.sysconf("SC_CLK_TCK")


def wait_for_quiet(at_most: float = 300.0) -> None:
    """Wait until this process's cores have been idle for 3 s, but for a twentieth."""
    cores, end, file = os.sched_getaffinity(0), time.monotonic() + at_most, Path("/proc/stat")
    while True:
        before, start = idle_seconds(file.read_text(), cores), time.monotonic()
        time.sleep(3)
        idle = idle_seconds(file.read_text(), cores) - before
        share = idle / (time.monotonic() - start) / len(cores)
        if share > 0.95:
            return
        if time.monotonic() > end:
            raise SystemExit(f"Quiet cores are required. They were idle {share:.0%} of 3 s.")


def measure(name: str) -> bool:
    """Carry out a measurement and record it; return whether that went well.

    A comparison continues with the trainings in its folder. The record names this commit, so the
    folder is one of this commit.
    """
    command, results = COMMANDS[name], ROOT / "runs" / "results"
    out = results / name
    results.mkdir(parents=True, exist_ok=True)
    place, _, line = command.rpartition("; ")  # "cd FOLDER" leads to custom modules
    folder, words = ROOT / place.removeprefix("cd "), shlex.split(line)
    if words[1] == "compare":
        words += ["--output", str(results / f"compare-{commit()}" / Path(words[2]).stem)]
    option = {"train": "--output"}
    if words[0] != "tfcommx" and "reproduce" not in words[1]:
        return subprocess.call([*words, "--record", name], cwd=folder) == 0
    record = [sys.executable, "scripts/bench", "record", out, name, "--command", command]
    return not (
        subprocess.call([*words, option.get(words[1], "--json"), out], cwd=folder)
        or subprocess.call([*map(str, record)], cwd=ROOT)
    )


def main(words: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="bench results",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--only", nargs="+", choices=COMMANDS, metavar="NAME", help="these records")
    parser.add_argument("--missing", action="store_true", help="those that have no record yet")
    parser.add_argument("--list", action="store_true", help="print the commands")
    parser.add_argument("--crowded", action="store_true", help="do not wait for quiet cores")
    chosen = parser.parse_args(words)
    names = [
        name
        for name in chosen.only or COMMANDS
        if not (chosen.missing and (FOLDER / f"{name}.json").exists())
    ]
    # Where `python` and `tfcommx` are, also if the environment has not been activated
    os.environ["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    failed = []
    for name in names:
        if chosen.list:
            print(f"{name}: {COMMANDS[name]}")
            continue
        if not chosen.crowded:
            wait_for_quiet()
        start = time.monotonic()
        if not measure(name):
            failed.append(name)
        print(f"{name}: {time.monotonic() - start:.0f} s", flush=True)
    if failed:
        print(f"not measured: {', '.join(failed)}")
    return int(bool(failed))

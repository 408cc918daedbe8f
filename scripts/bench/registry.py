"""The benchmarks by name, with the facts that are needed before TensorFlow is loaded."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import NamedTuple

FOLDER = Path(__file__).with_name("benchmarks")


class Benchmark(NamedTuple):
    """Where a benchmark runs, unless its options say otherwise, and how small it can be."""

    # Options of its smallest run; its places in a smoke run are `ranks` of this host
    smoke: str
    # Ranks of this host; 0: it takes none, and needs no TensorFlow to start
    ranks: int = 0
    # Nodes of a virtual cluster, and ranks of each; 0 nodes: on this host
    nodes: int = 0
    slots: int = 1

    def place(self) -> str:
        """Say where it runs."""
        if self.nodes:
            return f"{self.nodes} nodes of {self.slots}"
        return f"{self.ranks} ranks" if self.ranks > 1 else "one process"


BENCHMARKS = {
    "select": Benchmark("-n 100000 --density 0.01 --repeats 4"),
    "data": Benchmark("--images 130 -n 32 --repeats 3 --firsts 1 --as-found"),
    "step": Benchmark("-n 100000 --repeats 2", ranks=2),
    "auto": Benchmark("-n 4000 --repeats 1 --assume-slow", ranks=2),
    "training": Benchmark(
        "--models embedding --repeats 2 --batch 4 --schemes none horovod", ranks=2, nodes=4
    ),
    "local_updates": Benchmark(
        "--models embedding --repeats 1 --every 2 --ways 1/0 1/2 2/1", ranks=2, nodes=4
    ),
    "routes": Benchmark(
        "-n 8000 --repeats 1 --routes allreduce hitopk --wires plain pair32",
        ranks=2,
        nodes=4,
        slots=2,
    ),
    # Launches ranks itself, training by training
    "end_to_end": Benchmark(
        "--here --nodes 2 --seeds 1 --contestants horovod torus --most-steps 3 "
        "--set phases.0.epochs=1 --anew"
    ),
}


def claim(name: str) -> str:
    """Return the claim in the first line of a benchmark's docstring, without importing its file."""
    text = ast.get_docstring(ast.parse((FOLDER / f"{name}.py").read_text())) or ""
    return text.partition("\n")[0].partition(": ")[2]

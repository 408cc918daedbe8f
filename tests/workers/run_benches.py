"""Run benchmarks one after the other in one launch, each on as little as it takes.

Started by test_benches.py on three ranks: run_benches.py FOLDER
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parent.parent.parent / "scripts"))

import tfcommx.cli.quiet_start

# isort: split
import tensorflow as tf

import tfcommx as cx

SCRIPTS = Path(sys.path[-1])
BENCHES = {
    "bench_auto": "-n 4000 --repeats 1 --assume-slow",
    "bench_guard": "-n 20000 --repeats 3",
    "bench_strategies": "-n 20000 --repeats 1 --forward 0.03",
    "bench_elastic_averaging": "--part 1 --entries 1000 --lasts 2 --slowed 2",
}
tf.config.threading.set_intra_op_parallelism_threads(1)
tf.config.threading.set_inter_op_parallelism_threads(4)
comm = cx.init(node_size=1)
for name, words in BENCHES.items():
    file = Path(sys.argv[1]) / f"{name}.jsonl"
    sys.argv[1:], kept = [*words.split(), "--json", str(file)], sys.argv[1:]
    # The status judges times, which say nothing here
    try:
        runpy.run_path(str(SCRIPTS / f"{name}.py"))["main"]()
    except SystemExit as end:
        assert end.code in (0, 1), end.code
    sys.argv[1:] = kept
    comm.gather_objects(name)

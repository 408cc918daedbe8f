#!/usr/bin/env python3
"""Feed a training from the DataCache, compared with the pipelines that it replaces.

Goals: from the second epoch on, per CPU second, random-resized-crop + flip from the slab is at
least 10 times (128 pixels) and 6 times (224 pixels) as fast as decoding in tf.data, and 4 times as
fast as tf.data's `.cache()` of decoded images with TensorFlow's resize; whole samples are read at
0.7 of memcpy or better; the first epoch takes at most 1.15 of the time of the tf.data pipeline that
fills nothing. docs/laboratory/data_cache.md says what was reached.

    python scripts/bench_data.py                     # generated JPEGs
    python scripts/bench_data.py --folder photos/train --json out.jsonl --png out.png

`n` is the number of pixels on a side. `seconds` is an epoch's: the mean over `--repeats` epochs in
a row, after the first; an iterator goes over all epochs of a pipeline and was made before the clock
starts. (Of `datacache_whole` it is a batch's, 256 whole samples.) First epochs vary by a third, so
`--firsts` of them are made, in turn with the other pipeline's, and medians are compared.
`limit_seconds` and `limit_images_per_second` are what memcpy of the output's bytes would allow on
one core. `tfdata_cache` keeps whole pictures as its users do; `tfdata_cache_same` keeps pictures of
the size that the slab keeps, which is the like for like. Verified in every epoch that is timed:
every sample came once (by label counts); for the cache, all pictures of one batch, chosen anew,
against the plain-TensorFlow twin; for the others, that the mean of such a batch agrees with the
cache's. Options and columns: scripts/benchmark_options.py.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tfcommx.cli.quiet_start

# isort: split
import bench_data_pipelines
import benchmark_options
import numpy as np
import tensorflow as tf
from bench_data_pipelines import BATCH
from bench_data_runs import (
    Run,
    check_with_twin,
    claim_memory,
    memcpy_bytes_per_second,
    whole_samples,
)

import tfcommx as cx
from tfcommx.data.sources import Folder


class Feeding:
    """The runs of one source at one resolution."""

    def __init__(self, source: Folder, resolution: int, chosen: argparse.Namespace) -> None:
        self.source, self.resolution, self.chosen = source, resolution, chosen
        self.store = chosen.store or resolution * 8 // 7
        self.spec = cx.BatchSpec(BATCH, resolution, "random", True, drop_remainder=False)
        labels = [source.label(i) for i in range(source.count)]
        self.wanted = np.bincount(labels, minlength=len(source.classes))

    def cache(self) -> cx.DataCache:
        """Make a cache that is empty."""
        return cx.DataCache(self.source, memory=self.chosen.memory, store=self.store)

    def run(self, name: str, dataset: tf.data.Dataset, repeats: int) -> Run:
        """Run a pipeline, with memory claimed before unless it is to be taken as found."""
        run = Run(name, self.resolution, self.wanted, repeats)
        if not self.chosen.as_found:
            claim_memory(self.chosen.memory)
        run.run(dataset)
        return run

    def first_epochs(self) -> tuple[float, float]:
        """Return wall and CPU time of the cache's first epoch over tfdata_decode's, by medians."""
        found = []
        for _ in range(self.chosen.firsts):
            cache = self.cache()
            plain = bench_data_pipelines.decoding(self.source, self.resolution)
            runs = [
                self.run("first epoch", data, 0) for data in (plain, cache.dataset(self.spec, 0, 1))
            ]
            found.append([(run.wall[0], run.cpu[0]) for run in runs])
            cache.close()
        plain, cached = np.median(found, axis=0)
        return tuple(cached / plain)

    def rows(self, bytes_per_second: float) -> list[dict[str, Any]]:
        """Run and check all pipelines; return their rows.

        Args:
            bytes_per_second: of memcpy.
        """
        cache, repeats = self.cache(), self.chosen.repeats
        fed = bench_data_pipelines.pipelines(self.source, self.resolution, self.store)
        fed["datacache"] = cache.dataset(self.spec, 0, 1 + repeats)
        runs = [self.run(name, dataset, repeats) for name, dataset in fed.items()]
        for kept in runs[-1].kept:
            check_with_twin(cache, self.spec, *kept)
        means = [run.mean() for run in runs]
        assert np.ptp(means) < 0.1, f"the pipelines disagree about the pictures: means {means}"
        assert cache.report(repeats)["hit_memory"] == 1
        cache.close()
        limit = bytes_per_second / (self.resolution * self.resolution * 3 * 4)
        return [run.row(limit) for run in runs]


def why_no_ffcv() -> str:
    """Say why FFCV, another cache, is not measured."""
    try:
        import ffcv
    except ImportError as error:
        return (
            f"It is not installed here ({error}). FFCV 1.0.2 comes as source only, and its build "
            "stops without the C++ headers of OpenCV and libturbojpeg; it also needs PyTorch."
        )
    return f"{ffcv.__file__} is there, but this script has no run of it yet."


def show(rows: Sequence[dict[str, Any]], first: dict[int, tuple[float, float]]) -> None:
    """Print the table, and the ratios that the goals are about.

    Args:
        rows: of all benchmarks, that of whole samples first.
        first: resolution -> wall and CPU time of the first epoch over tfdata_decode's.
    """
    rates = ("images_per_second", "images_per_cpu_second", "limit_images_per_second")
    own = {
        heading: lambda one, rate=rate: f"{one[rate]:,}"
        for heading, rate in zip(
            ("images/s", "images/CPU s", "limit, images/s"), rates, strict=True
        )
    }
    title = "Feeding from memory: random-resized-crop + flip, float32; n = pixels on a side"
    benchmark_options.print_table(rows, title, own=own)
    whole, *pipelines = rows
    for resolution, (wall, cpu) in first.items():
        at = {one["name"]: one[rates[1]] for one in pipelines if one["n"] == resolution}
        cached = at.pop("datacache")
        ratios = ", ".join(f"{cached / other:.1f} times {name}" for name, other in at.items())
        print(
            f"{resolution} pixels, per CPU second: {ratios}; first epoch: {wall:.2f} of "
            f"tfdata_decode's time, {cpu:.2f} of its CPU time"
        )
    print(f"ffcv: no row. {why_no_ffcv()}")
    ours, ours_cpu, limit = (whole[rate] for rate in rates)
    print(
        f"whole samples: {ours / limit:.2f} of memcpy on one core, {ours_cpu / limit:.2f} per CPU "
        "second"
    )


def options() -> argparse.ArgumentParser:
    """Make the parser of the options."""
    parser = benchmark_options.parser(
        __doc__,
        sizes=[128, 224],
        repeats=5,
        meaning_of_sizes="pixels on a side of the pictures that are fed",
        meaning_of_repeats="epochs after the first",
    )
    parser.add_argument("--folder", help="of class folders with JPEGs; default: generated")
    parser.add_argument("--images", type=int, default=1000, help="how many are generated")
    parser.add_argument(
        "--store",
        type=int,
        help="short side kept in memory, pixels; default: 8/7 of the size that is fed",
    )
    parser.add_argument(
        "--firsts",
        type=int,
        default=5,
        help="first epochs of each of the two pipelines that are compared in them",
    )
    parser.add_argument(
        "--as-found",
        action="store_true",
        help="do not first take memory back from the host, see `claim_memory`",
    )
    parser.add_argument("--memory", default="/dev/shm", help="folder of shared memory")
    return parser


def main() -> int:
    chosen = options().parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(chosen.folder or scratch)
        if chosen.folder is None:
            bench_data_pipelines.generate(folder, chosen.images)
        source = Folder(folder)
        copy = memcpy_bytes_per_second()
        # What TensorFlow starts at the first dataset.
        for image in tf.data.Dataset.range(2 * BATCH).map(lambda i: i).batch(BATCH):
            image.numpy()
        rows, first = [whole_samples(chosen.memory)], {}
        for resolution in chosen.sizes:
            feeding = Feeding(source, resolution, chosen)
            first[resolution] = feeding.first_epochs()
            rows += feeding.rows(copy)
    show(rows, first)
    return benchmark_options.finish(rows, chosen, drawn="images_per_cpu_second")


if __name__ == "__main__":
    raise SystemExit(main())

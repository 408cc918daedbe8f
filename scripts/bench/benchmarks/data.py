"""Claim: the DataCache feeds a training faster than the pipelines that it replaces.

Peers: tf.data that decodes each epoch anew, and its `.cache()`. Goals: from the second epoch on,
per CPU second, random-resized-crop + flip from the slab is at least 10 times (128 pixels) and 6
times (224 pixels) as fast as decoding in tf.data, and 4 times as fast as tf.data's `.cache()` of
decoded images with TensorFlow's resize; whole samples are read at 0.7 of memcpy or better; the
first epoch takes at most 1.15 of the time of the tf.data pipeline that fills nothing.
docs/laboratory/data_cache.md has the results.

    python scripts/bench data                        # generated JPEGs
    python scripts/bench data --folder photos/train --json out.jsonl --png out.png

`n` is the number of pixels on a side. `seconds` is an epoch's: the median over `--repeats` rounds,
in which the pipelines take turns; an iterator goes over all epochs of a pipeline. In its turn a
pipeline serves two epochs, and the second is timed: the batches that it begins with were prefetched
in the first, and at its end as many are prefetched for the next. (Of `datacache_whole` `seconds` is
a batch's, 256 whole samples.) First epochs vary by a third, so `--firsts` of them are made, in turn
with the other pipeline's, and medians are compared.
`limit_seconds` and `limit_images_per_second` are the limits by a memcpy of the output's bytes on
one core. `tfdata_cache` keeps whole pictures as its users do; `tfdata_cache_same` keeps pictures of
the slab's size, which is the comparison of like with like. Verified in every epoch that is timed:
every sample came once (by label counts); for the cache, all pictures of one batch, chosen anew,
against the plain-TensorFlow twin; for the others, that the mean of such a batch agrees with the
cache's.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf
from bench import options, rounds
from bench.benchmarks import data_pipelines
from bench.benchmarks.data_pipelines import BATCH
from bench.benchmarks.data_runs import (
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

    def begin(self, name: str, dataset: tf.data.Dataset, repeats: int) -> Run:
        """Run a first epoch, with memory claimed before unless it is to be taken as found."""
        run = Run(name, self.resolution, self.wanted, repeats)
        if not self.chosen.as_found:
            claim_memory(self.chosen.memory)
        run.begin(dataset)
        return run

    def first_epochs(self) -> tuple[float, float]:
        """Return wall and CPU time of the cache's first epoch over tfdata_decode's, by medians."""
        found = []
        for _ in range(self.chosen.firsts):
            cache = self.cache()
            plain = data_pipelines.decoding(self.source, self.resolution)
            runs = [
                self.begin("first epoch", data, 0)
                for data in (plain, cache.dataset(self.spec, 0, 1))
            ]
            found.append([(run.wall[0], run.cpu[0]) for run in runs])
            cache.close()
        plain, cached = np.median(found, axis=0)
        return tuple(cached / plain)

    def rows(self, bytes_per_second: float) -> list[dict[str, Any]]:
        """Run all pipelines in turn, and check them; return their rows.

        Args:
            bytes_per_second: of memcpy.
        """
        cache, repeats = self.cache(), self.chosen.repeats
        fed = data_pipelines.pipelines(self.source, self.resolution, self.store)
        fed["datacache"] = cache.dataset(self.spec, 0, 1 + 2 * repeats)
        runs = [self.begin(name, dataset, repeats) for name, dataset in fed.items()]
        for number in range(repeats):
            for run in rounds.turns(runs, number):
                run.take_turn()
        for kept in runs[-1].kept:
            check_with_twin(cache, self.spec, *kept)
        means = [run.mean() for run in runs]
        assert np.ptp(means) < 0.1, f"the pipelines disagree about the pictures: means {means}"
        assert cache.report(2 * repeats)["hit_memory"] == 1
        cache.close()
        limit = bytes_per_second / (self.resolution * self.resolution * 3 * 4)
        return [run.row(limit) for run in runs]


def parser() -> argparse.ArgumentParser:
    found = options.parser(
        __doc__,
        sizes=[128, 224],
        repeats=5,
        meaning_of_sizes="pixels on a side of the pictures that are fed",
        meaning_of_repeats="epochs after the first",
    )
    found.add_argument("--folder", help="of class folders with JPEGs; default: generated")
    found.add_argument("--images", type=int, default=1000, help="how many are generated")
    found.add_argument(
        "--store",
        type=int,
        help="short side kept in memory, pixels; default: 8/7 of the size that is fed",
    )
    found.add_argument(
        "--firsts",
        type=int,
        default=5,
        help="first epochs of each of the two pipelines that are compared in them",
    )
    found.add_argument(
        "--as-found",
        action="store_true",
        help="do not first take memory back from the host, see `claim_memory`",
    )
    found.add_argument("--memory", default="/dev/shm", help="folder of shared memory")
    return found


def measure(chosen: argparse.Namespace) -> Iterator[options.Table]:
    """Feed from all pipelines at each resolution."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(chosen.folder or scratch)
        if chosen.folder is None:
            data_pipelines.generate(folder, chosen.images)
        source = Folder(folder)
        copy = memcpy_bytes_per_second(2**24 if chosen.smoke else 2**29)
        # The first dataset starts TensorFlow's threads, which are not measured
        for image in tf.data.Dataset.range(2 * BATCH).map(lambda i: i).batch(BATCH):
            image.numpy()
        whole = whole_samples(chosen.memory, 512 if chosen.smoke else 8192)
        yield table("Whole samples", [whole], whole_note(whole))
        for resolution in chosen.sizes:
            feeding = Feeding(source, resolution, chosen)
            first = feeding.first_epochs()
            rows = feeding.rows(copy)
            title = "Feeding from memory: random-resized-crop + flip, float32; n = pixels on a side"
            yield table(title, rows, ratios(rows, *first))


RATES = ("images_per_second", "images_per_cpu_second", "limit_images_per_second")


def table(title: str, rows: list[dict[str, Any]], note: str) -> options.Table:
    """Make a table with the rates; below it, the note with the ratios that the goals refer to."""
    heads = ("images/s", "images/CPU s", "limit, images/s")
    own = {
        head: lambda one, rate=rate: f"{one[rate]:,}"
        for head, rate in zip(heads, RATES, strict=True)
    }
    return options.Table(title, rows, own=own, notes=[note])


def whole_note(row: dict[str, Any]) -> str:
    """Return the rate of reading whole samples as a share of memcpy's, in words."""
    ours, ours_cpu, limit = (row[rate] for rate in RATES)
    return f"{ours / limit:.2f} of memcpy on one core, {ours_cpu / limit:.2f} per CPU second"


def ratios(rows: Sequence[dict[str, Any]], wall: float, cpu: float) -> str:
    """Say how many times as fast as the others the cache is at one resolution.

    Args:
        rows: of all pipelines.
        wall, cpu: times of the first epoch over tfdata_decode's.
    """
    at = {one["name"]: one["images_per_cpu_second"] for one in rows}
    cached = at.pop("datacache")
    times = ", ".join(f"{cached / other:.1f} times {name}" for name, other in at.items())
    return (
        f"per CPU second: {times}; first epoch: {wall:.2f} of tfdata_decode's time, {cpu:.2f} of "
        "its CPU time"
    )


def draw(rows: Sequence[dict[str, Any]], png: Path) -> None:
    """Draw rates, not seconds: epochs of different sizes are compared."""
    options.save_picture(rows, png, "images_per_cpu_second")

"""The measuring loop that the workers of input_pipelines.py share. It needs NumPy alone.

A worker is called as `WORKER.py write|run TASK`, TASK being a `Task` as JSON. `write` packs the
photographs into the pipeline's own format; `run` measures and prints a row as JSON, its last line.
"""

from __future__ import annotations

import contextlib
import json
import resource
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

BATCH, WORKERS, SEED = 64, 2, 0
AREA, ASPECT = (0.08, 1.0), (3 / 4, 4 / 3)
# CPUCLOCK_SCHED of the kernel: the clock of all threads of a process, in nanoseconds
PROCESS_CLOCK = 2

Batch = tuple[np.ndarray, np.ndarray]
# Returns the batches of the next epoch: images [n, ...] float32 in [0, 1], labels [n]
Epoch = Callable[[], Iterable[Batch]]


@dataclass(frozen=True)
class Task:
    """The input of a worker."""

    # Pipeline, one of the worker's
    name: str
    # Folder of class folders with JPEGs; their number is a multiple of BATCH * WORKERS
    photos: str
    # Folder of class folders with the same photographs, decoded and shrunk: [h, w, 3] uint8 in .npy
    pixels: str
    # Folder of the pipeline's own format
    packed: str
    # Pixels on a side of the delivered images, and on the short side of those in `pixels`
    size: int
    store: int
    # Number of epochs, the first one included
    epochs: int

    def files(self, folder: str) -> list[tuple[Path, int]]:
        """Return the files in a folder of class folders, each with its label, in order."""
        classes = sorted(path for path in Path(folder).iterdir() if path.is_dir())
        return [
            (file, label)
            for label, class_folder in enumerate(classes)
            for file in sorted(class_folder.iterdir())
        ]

    def mixed(self, folder: str) -> list[tuple[Path, int]]:
        """Return the files in random order, as one packs them into shards."""
        files = self.files(folder)
        return [files[i] for i in np.random.default_rng(SEED).permutation(len(files))]


def descendants(process: int) -> Iterator[int]:
    """Yield the ids of all processes below a process."""
    for path in Path(f"/proc/{process}/task").glob("*/children"):
        with contextlib.suppress(OSError):  # The thread has ended
            for child in map(int, path.read_text().split()):
                yield child
                yield from descendants(child)


def cpu_seconds() -> float:
    """Return user + system time of this process and of all below it, also of those that ended."""
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    total = time.process_time() + ended.ru_utime + ended.ru_stime
    for process in descendants(int(Path("/proc/self").resolve().name)):
        with contextlib.suppress(OSError):
            total += time.clock_gettime((~process << 3) | PROCESS_CLOCK)
    return total


def cycle(batches: Iterator[Batch], steps: int) -> Epoch:
    """Return the epochs of an endless iterator."""
    return lambda: (next(batches) for _ in range(steps))


def measure(task: Task, read: Callable[[Task], Epoch]) -> dict[str, Any]:
    """Time all epochs of a pipeline and check their batches; return its row.

    The clock of the first epoch starts before the pipeline is made, after its modules are imported.
    """
    labels = [label for _, label in task.files(task.photos)]
    wanted, rng = np.bincount(labels), np.random.default_rng()
    # Memory for one batch of each epoch, written before the clock starts
    checked = np.ones((task.epochs, BATCH, task.size * task.size * 3), np.float32)
    layouts, counts = set(), []
    walls, cpus = [time.perf_counter()], [cpu_seconds()]
    epoch = read(task)
    for turn in range(task.epochs):
        seen, chosen = [], int(rng.integers(len(labels) // BATCH))
        for step, (images, label) in enumerate(epoch()):
            layouts.add((images.dtype.name, *images.shape[1:]))
            seen.append(np.array(label).reshape(-1))
            if step == chosen:
                checked[turn, : len(images)] = images.reshape(len(images), -1)
        walls.append(time.perf_counter())
        cpus.append(cpu_seconds())
        counts.append(np.bincount(np.concatenate(seen), minlength=len(wanted)).tolist())
    first, *rest = zip(np.diff(walls), np.diff(cpus), strict=True)
    ((kind, *shape),) = layouts
    channels_first = shape[0] == 3
    pixels = (
        checked.reshape(-1, 3, task.size**2)
        if channels_first
        else checked.reshape(-1, task.size**2, 3)
    )
    rates = [len(labels) / cpu for _, cpu in rest]
    return {
        "name": task.name,
        "n": task.size,
        "images": len(labels),
        "images_per_cpu_second": round(median(rates)),
        "lowest": round(min(rates)),
        "highest": round(max(rates)),
        "images_per_second": round(len(labels) / median([wall for wall, _ in rest])),
        "first_seconds": round(first[0], 2),
        "first_cpu_seconds": round(first[1], 2),
        "layout": "NCHW" if channels_first else "NHWC",
        "means": pixels.mean((0, 2) if channels_first else (0, 1), np.float64).round(4).tolist(),
        "verified": all(count == wanted.tolist() for count in counts)
        and (kind, sorted(shape)) == ("float32", sorted([3, task.size, task.size]))
        and 0 <= checked.min() < 0.1
        and 0.9 < checked.max() <= 1,
    }


Write = Callable[[Task], None]


def main(
    pipelines: Mapping[str, tuple[Write | None, Callable[[Task], Epoch]]], *packages: str
) -> None:
    """Carry out the command line.

    Args:
        pipelines: name -> what packs the photographs (None: nothing has to), and what reads them.
        packages: whose versions are recorded.
    """
    task = Task(**json.loads(sys.argv[2]))
    write, read = pipelines[task.name]
    if sys.argv[1] == "write":
        if write:
            write(task)
        return
    row = measure(task, read)
    row["version"] = ", ".join(f"{name} {metadata.version(name)}" for name in packages)
    print(json.dumps(row, default=bool), flush=True)

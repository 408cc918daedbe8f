#!/usr/bin/env python3
"""Claim: from the second epoch on the DataCache feeds twice as much per CPU second as the others.

    python scripts/trials/input_pipelines.py --folder photos/train
    python scripts/trials/input_pipelines.py --only ffcv "ffcv pixels" --sizes 224 --images 512

All deliver the same photographs (`--folder`: of class folders; default: generated) in batches of 64
as float32 in [0, 1], after a random-resized-crop (area 0.08 to 1, ratio 3/4 to 4/3) and a
horizontal flip, in a separate process with 2 workers, one pipeline after the other. The goal is
set at 224 pixels. Each framework is installed into build/pipelines, in a separate environment;
FFCV is compiled there: apt-get install libopencv-dev libturbojpeg0-dev pkg-config.

    datacache     DataCache, `store` = 8/7 of the size: decodes once, in the first epoch
    torchvision   ImageFolder, decode_jpeg, transforms v2 of uint8 tensors; DataLoader. Batches are
                  scaled in the first process, because workers then copy a quarter of the bytes
    webdataset    8 tar files, shuffled in a buffer of 1,000; the same transforms; WebLoader
    streaming     MosaicML's MDS files of JPEGs; the same transforms; DataLoader
    grain         ArrayRecord of JPEGs, decoded and resized by OpenCV; 2 reading threads, because
                  mp_prefetch, with 2 processes, took 1.3 to 1.6 times as much CPU time
    dali          JPEG files, decoders.image_random_crop (decodes the crop alone), resize,
                  crop_mirror_normalize; 2 threads
    ffcv          JPEGs of quality 90, which its writer makes; its random-resized-crop decoder,
                  flip, NormalizeImage; 2 threads, os_cache

`pixels`: the framework's format holds decoded pixels, of the size at which the DataCache keeps
them; `whole pixels`: of the original size. The resize is bilinear; torchvision's has anti-aliasing,
which is its default, FFCV's averages areas. The order is random: of all samples, but for
webdataset. The pages of the files are in memory after the first epoch. Columns:

    per CPU second      images over user + system time of all processes of a pipeline; median of the
                        epochs after the first, with the lowest and the highest
    per second          images over wall time, of the same epochs
    first epoch         seconds and CPU seconds, from before the pipeline is made: with the start of
                        its workers and FFCV's compilation, without imports
    memory              largest proportional set size of all its processes together, twice a second:
                        with shared memory and mapped files, of which each page counts once
    disk                bytes of the pipeline's format; of JPEG files if it reads those

Verified in every epoch: each label came as often as it should. Of one batch of every epoch, chosen
anew: dtype, shape, range, and that the means of red, green and blue are near the DataCache's.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
from input_pipelines_run import BATCH, SEED, WORKERS, Task, descendants

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "scripts"), str(ROOT)]
from bench import environments, records  # noqa: E402

FOLDER, BUILD = Path(__file__).parent, ROOT / "build" / "pipelines"
# Worker's ending -> environment and packages; FFCV shares PyTorch, which takes 6 GB
PACKAGES = {
    "torch": ("torch", ("torch", "torchvision", "mosaicml-streaming", "webdataset")),
    "ffcv": ("torch", ("torch", "ffcv", "pillow")),
    "grain": ("grain", ("grain", "array_record", "opencv-python-headless")),
    "dali": ("dali", ("nvidia-dali-cuda120",)),
}
# Pipeline -> the worker's ending; "cache" runs in this environment
PIPELINES = {
    "datacache": "cache",
    "torchvision": "torch",
    "webdataset": "torch",
    "streaming": "torch",
    "grain": "grain",
    "dali": "dali",
    "ffcv": "ffcv",
    "torchvision pixels": "torch",
    "streaming pixels": "torch",
    "grain pixels": "grain",
    "dali pixels": "dali",
    "ffcv pixels": "ffcv",
    "ffcv whole pixels": "ffcv",
}
# Means of 64 images of each epoch differ by chance; red and blue of photographs differ more
TOLERANCE = 0.05
# Times the best of the others, per CPU second at 224 pixels
GOAL = 2


def python_of(worker: str) -> str:
    """Return the Python of a worker's environment, after its packages have been installed."""
    if worker not in PACKAGES:
        return sys.executable
    environment, packages = PACKAGES[worker]
    return str(environments.python_with(BUILD / environment, packages))


def photographs(source: Path, folder: Path, most: int | None) -> None:
    """Copy photographs, as many as are whole batches of all workers, chosen at random.

    Args:
        source: of class folders.
        folder: of the copies; each class keeps its folder.
        most: copies; None: all.
    """
    files = sorted(source.glob("*/*.jpg"))
    count = min(most or len(files), len(files)) // (BATCH * WORKERS) * BATCH * WORKERS
    if not count:
        sys.exit(
            f"At least {BATCH * WORKERS} photographs, {source}/CLASS/*.jpg, are required. Received "
            f"{len(files)}, --images {most}."
        )
    for position in sorted(np.random.default_rng(SEED).permutation(len(files))[:count]):
        target = folder / files[position].relative_to(source)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(files[position], target)


def write_pixels(task: Task) -> None:
    """Write the pixels that the DataCache keeps, a .npy file a photograph."""
    from tfcommx.data.sources.decode import decode

    for file, _ in task.files(task.photos):
        target = Path(task.pixels) / file.parent.name / f"{file.stem}.npy"
        target.parent.mkdir(parents=True, exist_ok=True)
        np.save(target, decode(file.read_bytes(), 3, task.store))


def bytes_on_disk(folder: str) -> int:
    return sum(path.stat().st_size for path in Path(folder).rglob("*") if path.is_file())


def proportional_bytes(process: int) -> int:
    """Return the memory of a process and of all below it; shared pages count once."""
    total = 0
    for member in (process, *descendants(process)):
        try:
            lines = Path(f"/proc/{member}/smaps_rollup").read_text().splitlines()
        except OSError:  # It has ended
            continue
        total += sum(int(line.split()[1]) for line in lines if line.startswith("Pss:")) * 1024
    return total


def run(task: Task) -> dict[str, Any]:
    """Pack the photographs if the pipeline has its own format, and measure it."""
    from bench.benchmarks.data_runs import claim_memory

    worker = PIPELINES[task.name]
    command = [python_of(worker), str(FOLDER / f"input_pipelines_{worker}.py")]
    described, start = json.dumps(asdict(task)), time.monotonic()
    Path(task.packed).mkdir()
    subprocess.run([*command, "write", described], check=True, stdout=sys.stderr)
    packing, packed = time.monotonic() - start, bytes_on_disk(task.packed)
    claim_memory("/dev/shm")
    with subprocess.Popen([*command, "run", described], stdout=subprocess.PIPE, text=True) as made:
        memory = 0
        while made.poll() is None:
            memory = max(memory, proportional_bytes(made.pid))
            time.sleep(0.5)
        printed = made.communicate()[0]
    shutil.rmtree(task.packed)
    if made.returncode:
        sys.exit(f"{task.name} ended with status {made.returncode}; its message is above.")
    row: dict[str, Any] = json.loads(printed.splitlines()[-1])
    given = task.pixels if task.name == "torchvision pixels" else task.photos
    return row | {
        "memory_bytes": memory,
        "disk_bytes": packed or bytes_on_disk(given),
        "packing_seconds": round(packing, 1) if packed else None,
    }


def judge(rows: list[dict[str, Any]]) -> None:
    """Compare each row with the DataCache's of the same size: its means, and how much it feeds."""
    for ours in [row for row in rows if row["name"] == "datacache"]:
        for row in rows:
            if row["n"] == ours["n"]:
                apart = np.abs(np.subtract(row["means"], ours["means"])).max()
                row["verified"] = row["verified"] and bool(apart < TOLERANCE)
                rate = ours["images_per_cpu_second"] / row["images_per_cpu_second"]
                row["datacache_is"] = round(rate, 2)


HEADS = ("pipeline", "pixels", "per CPU second", "range", "datacache is", "per second")
HEADS = (*HEADS, "first epoch", "its CPU", "memory", "disk")


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Return the rows as Markdown."""
    lines = [HEADS, ("---",) + ("---:",) * (len(HEADS) - 1)]
    for row in rows:
        cells = [
            row["name"] if row["verified"] else f"{row['name']} (wrong)",
            row["n"],
            f"{row['images_per_cpu_second']:,}",
            f"{row['lowest']:,} to {row['highest']:,}",
            f"{row['datacache_is']} times",
            f"{row['images_per_second']:,}",
            f"{row['first_seconds']:.1f} s",
            f"{row['first_cpu_seconds']:.1f} s",
            f"{row['memory_bytes'] / 2**20:,.0f} MiB",
            f"{row['disk_bytes'] / 2**20:,.0f} MiB",
        ]
        lines.append(tuple(map(str, cells)))
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def note(rows: Sequence[dict[str, Any]]) -> str:
    """Say whether the goal is reached at each size."""
    sentences = []
    for size in sorted({row["n"] for row in rows}):
        others = [row for row in rows if row["n"] == size and row["name"] != "datacache"]
        if others:
            best = min(others, key=lambda row: row["datacache_is"])
            sentences.append(
                f"{size} pixels: {best['datacache_is']} times {best['name']}, the best of the "
                f"others, per CPU second; the goal is {GOAL} times"
            )
    return "; ".join(sentences)


def main() -> int:
    """Measure all that was asked for; return 1 if a row is not verified."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--folder", type=Path, help="of class folders; default: generated")
    parser.add_argument("--only", nargs="+", choices=PIPELINES, metavar="NAME", default=PIPELINES)
    parser.add_argument("--sizes", type=int, nargs="+", default=[224, 128], help="pixels on a side")
    parser.add_argument("--images", type=int, help="at most; default: all; 2,944 are generated")
    parser.add_argument("--repeats", type=int, default=5, help="epochs after the first")
    records.add_option(parser)
    options, rows = parser.parse_args(), []
    names = ["datacache", *(name for name in options.only if name != "datacache")]
    for name in names:
        python_of(PIPELINES[name])
    with tempfile.TemporaryDirectory(prefix="tfcommx_pipelines") as scratch:
        photos = Path(scratch) / "photos"
        if options.folder is None:
            from bench.benchmarks.data_pipelines import generate

            options.folder = Path(scratch) / "generated"
            generate(options.folder, options.images or 2944)
        photographs(options.folder, photos, options.images)
        for size in options.sizes:
            task = Task(
                name="",
                photos=str(photos),
                pixels=str(Path(scratch) / f"pixels{size}"),
                packed=str(Path(scratch) / "packed"),
                size=size,
                store=size * 8 // 7,
                epochs=1 + options.repeats,
            )
            write_pixels(task)
            for name in names:
                rows.append(run(replace(task, name=name)))
                print(json.dumps(rows[-1]), flush=True)
            shutil.rmtree(task.pixels)
    judge(rows)
    print(table(rows), note(rows), sep="\n\n")
    if options.record:
        command = records.tidied(["python", *sys.argv])
        records.write(options.record, rows, command, note(rows))
    return int(not all(row["verified"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())

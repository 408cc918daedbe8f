"""How much memory a slab needs, and how much there is: asked before the fill."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from tfcommx.data.control_groups import left_bytes
from tfcommx.data.disk import Disk
from tfcommx.data.order import shuffled
from tfcommx.data.slab import Slab, SlabError, facts_of, overhead_bytes, record_bytes, reserved_bytes
from tfcommx.data.source import SampleError, Source, decode

if TYPE_CHECKING:
    from tfcommx.data.cache import Options

PROBES = 64  # samples that are decoded for the estimate


def needed_bytes(source: Source, disk: Disk | None, part: np.ndarray, store: int | None) -> int:
    """Estimate the bytes of a slab that holds the samples `part`: their mean size and three standard errors, from 64 of them.

    Exact for samples of one size. Samples that cannot be read count nothing.
    """
    sizes = []
    for sample in shuffled(part, 0)[:PROBES].tolist():
        try:
            kept = disk.read(sample) if disk is not None else None
            sizes.append(record_bytes(decode((kept or source.read(sample))[0], source.channels, store).nbytes))
        except (SampleError, OSError):
            continue
    mean = np.mean(sizes) + 3 * np.std(sizes) / np.sqrt(len(sizes)) if sizes else 0
    return int(np.ceil(mean * len(part))) + overhead_bytes(source.count)


def offered_bytes(folder: str, limit: int | None, own: str = "") -> int:
    """Return the bytes that a slab in `folder` may take: the least of what is free there, in the node's memory, in this
    process's control groups, and `limit`.

    What other slabs there have reserved and not yet taken is not free; that of the name `own` is not another.
    """
    free = os.statvfs(folder)
    offers = [free.f_bavail * free.f_frsize]
    if (left := left_bytes()) is not None:
        offers.append(left)
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            offers.append(int(line.split()[1]) * 1024)
    reserved = sum(reserved_bytes(path) for path in Path(folder).glob("tfcommx-*.slab") if path.stem != own)
    left = max(0, min(offers) - reserved)
    return left if limit is None else min(left, limit)


def slab_bytes(source: Source, disk: Disk | None, part: np.ndarray, options: Options, name: str) -> int:
    """Return the length of the slab to make, of that name.

    **Raises:** SlabError where the need is above the offer and `options.partial` is False.
    """
    needed = needed_bytes(source, disk, part, options.store)
    offered = offered_bytes(options.memory, options.memory_bytes, name)
    if needed > offered and not options.partial:
        raise SlabError(
            f"About {needed:,} bytes of memory are required for {len(part):,} samples of {source.name}. {options.memory}, the memory of "
            f"this node or container, and `memory_bytes` offer {offered:,}. Lower `store`, use more nodes, or set partial=True to keep as "
            "much as fits."
        )
    return min(
        offered, needed if options.partial else needed + needed // 2
    )  # memory is taken as it fills: room for the estimate's error


def check_length(slab: Slab, source: Source, disk: Disk | None, part: np.ndarray, options: Options) -> None:
    """Refuse a slab that another process made where it is too small for this run.

    **Cost:** none where it was made for as many samples, as the other processes of a run do; else that of `needed_bytes`.
    **Raises:** SlabError.
    """
    if options.partial or slab.created or int(facts_of(slab.path).get("whole", 0)) >= len(part):
        return
    if (needed := needed_bytes(source, disk, part, options.store)) > slab.length:
        raise SlabError(
            f"About {needed:,} bytes of memory are required for {len(part):,} samples of {source.name}. {slab.path}, which "
            f"another run made and uses, offers {slab.length:,}. Give both runs the same nodes and options, give this one "
            "another `memory` folder, or set partial=True to keep as much as fits."
        )

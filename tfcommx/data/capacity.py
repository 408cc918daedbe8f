"""Size a slab: the memory that its samples need, and the memory that is available.

A container or a batch job limits memory by the control groups of its processes.

**Source:** Linux, Documentation/admin-guide/cgroup-v2.rst and cgroup-v1/memory.rst.
"""

from __future__ import annotations

import hashlib
import math
import os
from pathlib import Path
from typing import NamedTuple

import numpy as np

from tfcommx.data.disk import Disk
from tfcommx.data.options import Options
from tfcommx.data.order import shuffled
from tfcommx.data.slab import Slab
from tfcommx.data.slab_files import SlabError, overhead_bytes, paths, read_metadata, reserved_bytes
from tfcommx.data.sources.decode import decode, record_bytes
from tfcommx.data.sources.source import SampleError, Source


class Version(NamedTuple):
    """How one version of control groups names its files."""

    limit: str
    used: str
    # In memory.stat: what the kernel drops before it refuses or kills.
    files: tuple[str, str]


VERSIONS = {
    "cgroup2": Version("memory.max", "memory.current", ("active_file", "inactive_file")),
    "cgroup": Version(
        "memory.limit_in_bytes",
        "memory.usage_in_bytes",
        ("total_active_file", "total_inactive_file"),
    ),
}


def remaining_bytes(proc: Path = Path("/proc/self")) -> int | None:
    """Return the bytes of memory that this process may still take; None without any limit.

    Shared memory counts for the group that first touches it, and a group above its limit is killed.
    """
    offers = []
    for folder, top, version in _folders(proc):
        for group in (folder, *(parent for parent in folder.parents if parent.is_relative_to(top))):
            try:
                limit = (group / version.limit).read_text().strip()
                used = int((group / version.used).read_text())
                lines = (group / "memory.stat").read_text().splitlines()
                stat = dict(line.split(" ", 1) for line in lines)
            except (OSError, ValueError):  # The root of a hierarchy has no limit
                continue
            if limit != "max":
                dropped = sum(int(stat.get(name, 0)) for name in version.files)
                offers.append(max(0, int(limit) - used + dropped))
    return min(offers, default=None)


def _folders(proc: Path) -> list[tuple[Path, Path, Version]]:
    """Find the groups of this process that are mounted.

    Returns:
        For each: the group's folder, the folder of the highest group that can be seen, and the
        version.
    """
    try:
        own = os.fsdecode((proc / "cgroup").read_bytes()).splitlines()
        mounts = os.fsdecode((proc / "mountinfo").read_bytes()).splitlines()
    except OSError:  # A kernel without control groups
        return []
    groups = {}
    for line in own:
        _, controllers, group = line.split(":", 2)
        if not controllers or "memory" in controllers.split(","):
            groups["cgroup" if controllers else "cgroup2"] = group
    found = []
    for line in mounts:
        location, _, system = line.partition(" - ")
        (root, mount), (kind, _, options) = location.split(" ")[3:5], system.split(" ", 2)
        if kind in groups and (kind == "cgroup2" or "memory" in options.split(",")):
            # A container may see no more than its own group, as the root of the mount.
            inside = (
                groups[kind].removeprefix(root).lstrip("/") if groups[kind].startswith(root) else ""
            )
            found.append((Path(mount, inside), Path(mount), VERSIONS[kind]))
    return found


# Samples that are decoded for the estimate.
PROBES = 64
# Bytes of a shared memory, at most an eighth of it, that no slab takes: MPI and NCCL need some and
# crash if it is full.
HEADROOM_BYTES = 1 << 30


def estimate_sample_bytes(
    source: Source, disk: Disk | None, part: np.ndarray, options: Options
) -> float:
    """Estimate the bytes that a sample of `part` takes in a slab.

    The mean size and three standard errors, from 64 of them; exact for samples of one size. Samples
    that cannot be read count nothing.

    **Raises:** SlabError if none of the 64 can be read because the source cannot be reached: a slab
    of no room would follow.
    """
    sizes, last_error = [], None
    for sample in shuffled(part, 0)[:PROBES].tolist():
        try:
            kept = disk.read(sample) if disk is not None else None
            data, _ = kept or source.read(sample)
            pixels = decode(data, source.channels, options.store, options.max_pixels)
            sizes.append(record_bytes(pixels.nbytes))
        except SampleError:
            continue
        except OSError as error:
            last_error = f"{source.where(sample)}: {error}"
    if not sizes and last_error is not None:
        raise SlabError(
            f"Samples that tell their size are required. None of {min(PROBES, len(part))} of "
            f"{source.name} can be read; the last: {last_error}. "
            "Check the source and its mount, and start again."
        )
    return np.mean(sizes) + 3 * np.std(sizes) / np.sqrt(len(sizes)) if sizes else 0.0


def reserved_by_others(folder: str, own: str = "") -> dict[str, int]:
    """Return the bytes that each slab of this user in `folder` has reserved and not yet taken.

    Args:
        folder: of shared memory.
        own: name of a slab that is left out.
    """
    reserved = {path.name: reserved_bytes(path) for path in paths(folder) if path.stem != own}
    return {name: size for name, size in reserved.items() if size > 0}


def available_bytes(folder: str, limit: int | None, own: str = "") -> int:
    """Return the bytes that a slab in `folder` may take.

    The smallest of what is free in the folder less HEADROOM_BYTES, the node's available memory,
    and what the control groups allow; less what slabs in the folder other than `own` have reserved
    and not yet taken; at most `limit`.
    """
    free = os.statvfs(folder)
    spared = min(HEADROOM_BYTES, free.f_blocks * free.f_frsize // 8)
    # A tmpfs without a limit has no blocks.
    offers = [free.f_bavail * free.f_frsize - spared] if free.f_blocks else []
    if (remaining := remaining_bytes()) is not None:
        offers.append(remaining)
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            offers.append(int(line.split()[1]) * 1024)
    offered = max(0, min(offers) - sum(reserved_by_others(folder, own).values()))
    return offered if limit is None else min(offered, limit)


def part_key(part: np.ndarray) -> str:
    """Return a hash of the samples of a part."""
    return hashlib.sha256(part.tobytes()).hexdigest()[:16]


def choose_length(
    source: Source, disk: Disk | None, part: np.ndarray, options: Options, name: str
) -> tuple[int, dict[str, str]]:
    """Return the length of the slab to make, and what its metadata says of that.

    Args:
        source: of the samples.
        disk: the local disk level, or None.
        part: the node's samples, int64 [n].
        options: how samples are kept.
        name: of the slab.

    Returns:
        Bytes; and metadata: `need`, the bytes that are required, and `part`, which samples fit.

    **Raises:** SlabError if more is needed than offered and `options.partial` is False.
    """
    mean = estimate_sample_bytes(source, disk, part, options)
    needed = math.ceil(mean * len(part)) + overhead_bytes(source.count)
    offered = available_bytes(options.memory, options.memory_bytes, name)
    if needed > offered and not options.partial:
        others = reserved_by_others(options.memory, name)
        beside = "".join(
            f", beside {other}, which is still to take {size:,}" for other, size in others.items()
        )
        raise SlabError(
            f"About {needed:,} bytes of memory are required for {len(part):,} samples of "
            f"{source.name}. {options.memory}, the memory of this node or container, and "
            f"`memory_bytes` offer {offered:,}{beside}. Lower `store`, use more nodes, or set "
            "partial=True to keep as much as fits."
        )
    # Memory is taken as it fills: room for the estimate's error, which no other slab is denied.
    length = min(offered, needed if options.partial else needed + needed // 2)
    fits = part_key(part) if needed <= offered else ""
    return length, {"need": str(min(needed, length)), "part": fits}


def check_length(
    slab: Slab, source: Source, disk: Disk | None, part: np.ndarray, options: Options
) -> None:
    """Refuse a slab that another process made if it has too little room for this run.

    Room is what it has beside what it was made for.

    **Cost:** none if it was made for the same part, as by the other processes of a run; else that
    of `estimate_sample_bytes`.
    **Raises:** SlabError.
    """
    metadata = read_metadata(slab.path)
    absent = int(np.count_nonzero(slab.index[part] == 0))
    if options.partial or slab.created or metadata.get("part") == part_key(part) or not absent:
        return
    needed = math.ceil(estimate_sample_bytes(source, disk, part, options) * absent)
    offered = max(0, slab.length - max(slab.used_bytes, int(metadata.get("need", 0))))
    if needed > offered:
        raise SlabError(
            f"About {needed:,} bytes of memory are required for {absent:,} samples of "
            f"{source.name}. {slab.path}, which another run made and uses, offers {offered:,} "
            "beside its own. Give both runs the same seed, nodes and options, give this one "
            "another `memory` folder, or set partial=True to keep as much as fits."
        )

"""The size of a slab: the memory that its samples need, and the memory that is available.

Containers and batch jobs limit memory by the control groups of their processes.

**Source:** Linux, Documentation/admin-guide/cgroup-v2.rst and cgroup-v1/memory.rst.
"""

import hashlib
import math
import os
from pathlib import Path

import numpy as np

from tfcommx.data.disk import Disk
from tfcommx.data.options import Options
from tfcommx.data.order import shuffled
from tfcommx.data.slab import Slab
from tfcommx.data.slab_files import SlabError, overhead_bytes, paths, read_metadata, reserved_bytes
from tfcommx.data.sources.decode import decode, record_bytes
from tfcommx.data.sources.source import SampleError, Source

# Version of control groups -> files of the limit and of the used bytes, and the prefix of the
# entries of memory.stat for memory that the kernel drops before it refuses or kills
VERSIONS = {
    "cgroup2": ("memory.max", "memory.current", ""),
    "cgroup": ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_"),
}


def remaining_bytes(proc: Path = Path("/proc/self")) -> int | None:
    """Return the bytes of memory that this process may still take; None without a limit.

    Shared memory counts for the group that first touches it, and a group above its limit is killed.
    """
    offers = []
    for folder, top, kind in _folders(proc):
        limit_file, used_file, prefix = VERSIONS[kind]
        # The limit of a group holds for all groups below it together, so the smallest rest counts
        for group in (folder, *(parent for parent in folder.parents if parent.is_relative_to(top))):
            try:
                limit = (group / limit_file).read_text().strip()
                used = int((group / used_file).read_text())
                lines = (group / "memory.stat").read_text().splitlines()
                stat = dict(line.split(" ", 1) for line in lines)
            except (OSError, ValueError):  # The root of a hierarchy has no limit
                continue
            if limit != "max":
                names = (f"{prefix}active_file", f"{prefix}inactive_file")
                dropped = sum(int(stat.get(name, 0)) for name in names)
                offers.append(max(0, int(limit) - used + dropped))
    return min(offers, default=None)


def _folders(proc: Path) -> list[tuple[Path, Path, str]]:
    """Return (folder, that of the highest visible group, version) of this process's groups."""
    try:
        memberships = os.fsdecode((proc / "cgroup").read_bytes()).splitlines()
        mounts = os.fsdecode((proc / "mountinfo").read_bytes()).splitlines()
    except OSError:  # A kernel without control groups
        return []
    groups = {}
    for line in memberships:
        # `0::/path` is version 2; version 1 has a line with controllers for each hierarchy
        _, controllers, group = line.split(":", 2)
        if not controllers or "memory" in controllers.split(","):
            groups["cgroup" if controllers else "cgroup2"] = group
    folders = []
    for line in mounts:
        location, _, system = line.partition(" - ")
        (root, mount), (kind, _, options) = location.split(" ")[3:5], system.split(" ", 2)
        if kind in groups and (kind == "cgroup2" or "memory" in options.split(",")):
            # In a container the root of the mount may be the container's group
            inside = (
                groups[kind].removeprefix(root).lstrip("/") if groups[kind].startswith(root) else ""
            )
            folders.append((Path(mount, inside), Path(mount), kind))
    return folders


# Number of samples that are decoded for the estimate
PROBES = 64
# Bytes of shared memory, at most an eighth of it, that no slab takes, because MPI and NCCL need
# some and crash if it is full
HEADROOM_BYTES = 1 << 30


def estimate_sample_bytes(
    source: Source, disk: Disk | None, part: np.ndarray, options: Options
) -> float:
    """Estimate the bytes that a sample of `part` takes in a slab.

    The estimate is the mean size plus three standard errors, from 64 samples. It is exact for
    samples of one size. Samples that cannot be read are ignored.

    **Raises:** SlabError if none of the 64 can be read and the source cannot be reached; the
    slab would have no room.
    """
    sizes, last_error = [], None
    # A random choice, because the standard error holds for independent samples, and neighbours in a
    # folder are often alike
    for sample in shuffled(part, 0)[:PROBES].tolist():
        try:
            on_disk = disk.read(sample) if disk is not None else None
            data, _ = on_disk or source.read(sample)
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
    # With three standard errors, because a slab that is too small for its part stays incomplete
    return np.mean(sizes) + 3 * np.std(sizes) / np.sqrt(len(sizes)) if sizes else 0.0


def reserved_by_others(folder: str, excluded: str = "") -> int:
    """Return the bytes that other slabs of this user in `folder` have reserved and not taken."""
    return sum(reserved_bytes(path) for path in paths(folder) if path.stem != excluded)


def available_bytes(folder: str, limit: int | None, excluded: str = "") -> int:
    """Return the bytes that a slab in `folder` may take.

    They are the smallest of three: the free bytes of the folder less HEADROOM_BYTES, the available
    memory of the node, and the rest of the control groups' limits. Bytes that slabs in the folder
    other than `excluded` have reserved and not yet taken are subtracted. At most `limit`.
    """
    free = os.statvfs(folder)
    # At most an eighth, because a small folder would have no room for a slab
    spared = min(HEADROOM_BYTES, free.f_blocks * free.f_frsize // 8)
    # A tmpfs without a limit has no blocks
    offers = [free.f_bavail * free.f_frsize - spared] if free.f_blocks else []
    if (remaining := remaining_bytes()) is not None:
        offers.append(remaining)
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            offers.append(int(line.split()[1]) * 1024)
    offered = max(0, min(offers) - reserved_by_others(folder, excluded))
    return offered if limit is None else min(offered, limit)


def part_key(part: np.ndarray) -> str:
    """Return a hash of the samples of a part."""
    return hashlib.sha256(part.tobytes()).hexdigest()[:16]


def choose_length(
    source: Source, disk: Disk | None, part: np.ndarray, options: Options, name: str
) -> tuple[int, dict[str, str]]:
    """Return the length of the slab to create, and its metadata on that.

    Args:
        part: the node's samples, int64 [n].

    Returns:
        Bytes; and metadata: `need`, the required bytes, and `part`, the key of the part that fits.

    **Raises:** SlabError if more is needed than offered and `options.partial` is False.
    """
    mean = estimate_sample_bytes(source, disk, part, options)
    needed = math.ceil(mean * len(part)) + overhead_bytes(source.count)
    offered = available_bytes(options.memory, options.memory_bytes, name)
    if needed > offered and not options.partial:
        reserved = reserved_by_others(options.memory, name)
        raise SlabError(
            f"About {needed:,} bytes of memory are required for {len(part):,} samples of "
            f"{source.name}. {options.memory}, the memory of this node or container, and "
            f"`memory_bytes` offer {offered:,}, beside {reserved:,} "
            "that other slabs have reserved (see `tfcommx cache status`). Lower `store`, use more "
            "nodes, or set partial=True to keep as much as fits."
        )
    # Half as much again for the error of the estimate. Other slabs can still use that memory,
    # because a slab takes memory only as it fills
    length = min(offered, needed + needed // 2)
    # Without a key for a slab that holds a share of the part, so that `check_length` looks at it
    # anew in a run without `partial`
    fits = part_key(part) if needed <= offered else ""
    return length, {"need": str(min(needed, length)), "part": fits}


def check_length(
    slab: Slab, source: Source, disk: Disk | None, part: np.ndarray, options: Options
) -> None:
    """Refuse a slab of another process if it has too little room for this run.

    Its room is its length less the bytes that are used or reserved.

    **Cost:** none if it was made for the same part, as by the other processes of a run; otherwise
    that of `estimate_sample_bytes`.
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

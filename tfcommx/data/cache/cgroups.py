"""Memory limits of this process's control groups: those of a container or of a batch job.

**Source:** Linux, Documentation/admin-guide/cgroup-v2.rst and cgroup-v1/memory.rst.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple


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

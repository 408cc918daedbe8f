"""Memory that the control groups of this process leave it: the limit of a container, or of a batch
system's job.

**Source:** Linux, Documentation/admin-guide/cgroup-v2.rst and cgroup-v1/memory.rst.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple


class Version(NamedTuple):
    """How one version of control groups names its files."""

    limit: str
    used: str
    # Of memory.stat: what the kernel drops before it refuses or kills
    files: tuple[str, str]


VERSIONS = {
    "cgroup2": Version("memory.max", "memory.current", ("active_file", "inactive_file")),
    "cgroup": Version(
        "memory.limit_in_bytes",
        "memory.usage_in_bytes",
        ("total_active_file", "total_inactive_file"),
    ),
}


def left_bytes(proc: Path = Path("/proc/self")) -> int | None:
    """Return the bytes of memory that this process may still take; None where no group of it has a
    limit.

    Shared memory counts for the group that first touches it, and a group above its limit is killed.
    """
    offers = []
    for folder, top, version in _folders(proc):
        for group in (folder, *(parent for parent in folder.parents if parent.is_relative_to(top))):
            try:
                limit, used = (
                    (group / version.limit).read_text().strip(),
                    int((group / version.used).read_text()),
                )
                stat = dict(
                    line.split(" ", 1) for line in (group / "memory.stat").read_text().splitlines()
                )
            except (OSError, ValueError):  # the root of a hierarchy has no limit
                continue
            if limit != "max":
                offers.append(
                    max(
                        0, int(limit) - used + sum(int(stat.get(name, 0)) for name in version.files)
                    )
                )
    return min(offers, default=None)


def _folders(proc: Path) -> list[tuple[Path, Path, Version]]:
    """Find (the folder of this process's group, the folder of the highest group that can be seen,
    the version), where mounted.
    """
    try:
        own, mounts = (
            (proc / "cgroup").read_text().splitlines(),
            (proc / "mountinfo").read_text().splitlines(),
        )
    except OSError:  # a kernel without control groups
        return []
    groups = {}
    for line in own:
        _, controllers, group = line.split(":", 2)
        if not controllers or "memory" in controllers.split(","):
            groups["cgroup" if controllers else "cgroup2"] = group
    found = []
    for line in mounts:
        place, _, system = line.partition(" - ")
        (root, mount), (kind, _, options) = place.split(" ")[3:5], system.split(" ", 2)
        if kind in groups and (kind == "cgroup2" or "memory" in options.split(",")):
            # a container may see no more than its own group, as the root of the mount
            inside = (
                groups[kind].removeprefix(root).lstrip("/") if groups[kind].startswith(root) else ""
            )
            found.append((Path(mount, inside), Path(mount), VERSIONS[kind]))
    return found

"""Memory that the control groups of a process allow: as the kernel's files say it.

Also with a real group, if one can be made.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from launching import ROOT

from tfcommx.data.capacity import remaining_bytes

MIB = 1 << 20
ASK = (
    "from tfcommx.data.capacity import available_bytes, remaining_bytes; "
    "print(remaining_bytes(), "
    "available_bytes('/dev/shm', None))"
)


def lay_out(folder, kind, group, root, groups):
    """Write the files of /proc/self of a process in `group`, and a mount at `folder`/mount.

    The mount shows (limit, used, files) of each group.
    """
    mount = folder / "mount"
    for name, (limit, used, files) in groups.items():
        (mount / name).mkdir(parents=True, exist_ok=True)
        new = kind == "cgroup2"
        (mount / name / ("memory.max" if new else "memory.limit_in_bytes")).write_text(f"{limit}\n")
        (mount / name / ("memory.current" if new else "memory.usage_in_bytes")).write_text(
            f"{used}\n"
        )
        word = "" if new else "total_"
        (mount / name / "memory.stat").write_text(
            f"anon 5\n{word}active_file {files - 1}\n{word}inactive_file 1\nshmem 7\n"
        )
    (folder / "cgroup").write_text(
        f"3:cpu:/elsewhere\n{'0::' if kind == 'cgroup2' else '4:memory:'}{group}\n"
    )
    (folder / "mountinfo").write_text(
        "22 1 0:20 / /proc rw - proc proc rw\n"
        "30 22 0:27 / /sys/fs/cgroup/cpu rw shared:7 - cgroup cgroup rw,cpu\n"
        f"31 22 0:28 {root} {mount} rw,nosuid shared:9 - {kind} cgroup "
        f"{'rw' if kind == 'cgroup2' else 'rw,memory'}\n"
    )
    return folder


@pytest.mark.parametrize("kind", ["cgroup2", "cgroup"])
@pytest.mark.parametrize(
    ("group", "root", "groups", "want"),
    [
        ("/", "/", {"": (1000, 600, 100)}, 500),  # a container that sees its own group as the root
        ("/docker/abc", "/docker/abc", {"": (1000, 600, 100)}, 500),
        # The group above has less
        ("/docker/abc", "/", {"docker/abc": (1000, 600, 100), "docker": (700, 650, 10)}, 60),
        ("/a/b", "/", {"a/b": (1000, 1200, 100)}, 0),
        ("/gone", "/", {"": (1000, 600, 100)}, 500),
        ("/a", "/", {}, None),
    ],
)
def test_the_least_that_any_group_leaves(tmp_path, kind, group, root, groups, want):
    assert remaining_bytes(lay_out(tmp_path, kind, group, root, groups)) == want


def test_a_group_without_a_limit(tmp_path):
    assert (
        remaining_bytes(lay_out(tmp_path, "cgroup2", "/a", "/", {"a": ("max", 600, 100)})) is None
    )


def test_a_kernel_without_groups(tmp_path):
    assert remaining_bytes(tmp_path) is None


def test_in_a_real_group():
    for mount, limit in (
        ("/sys/fs/cgroup/memory", "memory.limit_in_bytes"),
        ("/sys/fs/cgroup", "memory.max"),
    ):
        group = Path(mount, f"tfcommx-test-{os.getpid()}")
        try:
            group.mkdir()
            (group / limit).write_text(str(700 * MIB))
            break
        except OSError:
            if group.is_dir():
                group.rmdir()
    else:
        pytest.skip("a control group with a limit of memory cannot be made here")
    try:
        done = subprocess.run(
            ["sh", "-c", f'echo $$ > {group}/cgroup.procs && exec {sys.executable} -c "{ASK}"'],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert done.returncode == 0, done.stderr
        remaining, offered = map(int, done.stdout.split())
        assert 100 * MIB < remaining < 700 * MIB and 100 * MIB < offered <= 700 * MIB
    finally:
        group.rmdir()

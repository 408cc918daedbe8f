"""A full file system and a read-only one, in private mounts of the test."""

import contextlib
import fcntl
import functools
import os
import re
import struct
import subprocess
import sys

import pytest
import warm_ranks
from data_helpers import WHOLE, OpenCache, make_folder, served
from launching import QUICK, ROOT

from tfcommx.data.slab_files import SlabError

# In the environment of the process whose mounts end with it.
OWN_MOUNTS = "TFCOMMX_TEST_OWN_MOUNTS"


@pytest.fixture(scope="module")
def ended(tmp_path_factory):
    """Run the tests of this file in one process with private mounts; return its result.

    This needs user namespaces, not root.
    """
    folder = tmp_path_factory.mktemp("mounts")
    for kind in ([], ["--map-root-user"]):  # The first: root, who may not make user namespaces
        alone = ["unshare", *kind, "--mount"]
        mount = [*alone, "mount", "-t", "tmpfs", "tmpfs", str(folder)]
        if subprocess.run(mount, capture_output=True).returncode == 0:
            break
    else:
        pytest.skip(
            "this test mounts a small tmpfs and a read-only folder: it needs user namespaces, or "
            "root"
        )
    again = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-vv", __file__]
    return subprocess.run(
        [*alone, *again],
        env={
            **os.environ,
            "PYTHONPATH": f"{QUICK}:{ROOT / 'tests'}",
            OWN_MOUNTS: "1",
            **warm_ranks.environment(alone=True),
        },
        cwd=ROOT,
        capture_output=True,
        text=True,
    )


def in_own_mounts(test):
    """Run a test in the process that has private mounts, with all other tests of this file."""
    if OWN_MOUNTS in os.environ:
        return test

    @functools.wraps(test)
    def outside(ended):
        passed = re.search(rf"{test.__name__} PASSED", ended.stdout)
        assert passed, ended.stdout + ended.stderr

    del outside.__wrapped__  # pytest would ask for the arguments of the test inside
    return outside


@pytest.mark.extended
@in_own_mounts
def test_a_full_tmpfs_keeps_what_fits_and_the_rest_is_read(folder, tmp_path):
    """A real tmpfs of 400 kB: the slab is shorter, but another file takes room while it fills."""
    small = tmp_path / "small"
    small.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=400k", "tmpfs", str(small)], check=True)
    # Then another process is at its pwrite, and the fill writes through its mapping
    for busy in (False, True):
        with OpenCache(folder, small) as cache, open(cache.slab.path, "r+b") as other:
            if busy:
                fcntl.fcntl(
                    other,
                    fcntl.F_OFD_SETLK,
                    struct.pack("hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, 8, 8, 0),
                )
            free = os.statvfs(small)
            (small / "other").write_bytes(bytes(free.f_bavail * free.f_frsize - 100_000))
            for epoch in range(2):
                with (
                    pytest.warns(UserWarning, match=r"\.slab\b")
                    if epoch == 0
                    else contextlib.nullcontext()
                ):
                    assert sorted(served(cache.dataset(WHOLE, epoch))) == [
                        (n, n % 3) for n in range(50)
                    ]
            assert cache.slab.full and 5 < cache.slab.filled < 45
            assert cache.report(1)["overflow"] == 50 - cache.slab.filled
            (small / "other").unlink()


@in_own_mounts
def test_a_read_only_disk_serves_what_it_has(folder, tmp_path):
    shm = tmp_path / "memory"
    shm.mkdir()
    disk = tmp_path / "disk"
    disk.mkdir()
    with OpenCache(folder, shm, disk=disk) as cache:
        served(cache.dataset(WHOLE))
    files = sorted(disk.rglob("*.*"))
    subprocess.run(["mount", "--bind", str(disk), str(disk)], check=True)
    subprocess.run(["mount", "-o", "remount,bind,ro", str(disk)], check=True)
    with OpenCache(folder, shm, disk=disk) as cache:
        served(cache.dataset(WHOLE))
        assert cache.report(0)["hit_disk"] == 1
    make_folder(tmp_path / "other", 5)
    with (
        pytest.warns(UserWarning, match="Read-only file"),
        OpenCache(tmp_path / "other", shm, disk=disk) as cache,
    ):
        assert len(served(cache.dataset(WHOLE))) == 5
    with pytest.raises(SlabError, match=r"Read-only file.*`memory`"):
        OpenCache(folder, disk)
    assert sorted(disk.rglob("*.*")) == files

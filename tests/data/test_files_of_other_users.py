"""Files that another user of the machine has put where the data cache keeps its own."""

from __future__ import annotations

import os
import re
import socket
import struct
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf
from drawing import extended

import tfcommx as cx
from tfcommx.data import capacity
from tfcommx.data.disk import Disk, drop, usage
from tfcommx.data.slab import Slab
from tfcommx.data.slab_files import (
    SlabError,
    open_or_create,
    prefix,
    remove_unused,
    reserved_bytes,
    slab_state,
)
from tfcommx.data.sources import Arrays
from tfcommx.kernels import loader

STRANGER = 54321
SPEC = cx.BatchSpec(4, dtype="uint8", shuffle=False)
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to make another user's file")


def source() -> Arrays:
    return Arrays(np.full((8, 4, 4, 3), 7, np.uint8), np.arange(8))


def served(memory: Path) -> list[int]:
    """Return a pixel of each sample that a cache serves."""
    cache = cx.DataCache(source(), memory=memory)
    try:
        return [int(image[0, 0, 0]) for images, _ in cache.dataset(SPEC) for image in images]
    finally:
        cache.close()


@pytest.fixture
def slab_of_the_data(shm: Path) -> tuple[Path, bytes]:
    """Return the path at which a cache looks for its slab, and a whole slab's bytes."""
    cache = cx.DataCache(source(), memory=shm)
    cache.warm()
    path, content = cache.slab.path, cache.slab.path.read_bytes()
    cache.close()
    return path, content


def poisoned(content: bytes) -> bytes:
    """Return the slab with all pixels changed."""
    changed = bytearray(content)
    for at in np.frombuffer(content, np.int64, 8, 4096):
        changed[at + 64 : at + 64 + 48] = b"\xee" * 48
    return bytes(changed)


def in_use(path: Path) -> int:
    """Hold the shared lock of a slab's user; return the descriptor."""
    import fcntl

    file = os.open(path, os.O_RDONLY)
    fcntl.flock(file, fcntl.LOCK_SH)
    return file


@pytest.mark.parametrize(
    "trick",
    [
        pytest.param("their own file", marks=as_root),
        pytest.param("their own file, for this user alone", marks=as_root),
        "a file that all can write",
        "a link",
        "a second name",
    ],
)
def test_a_slab_that_another_user_made_beforehand_is_refused(
    shm: Path, slab_of_the_data: tuple[Path, bytes], trick: str, tmp_path: Path
) -> None:
    """Its pixels were trained with, and its owner could read all pictures that were put into it.

    The name of a slab can be computed from the data, and every user can make a file in /dev/shm.
    """
    path, content = slab_of_the_data
    elsewhere = shm / "elsewhere"
    made = elsewhere if trick in ("a link", "a second name") else path
    made.touch(0o600)
    made.write_bytes(poisoned(content))
    if trick == "a link":
        path.symlink_to(elsewhere)
    elif trick == "a second name":
        os.link(elsewhere, path)
    elif trick == "a file that all can write":
        path.chmod(0o666)
    else:
        os.chown(path, STRANGER, STRANGER)
    user = in_use(path)
    try:
        with pytest.raises(SlabError, match=f"{re.escape(str(path))}.*`memory`"):
            served(shm)
        assert capacity.reserved_by_others(shm) == 0 and reserved_bytes(path) == 0
        with pytest.raises(OSError, match=re.escape(str(path))) as refused:
            slab_state(path)
        assert refused.value.filename == str(path)
    finally:
        os.close(user)
        path.unlink()
        elsewhere.unlink(missing_ok=True)


@pytest.mark.parametrize("trick", ["header", "short", "owner", "rights"])
def test_the_operations_refuse_it_too(
    shm: Path, slab_of_the_data: tuple[Path, bytes], trick: str
) -> None:
    """A header that pointed outside its file was a SIGSEGV or a SIGBUS."""
    library = loader.library()
    if library is None or (trick == "owner" and os.geteuid() != 0):
        pytest.skip("needs the native library, and root for another owner")
    path, content = slab_of_the_data
    (identity,) = struct.unpack_from("<q", content, 48)
    path.touch(0o600)
    changed = bytearray(content)
    if trick == "header":
        struct.pack_into("<qq", changed, 8, 2**60, 8)
    path.write_bytes(changed[: 8192 if trick == "short" else None])
    if trick == "owner":
        os.chown(path, STRANGER, STRANGER)
    if trick == "rights":
        path.chmod(0o644)
    damaged, other = tf.errors.DataLossError, tf.errors.FailedPreconditionError
    error = damaged if trick in ("header", "short") else other
    with pytest.raises(error, match=re.escape(str(path))):
        library.tfcommx_slab_check(indices=[0], epoch=0, path=str(path), id=identity)
    path.unlink()


@pytest.mark.parametrize("value", [-(2**40), -64, 0, 63, 2**62, 2**63 - 1])
def test_the_first_free_byte_is_checked_whenever_it_is_used(shm: Path, value: int) -> None:
    """A negative one made the native fill write before the mapping; another beyond its end.

    The header was checked once, when it was mapped, and then read again from shared memory.
    """
    library = loader.library()
    slab = Slab(shm / f"{prefix()}a.slab", "k", 2, lambda: 10**5)
    try:
        picture = tf.io.encode_png(np.full((8, 8, 3), 9, np.uint8)).numpy()

        def fill() -> list[int]:
            return library.tfcommx_slab_fill(
                encoded=[picture],
                samples=[0],
                labels=[0],
                state=np.array([1], np.uint8),
                path=slab.descriptor_path,
                id=slab.id,
                channels=3,
                store=0,
                max_pixels=100,
            ).numpy()

        sound = slab.used_bytes
        struct.pack_into("<q", slab._map, 40, value)
        assert not slab.put(1, 1, np.zeros((4, 4, 3), np.uint8)) and slab.get(1) is None
        if library is not None:
            assert fill().tolist() == [1] and slab.get(0) is None
        # Of the private copy of the header
        struct.pack_into("<qqqq", slab._map, 8, 2**60, 2**60, 2**60, 2**60)
        struct.pack_into("<q", slab._map, 40, sound)
        assert slab.put(1, 1, np.zeros((4, 4, 3), np.uint8)) and slab.intact(1)
    finally:
        slab.close()


HOSTILE = ["folder", "pipe", "loop", "socket", "huge", "empty", "bytes", "json"]


@pytest.fixture(params=HOSTILE)
def hostile(shm: Path, request: pytest.FixtureRequest) -> Iterator[Path]:
    """Something that any user can make, with the name of this user's slab."""
    path = shm / f"{prefix()}x.slab"
    match request.param:
        case "folder":
            path.mkdir()
        case "pipe":
            os.mkfifo(path)
        case "loop":
            path.symlink_to(path)
        case "socket":
            with socket.socket(socket.AF_UNIX) as listening:
                listening.bind(str(path))
        case "huge":
            header = struct.pack("<8sqqqqqq", b"TFCXSLB1", 2**62, 4096, 2**62, 2**62, 0, 1)
            path.write_bytes(header)
            os.truncate(path, 2**40)
        case "empty":
            path.touch(0o600)
        case "bytes":
            path.write_bytes(b"TFCXSLB1" + bytes(range(256)) * 40)
        case "json":
            page = bytearray(4096)
            page[:8], page[256:300] = b"TFCXSLB1", b'{"need": [1e999], "key": {}}'.ljust(44, b"\0")
            path.write_bytes(page)
    yield path
    if path.is_dir():
        path.rmdir()
    path.unlink(missing_ok=True)


@pytest.mark.parametrize(
    "name", [extended("tfcommx-x.slab"), "tfcommx-{uid}-x.slab", extended("tfcommx-{uid}-x.part")]
)
def test_no_file_breaks_the_caches_of_a_machine(shm: Path, hostile: Path, name: str) -> None:
    """A folder, a pipe or a loop of links ended every DataCache on the host, or let it wait."""
    made = hostile.rename(shm / name.format(uid=os.geteuid()))
    try:
        assert served(shm) == [7] * 8
        capacity.available_bytes(str(shm), None)
        remove_unused(shm)
    finally:
        if made.is_dir():
            made.rmdir()
        made.unlink(missing_ok=True)


def test_slabs_of_other_users_are_passed_over(shm: Path) -> None:
    other = shm / "tfcommx-54321-x.slab"
    other.touch(0o600)
    assert remove_unused(shm) == [] and other.exists()
    other.unlink()


def test_a_slab_appears_with_one_name(shm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between a link and the removal of the old name it would have two, and others refuse it."""
    path, seen = shm / f"{prefix()}a.slab", []
    unlink = Path.unlink

    def looked(self: Path, missing_ok: bool = False) -> None:
        if path.exists():
            seen.append(path.stat().st_nlink)
        unlink(self, missing_ok=missing_ok)

    monkeypatch.setattr(Path, "unlink", looked)
    file, made = open_or_create(path, "k", 1, lambda: 10**5, {})
    os.close(file)
    assert made and seen == [1] and remove_unused(shm) == [path]


def kept(folder: Path) -> Disk:
    """Return a disk level that has written sample 3."""
    level = Disk(folder, "key", 5)
    level.write(3, 1, b"picture")
    level.close()
    return level


def test_the_disk_level_is_for_its_user_alone(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        level = kept(tmp_path / "disk")
    finally:
        os.umask(before)
    assert level.folder.stat().st_mode & 0o777 == 0o700
    assert {file.stat().st_mode & 0o777 for file in level.folder.iterdir()} == {0o600}
    assert Disk(tmp_path / "disk", "key", 5).read(3) == (b"picture", 1)


@pytest.mark.parametrize(
    "trick",
    [
        pytest.param("folder's owner", marks=as_root),
        "folder's rights",
        "folder is a link",
        pytest.param("file's owner", marks=as_root),
        "file's rights",
        "file is a link",
        "pipe",
    ],
)
def test_a_disk_level_of_another_user_is_not_read(tmp_path: Path, trick: str) -> None:
    """The folder's name can be computed, and a CRC is no signature: the pictures were trained with.

    A pipe with the name of an index let the cache wait for ever.
    """
    top = tmp_path / "disk"
    level = kept(top)
    files = sorted(level.folder.iterdir())
    match trick:
        case "folder's owner":
            os.chown(level.folder, STRANGER, STRANGER)
        case "folder's rights":
            level.folder.chmod(0o777)
        case "folder is a link":
            level.folder.rename(top / "elsewhere")
            level.folder.symlink_to(top / "elsewhere")
        case "file's owner":
            os.chown(files[0], STRANGER, STRANGER)
        case "file's rights":
            files[0].chmod(0o666)
        case "file is a link":
            files[0].rename(top / "elsewhere")
            files[0].symlink_to(top / "elsewhere")
        case "pipe":
            files[0].unlink()
            os.mkfifo(files[0])
    level = Disk(top, "key", 5)
    assert level.read(3) is None
    if trick.startswith("folder"):
        with pytest.warns(UserWarning, match=re.escape(str(top))):
            level.write(3, 1, b"picture")
        assert usage(top) == [] and drop(top) == []
    else:
        assert len(usage(top)) == 1
    level.close()

"""One run at a time saves into a folder: a second one is refused by name, dead ones block none."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tfcommx.checkpoint import lock
from tfcommx.checkpoint.lock import LOCK, FolderInUse, Owner

FIRST, SECOND = Owner("first", 0, "here", 1), Owner("second", 0, "here", 1)


@pytest.fixture(autouse=True)
def no_locks_left(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(lock, "WAIT_SECONDS", 0.3)
    yield
    for folder in list(lock._held):
        lock.release(folder)


def start_holder(folder: Path, owner: Owner) -> int:
    """Let another process take the lock; return its number."""
    read, write = os.pipe()
    if child := os.fork():
        os.close(write)
        with os.fdopen(read) as told:
            assert told.read() == "taken"
        return child
    try:
        signal.alarm(60)  # It ends also if the test fails before it can
        lock.take(folder, owner)
        os.write(write, b"taken")
        os.close(write)
        signal.pause()
    finally:
        os._exit(0)


@pytest.fixture
def other(tmp_path: Path) -> Iterator[int]:
    """A process of the first run that saves into tmp_path."""
    child = start_holder(tmp_path, FIRST)
    yield child
    end(child)


def end(child: int) -> None:
    try:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    except (ProcessLookupError, ChildProcessError):
        pass


def owner_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / LOCK).read_text())


def test_a_second_run_is_refused_by_name(other: int, tmp_path: Path) -> None:
    """Two runs that saved into one folder deleted each other's files.

    Of 488 looks at the folder, 88 found a whole checkpoint.
    """
    with pytest.raises(FolderInUse, match=rf"first\b.*\b{other}\b"):
        lock.take(tmp_path, SECOND)


@pytest.mark.parametrize("mode, readers", [(0o755, 0), (0o775, 0o040), (0o777, 0o044)])
def test_only_users_that_can_write_into_the_folder_can_lock_it(
    mode: int, readers: int, tmp_path: Path
) -> None:
    """Any user that could read the folder could hold the lock, and no run could save."""
    tmp_path.chmod(mode)
    lock.take(tmp_path, FIRST)
    assert (tmp_path / LOCK).stat().st_mode & 0o777 == 0o600 | readers
    (tmp_path / LOCK).unlink()
    lock._replace(tmp_path, FIRST)
    assert (tmp_path / LOCK).stat().st_mode & 0o777 == 0o600 | readers


def test_a_run_that_was_killed_blocks_no_other(other: int, tmp_path: Path) -> None:
    end(other)
    assert owner_of(tmp_path)["run"] == "first"
    lock.take(tmp_path, SECOND)
    assert owner_of(tmp_path)["run"] == "second"


def test_a_run_that_ends_meanwhile_is_waited_for(
    other: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pod that terminates, or a job that was put back into the queue, needs a moment to end."""
    monkeypatch.setattr(lock, "WAIT_SECONDS", 30.0)
    monkeypatch.setattr(lock.time, "sleep", lambda seconds: end(other))
    lock.take(tmp_path, SECOND)


def test_ranks_of_one_run_share_a_folder(other: int, tmp_path: Path) -> None:
    lock.take(tmp_path, FIRST)  # A rank on another host that sees the same folder
    assert owner_of(tmp_path)["pid"] == other


def test_the_next_generation_takes_the_folder_and_the_one_before_saves_no_more(
    tmp_path: Path,
) -> None:
    """A host that cannot be reached may still run the ranks of the generation before."""
    lock.take(tmp_path, FIRST)
    child = start_holder(tmp_path, FIRST._replace(generation=1))
    try:
        with pytest.raises(FolderInUse, match=rf"\b{child}\b"):
            lock.take(tmp_path, FIRST)
        with pytest.raises(FolderInUse):
            lock.take(tmp_path, FIRST)  # Again, at the save that follows
    finally:
        end(child)


def test_a_run_that_has_ended_leaves_no_lock_file(tmp_path: Path) -> None:
    lock.take(tmp_path, FIRST)
    lock.take(tmp_path, FIRST)
    lock.release(tmp_path)
    assert not (tmp_path / LOCK).exists()
    end(start_holder(tmp_path, SECOND))


def test_a_process_that_was_forked_does_not_keep_the_lock(tmp_path: Path) -> None:
    """Such as one that reads data, and outlives its parent."""
    lock.take(tmp_path, FIRST)
    child = start_holder(tmp_path / "another", FIRST)
    os.close(lock._held.pop(tmp_path))  # As at the death of this process
    lock.take(tmp_path, SECOND)
    end(child)
    assert owner_of(tmp_path)["run"] == "second"


def test_a_folder_that_was_removed_meanwhile_is_taken_again(tmp_path: Path) -> None:
    lock.take(tmp_path / "run", FIRST)
    (tmp_path / "run" / LOCK).unlink()
    (tmp_path / "run").rmdir()
    lock.take(tmp_path / "run", FIRST)
    assert owner_of(tmp_path / "run")["run"] == "first"


@pytest.mark.parametrize("text", ["", "{", "[]", '{"run": "first"}', '{"run": 1, "pid": "x"}'])
def test_a_damaged_lock_file_of_a_dead_run_blocks_no_other(text: str, tmp_path: Path) -> None:
    (tmp_path / LOCK).write_text(text)
    lock.take(tmp_path, SECOND)
    assert owner_of(tmp_path)["run"] == "second"


def test_a_link_in_the_place_of_a_lock_file_is_not_followed(tmp_path: Path) -> None:
    """In a folder that several users write to, it emptied the file to which it led."""
    letter = tmp_path / "letter"
    letter.write_text("Dear reader")
    (tmp_path / LOCK).symlink_to(letter)
    with pytest.raises(OSError, match="symbolic link"):
        lock.take(tmp_path, FIRST)
    assert letter.read_text() == "Dear reader" and lock.seen_owner(tmp_path) is None


@pytest.mark.parametrize("kind", ["pipe", "long", "deep"])
def test_what_is_no_lock_file_names_no_owner(kind: str, tmp_path: Path) -> None:
    """Reading a pipe that no process writes to waited for ever."""
    path = tmp_path / LOCK
    if kind == "pipe":
        os.mkfifo(path)
    else:
        text = json.dumps(FIRST._asdict())
        path.write_text(" " * 10**6 + text if kind == "long" else "[" * 10**6)
    with ThreadPoolExecutor() as pool:
        reading = pool.submit(lock.seen_owner, tmp_path)
        try:
            assert reading.result(timeout=10) is None
        finally:
            if kind == "pipe":  # Ends a reader that waits
                os.close(os.open(path, os.O_RDWR | os.O_NONBLOCK))


def the_second_run_ends_the_first(folder: Path) -> None:
    """Start another run in the folder that this process holds; it is refused to this one then."""
    child = start_holder(folder, SECOND)
    try:
        with pytest.raises(FolderInUse, match=rf"second\b.*\b{child}\b"):
            lock.take(folder, FIRST)
    finally:
        end(child)


def test_on_a_file_system_without_locks_the_run_that_came_first_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lustre without `-o flock` refuses every lock."""

    def refuse(opened: int, kind: int) -> None:
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", refuse)
    lock.take(tmp_path, FIRST)
    lock.take(tmp_path, FIRST)
    the_second_run_ends_the_first(tmp_path)


def without_locks_of_other_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every lock succeed, as for processes of two hosts that each have their own locks."""
    monkeypatch.setattr(fcntl, "flock", lambda opened, kind: None)


def test_where_each_host_has_its_own_locks_the_run_that_came_first_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With `localflock` of Lustre two runs saved into one folder, and each deleted files."""
    without_locks_of_other_hosts(monkeypatch)
    lock.take(tmp_path, FIRST)
    the_second_run_ends_the_first(tmp_path)
    (tmp_path / LOCK).unlink()  # As at the end of the second run
    lock.take(tmp_path, FIRST)


def test_a_rank_whose_host_has_its_own_locks_leaves_the_name_of_rank_0(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The ranks were told that they do not see the files of rank 0."""
    without_locks_of_other_hosts(monkeypatch)
    lock.take(tmp_path, FIRST)
    end(start_holder(tmp_path, FIRST))
    assert owner_of(tmp_path)["pid"] == os.getpid()


def test_forks_of_one_process_are_different_runs() -> None:
    """They were one run, and saved into one folder at once."""
    read, write = os.pipe()
    if not (child := os.fork()):
        os.write(write, Owner.here().run.encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as told:
        assert told.read() != Owner.here().run
    os.waitpid(child, 0)
    assert Owner.here().run == Owner.here().run


def test_the_lock_file_of_another_user_blocks_only_while_its_run_lives(
    other: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a folder of a group, the file of a dead run could not be opened for writing."""
    opened = os.open

    def open_for_reading(path: Any, flags: int, *rest: Any, **options: Any) -> int:
        if str(path).endswith(LOCK) and flags & os.O_ACCMODE != os.O_RDONLY:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return opened(path, flags, *rest, **options)

    monkeypatch.setattr(os, "open", open_for_reading)
    with pytest.raises(FolderInUse, match=r"first\b"):
        lock.take(tmp_path, SECOND)
    end(other)
    lock.take(tmp_path, SECOND)
    assert owner_of(tmp_path)["run"] == "second"
    with pytest.raises(PermissionError):
        lock.take(tmp_path / "new", SECOND)


def test_a_file_system_that_numbers_files_anew_is_no_endless_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lock, "is_still_at", lambda path, opened: False)
    with pytest.raises(OSError, match=LOCK):
        lock.take(tmp_path, FIRST)


def test_a_lock_file_that_an_nfs_server_has_lost_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """ESTALE at each later save ended the run after the third."""
    lock.take(tmp_path, FIRST)
    fstat, stale = os.fstat, lock._held[tmp_path.resolve()]

    def refuse(opened: int) -> os.stat_result:
        if opened == stale:
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
        return fstat(opened)

    monkeypatch.setattr(os, "fstat", refuse)
    (tmp_path / LOCK).unlink()
    monkeypatch.setattr(os, "close", lambda opened: None)  # The new file has another number
    lock.take(tmp_path, FIRST)
    monkeypatch.undo()
    os.close(stale)
    assert owner_of(tmp_path)["run"] == "first"

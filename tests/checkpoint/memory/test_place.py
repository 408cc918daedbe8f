"""The folder of snapshots: whole files count, damaged ones do not, other users cannot read it."""

from __future__ import annotations

import contextlib
import os
import re
import resource
import stat
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import tensorflow as tf

from tfcommx.checkpoint import newest
from tfcommx.checkpoint.files import Head, memory_model_name, residuals_name
from tfcommx.checkpoint.newest import choose, missing
from tfcommx.checkpoint.place import Held, SnapshotFolder, head_array, needed


def head(save: int, ranks: int = 2) -> Head:
    return Head(save, 0, ranks, step=save + 1, notes={"run": "a run"})


def fill(place: SnapshotFolder, one: Head, ranks: list[int]) -> None:
    place.make()
    place.write(memory_model_name(one.save), {"weight0": np.arange(1000.0)})
    for rank in ranks:
        arrays = {"head": head_array(one), "own0": np.full(1000, float(rank))}
        place.write(residuals_name(one.save, rank), arrays)


def test_whole_files_are_found_and_private(tmp_path: Path) -> None:
    place = SnapshotFolder(tmp_path / "memory", Path("run"))
    fill(place, head(3), [0, 1])
    assert place.held()[3].head == head(3)
    assert sorted(place.held()[3].files) == sorted(needed(head(3)))
    for path in place.path.iterdir():
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(place.path.parent.stat().st_mode) == 0o700


@pytest.mark.parametrize("name", [memory_model_name(3), residuals_name(3, 1)])
@pytest.mark.parametrize("damage", ["cut", "flipped", "empty"])
def test_a_damaged_file_does_not_count_and_makes_room_for_a_copy(
    name: str, damage: str, tmp_path: Path
) -> None:
    place = SnapshotFolder(tmp_path / "memory", Path("run"))
    for one in (head(2), head(3)):
        fill(place, one, [0, 1])
    path = place.path / name
    data = bytearray(path.read_bytes())
    if damage == "flipped":
        data[len(data) // 2] ^= 1
    path.write_bytes({"cut": data[:-1000], "flipped": data, "empty": b""}[damage])
    assert name not in place.held()[3].files
    assert not path.exists()
    assert choose([place.held(), {}]) == head(2)


def test_hundreds_of_damaged_files_do_not_count_and_raise_nothing(tmp_path: Path) -> None:
    """Of 3,000 damaged snapshots 18 ended the restart: those with a damaged zip directory.

    `zipfile` and NumPy raise NotImplementedError, RuntimeError, EOFError and KeyError for them.
    """
    place = SnapshotFolder(tmp_path / "memory", Path("run"))
    fill(place, head(3), [0, 1])
    path = place.path / residuals_name(3, 1)
    whole = path.read_bytes()
    ends = [*range(150), *range(len(whole) - 300, len(whole))]
    for at, value in [(at, value) for at in ends for value in (0, 1, 255)]:
        path.write_bytes(whole[:at] + bytes([value]) + whole[at + 1 :])
        assert all(one.head == head(3) for one in place.held().values())
    path.write_bytes(whole)
    assert choose([place.held()]) == head(3)


@pytest.mark.parametrize("made", ["by another user", "open to others", "a link", "a file"])
@pytest.mark.parametrize("level", ["run", "checkpoint"])
def test_a_folder_that_was_made_before_is_refused(made: str, level: str, tmp_path: Path) -> None:
    """A folder that another user had made was used: he read the weights, and replaced snapshots."""
    if made == "by another user" and os.geteuid():
        pytest.skip("needs root")
    place = SnapshotFolder(tmp_path / "memory", Path("run"))
    if level == "checkpoint":
        place.path.parent.mkdir(mode=0o700)
    folder = place.path.parent if level == "run" else place.path
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    if made == "a link":
        folder.symlink_to(tmp_path / "elsewhere")
    elif made == "a file":
        folder.write_text("")
    else:
        folder.mkdir()
        folder.chmod(0o700 if made == "by another user" else 0o770)
        if made == "by another user":
            os.chown(folder, 12345, 12345)
    with pytest.raises(PermissionError, match=str(folder)):
        place.make()
    assert not list((tmp_path / "elsewhere").iterdir())


def test_a_link_in_the_way_of_a_file_is_not_followed(tmp_path: Path) -> None:
    """The names of files under way were known: a link under such a name was written through."""
    place, victim = SnapshotFolder(tmp_path / "memory", Path("run")), tmp_path / "victim"
    place.make()
    victim.write_text("mine")
    for name in (residuals_name(3, 0), f".{residuals_name(3, 0)}.part"):
        (place.path / name).symlink_to(victim)
    fill(place, head(3), [0, 1])
    assert victim.read_text() == "mine" and choose([place.held()]) == head(3)


def test_a_file_under_way_does_not_count(tmp_path: Path) -> None:
    place = SnapshotFolder(tmp_path / "memory", Path("run"))
    fill(place, head(3), [0])
    with contextlib.suppress(InterruptedError), place.writing(residuals_name(3, 1)) as file:
        file.write(b"half of it")
        assert choose([place.held()]) is None
        raise InterruptedError
    (place.path / f".{residuals_name(3, 1)}.0a1b2c3d.part").write_bytes(b"of a killed rank")
    assert choose([place.held()]) is None
    place.keep({3})
    assert not [path for path in place.path.iterdir() if path.suffix == ".part"]


def test_files_of_ranks_that_have_gone_are_deleted_with_their_save(tmp_path: Path) -> None:
    """After the loss of a host they filled the memory until the next restart."""
    place = SnapshotFolder(tmp_path / "memory", Path("run"))
    fill(place, head(3, ranks=4), [0, 1, 2, 3])
    fill(place, head(4), [0, 1])
    place.keep({3, 4}, 0)  # While save 4 is written
    assert choose([place.held()]) == head(4) and len(list(place.path.iterdir())) == 8
    fill(place, head(5), [0])
    place.keep({4, 5}, 0)
    assert {path.name for path in place.path.iterdir()} == {*needed(head(4)), *needed(head(5))[:2]}


@pytest.mark.parametrize("name", ["../model-0001.npz", "model-0001.keras", "/etc/passwd", ""])
def test_other_names_are_refused(name: str, tmp_path: Path) -> None:
    with (
        pytest.raises(ValueError, match=re.escape(repr(name))),
        SnapshotFolder(tmp_path, Path("run")).writing(name),
    ):
        pass


def held(one: Head, ranks: list[int]) -> dict[int, Held]:
    names = [memory_model_name(one.save), *(residuals_name(one.save, rank) for rank in ranks)]
    return {one.save: Held(one, dict.fromkeys(names, 10))}


def test_the_newest_save_whose_files_are_all_somewhere_is_chosen() -> None:
    first, second = head(4, ranks=3), head(5, ranks=3)
    left = held(first, [0, 1]) | held(second, [0])
    right = held(first, [2, 0]) | held(second, [2])
    assert choose([left, right]) == first  # No host has rank 1's file of the newer one
    assert choose([left | held(second, [0, 1]), right]) == second
    assert choose([{}, {}]) is None
    # Another generation's file with the same number
    assert choose([held(first, [0, 1]), held(first._replace(step=9), [2])]) is None


def test_after_the_loss_of_a_host_the_others_have_what_they_need() -> None:
    """Four hosts of two ranks, mirrored on the next one; ranks are numbered anew."""
    one = head(7, ranks=8)
    every = [held(one, [2 * host, 2 * host + 1, (2 * host - 2) % 8, (2 * host - 1) % 8])
             for host in range(4)]  # fmt: skip
    for lost in (1, 2, 3):
        left = [host for host in range(4) if host != lost]
        hosts = [f"node{host}" for host in left for _ in range(2)]
        everyone = [found for host in left for found in (every[host], {})]
        assert choose(everyone) == one
        assert missing(one, everyone, hosts) == []


def test_a_new_host_gets_what_it_needs_and_a_host_that_has_it_sends_it() -> None:
    one = head(7, ranks=2)
    everyone = [held(one, [0, 1]), {}]
    assert missing(one, everyone, ["red", "blue"]) == [
        (memory_model_name(7), 10, 0),
        (residuals_name(7, 1), 10, 0),
    ]


def test_files_of_another_generation_are_not_mixed(tmp_path: Path) -> None:
    """A host that was away came back with its files of the same save, of the generation before."""
    places = [SnapshotFolder(tmp_path / name, Path("run")) for name in ("red", "blue")]
    for rank, place in enumerate(places):
        fill(place, head(2)._replace(tag="run/0"), [0, 1])
        fill(place, head(3)._replace(tag=f"run/{rank}"), [rank])
    held = [place.held() for place in places]
    assert choose(held) == head(2)._replace(tag="run/0")


@pytest.mark.parametrize("number", [3, 4, 9])
def test_a_host_that_was_away_does_not_take_the_run_back(number: int) -> None:
    """Generation 1 continued from a file and numbered its snapshots from 0.

    The snapshot of generation 0 had a higher number on a host that came back, and was taken; with
    an equal one neither was.
    """
    away = held(head(number)._replace(tag="run/0"), [0, 1])
    newest_one = head(4)._replace(tag="run/1")
    stayed = held(newest_one, [0, 1])
    for everyone in ([stayed, away], [away, stayed]):
        assert choose(everyone) == newest_one
        here = everyone.index(stayed)
        names = [memory_model_name(4), residuals_name(4, 1 - here)]
        assert missing(newest_one, everyone, ["red", "blue"]) == [(n, 10, here) for n in names]


def test_a_metric_that_is_no_number_does_not_discard_a_snapshot(tmp_path: Path) -> None:
    """A NaN among the notes made the heads of two hosts differ, so that no snapshot was chosen."""
    places = [SnapshotFolder(tmp_path / name, Path("run")) for name in ("red", "blue")]
    for place in places:
        fill(place, head(3)._replace(notes={"rows": [{"loss": float("nan")}]}), [0, 1])
    chosen = choose([place.held() for place in places])
    assert chosen is not None and chosen.notes == {"rows": [{"loss": None}]}


def test_the_progress_of_saves_on_other_numbers_of_ranks_is_compared() -> None:
    """Step 170 of 200, before four ranks replaced two, is behind step 90 of 100."""
    disk, memory = (head(0)._replace(step=step, steps=n) for step, n in ((170, 200), (90, 100)))
    disk = disk._replace(notes={"run": "a run"})
    assert not newest._is_newer(disk, memory) and newest._is_newer(memory, disk)
    assert newest._is_newer(disk._replace(epoch=1, step=0, steps=0), memory)


def test_a_folder_whose_name_is_no_utf_8_has_snapshots(tmp_path: Path) -> None:
    place = SnapshotFolder(tmp_path, Path(os.fsdecode(b"caf\xe9")))
    assert place.path.name != SnapshotFolder(tmp_path, Path("cafe")).path.name


def test_a_host_without_room_receives_all_pieces_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its rank ended in the middle of a broadcast, in which the others waited."""
    received = []

    def broadcast(tensor: tf.Tensor, root: int, name: str) -> tf.Tensor:
        received.append(name)
        return tensor

    comm = SimpleNamespace(rank=1, broadcast=broadcast)
    monkeypatch.setattr(newest.process, "current", lambda: comm)
    monkeypatch.setattr(newest, "PIECE", 1000)
    place = SnapshotFolder(tmp_path / "memory", Path("run"))
    place.make()
    name, before = memory_model_name(3), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1500, before[1]))
    try:
        problem = newest._broadcast(place, name, 4500, 0, True)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert "File too large" in problem and len(received) == 5
    assert list(place.path.iterdir()) == []
    assert newest._broadcast(place, name, 4500, 0, True) == ""
    assert (place.path / name).stat().st_size == 4500

"""The newest checkpoint that is whole: in the memory of the hosts, or on disk.

After the loss of hosts every file of a snapshot lies on one of those that are left, or it is not
whole. Each host needs the files of the ranks that its ranks inherit from, and the model; what it
lacks, a host that has it broadcasts.

A save on disk is whole if every rank finds the files there that it would read.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple
from zipfile import ZipFile

import numpy as np
import tensorflow as tf

from tfcommx.checkpoint.files import (
    Head,
    fields_of,
    head_of,
    memory_model_name,
    model_name,
    read_heads,
    residuals_name,
)
from tfcommx.checkpoint.place import Held, SnapshotFolder, needed
from tfcommx.checkpoint.records import COPY, OptimizerRecord, read_residuals
from tfcommx.collectives import process
from tfcommx.core import CheckpointError, reading
from tfcommx.launch.supervision import Supervision, supervision

log = logging.getLogger("tfcommx")

# Saves that were looked at: folder, head, rank and number of ranks -> the head to take
_taken: dict[tuple[Path, str, int, int], Head] = {}


def read_inherited(
    folder: Path, head: Head, weights: Path
) -> tuple[list[list[OptimizerRecord]], str, str]:
    """Read the files of a save that this rank inherits; rank 0 also checks that of the model.

    Args:
        folder: of the save.
        head: of the save.
        weights: the model's file.

    Returns:
        The records of each file; the first file that is missing, and what is wrong with the first
        one that is damaged, empty if none is.
    """
    here = process.current()
    inherited = range(here.rank, head.ranks, here.topology.size)
    paths = [folder / residuals_name(head.save, rank) for rank in inherited]
    needed = [weights, *paths] if here.rank == 0 else paths
    if missing := next((str(path) for path in needed if not path.is_file()), ""):
        return [], missing, ""
    try:
        if here.rank == 0:
            with (
                reading("The model of a checkpoint", weights, COPY, CheckpointError),
                ZipFile(weights) as file,
            ):
                if damaged := file.testzip():
                    raise ValueError(f"a wrong checksum of {damaged}")
        files = [read_residuals(path) for path in paths]
    except CheckpointError as error:
        return [], "", str(error)
    return files, "", ""


def newest_whole(folder: Path, head: Head | None) -> Head | None:
    """Return a head, or that of the newest save before it if one of its files cannot be read.

    If there is no older save, or none is whole, the head itself: loading it says what is wrong.

    **Ranks:** all. **Cost:** where older saves are kept, every file of the newest is read once.
    """
    if head is None or not head.older:
        return head
    here = process.current()
    key = (folder.absolute(), repr(head), here.rank, here.topology.size)
    if key not in _taken:
        _taken[key] = _look(folder, head)
    return _taken[key]


def _look(folder: Path, head: Head) -> Head:
    here, first = process.current(), ""
    for number, one in enumerate((head, *head.older)):
        _, missing, problem = read_inherited(folder, one, folder / model_name(one.save))
        problems = here.gather_objects(problem or (missing and f"{missing} is missing."))
        reason = next((f"rank {rank}: {text}" for rank, text in enumerate(problems) if text), "")
        if not reason:
            if number and here.rank == 0:
                log.warning(
                    "The newest checkpoint, save %d of epoch %d, cannot be read by %s Save %d, of "
                    "epoch %d, is taken in its place.",
                    head.save,
                    head.epoch,
                    first,
                    one.save,
                    one.epoch,
                )
            return one._replace(older=head.older[number:])
        first = first or reason
    return head


# Of a head's notes: the supervised run that has saved it
RUN = "run"
# Bytes of one broadcast
PIECE = 1 << 28


class Newest(NamedTuple):
    """The checkpoint to go on from."""

    head: Head
    # Where its files are: the folder on disk, or that in this host's shared memory
    folder: Path
    # "memory" or "file"
    source: str


# Of each checkpoint folder what this generation found in memory; None: nothing
_found: dict[Path, Head | None] = {}


def newest(folder: Path) -> Newest | None:
    """Return the newest whole checkpoint; None if there is none.

    In memory it looks in the second generation of a supervised run and those after it, once.

    **Ranks:** all. **Cost:** as long as it has not looked, each host reads its snapshots, and what
    it lacks is broadcast. **Raises:** CheckpointError if checkpoint.json is damaged.
    """
    disk = newest_whole(folder, read_heads(folder)[0])
    supervised = supervision()
    if supervised is None or not supervised.generation:
        return None if disk is None else Newest(disk, folder, "file")
    place = SnapshotFolder(supervised.memory, folder)
    if folder not in _found:
        _found[folder] = _bring(place, supervised, disk)
    memory = _found[folder]
    if memory is not None and not _is_newer(disk, memory):
        return Newest(memory, place.path, "memory")
    return None if disk is None else Newest(disk, folder, "file")


def newest_of_run(folder: Path) -> Newest | None:
    """Return the newest whole checkpoint that an earlier generation of this run has saved.

    None in the first generation, and without a supervisor.

    **Ranks:** all. **Cost, Raises:** as `newest`.
    """
    supervised = supervision()
    if supervised is None or not supervised.generation:
        return None
    found = newest(folder)
    return found if found and found.head.notes.get(RUN) == supervised.run else None


def _is_newer(disk: Head | None, memory: Head) -> bool:
    """Tell whether a save of the same run is newer on disk than in memory."""
    if disk is None or disk.notes.get(RUN) != memory.notes.get(RUN):
        return False
    return (disk.epoch, disk.step) > (memory.epoch, memory.step)


def _bring(place: SnapshotFolder, supervised: Supervision, disk: Head | None) -> Head | None:
    """Find the newest whole snapshot, complete what each host needs of it, delete all others."""
    here = process.current()
    hosts = here.gather_objects(supervised.host)
    speaks = hosts.index(supervised.host) == here.rank
    make_on_all(place, speaks)
    own = place.held() if speaks else {}
    said = here.gather_objects({n: (fields_of(one.head), one.files) for n, one in own.items()})
    everyone = [
        {number: Held(head_of(fields), files) for number, (fields, files) in saves.items()}
        for saves in said
    ]
    head = choose(everyone)
    if head is not None and _is_newer(disk, head):
        head = None
    if head is not None:
        for name, size, root in missing(head, everyone, hosts):
            _broadcast(place, name, size, root, speaks)
    if speaks:
        place.keep(set() if head is None else {head.save})
    here.gather_objects("in place")
    return head


def make_on_all(place: SnapshotFolder, speaks: bool) -> None:
    """Make the folder of snapshots on each host, by the rank that speaks for it.

    **Ranks:** all. **Raises:** CheckpointError, on all, if a host has no folder that is private.
    """
    problem = ""
    if speaks:
        try:
            place.make()
        except OSError as error:
            problem = str(error)
    for rank, text in enumerate(process.current().gather_objects(problem)):
        if text:
            raise CheckpointError(
                "Snapshots in memory need a folder that only this user can enter, on each host. "
                f"Received, on rank {rank}: {text} Remove it, or leave `memory_every` out."
            )


def choose(everyone: Sequence[dict[int, Held]]) -> Head | None:
    """Return the newest save whose files are all somewhere; None if there is none.

    Args:
        everyone: what each rank's host has, by the number of the save.
    """
    for number in sorted({number for held in everyone for number in held}, reverse=True):
        parts = [held[number] for held in everyone if number in held]
        head = parts[0].head
        there = {name for part in parts for name in part.files}
        if all(part.head == head for part in parts) and there.issuperset(needed(head)):
            return head
    return None


def missing(
    head: Head, everyone: Sequence[dict[int, Held]], hosts: Sequence[str]
) -> list[tuple[str, int, int]]:
    """Return what some host needs and does not have: name, bytes, and a rank that has it.

    Args:
        head: of the save.
        everyone: what each rank's host has; empty of ranks that are not the first of their host.
        hosts: of each rank.
    """
    held = {
        hosts[rank]: (rank, found[head.save].files)
        for rank, found in enumerate(everyone)
        if head.save in found
    }
    wanted: set[str] = set()
    for host in dict.fromkeys(hosts):
        names = {memory_model_name(head.save)}
        for rank in (rank for rank, one in enumerate(hosts) if one == host):
            inherited = range(rank, head.ranks, len(hosts))
            names |= {residuals_name(head.save, other) for other in inherited}
        wanted |= names - set(held[host][1] if host in held else ())
    found = []
    for name in sorted(wanted):
        rank, files = next(one for one in held.values() if name in one[1])
        found.append((name, files[name], rank))
    return found


def _broadcast(place: SnapshotFolder, name: str, size: int, root: int, speaks: bool) -> None:
    """Give a file of rank `root`'s host to every host. **Ranks:** all."""
    here, target = process.current(), place.path / name
    writes = speaks and not target.exists()
    with contextlib.ExitStack() as files:
        source = files.enter_context(target.open("rb")) if here.rank == root else None
        copy = files.enter_context(place.writing(name)) if writes else None
        for start in range(0, size, PIECE):
            count = min(PIECE, size - start)
            mine = source.read(count) if source else bytes(count)
            with tf.device("/cpu:0"):
                tensor = tf.constant(np.frombuffer(mine, np.uint8))
                received = here.broadcast(tensor, root, f"tfcommx/snapshot/{name}/{start}")
            if copy:
                copy.write(received.numpy().tobytes())

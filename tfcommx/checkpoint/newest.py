"""Find the newest complete checkpoint: in the memory of the hosts, or on disk.

A snapshot is complete if each of its files is on one of the hosts. Each host needs the files of the
ranks that its ranks inherit from, and the model; another host broadcasts the missing files.

A save on disk is complete if every rank finds the files that it would read.
"""

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import tensorflow as tf

from tfcommx.checkpoint.files import (
    COPY,
    Head,
    fields_of,
    head_of,
    is_file,
    memory_model_name,
    model_name,
    models_in,
    read_heads,
    residuals_name,
)
from tfcommx.checkpoint.place import Held, SnapshotFolder, check_zip, needed
from tfcommx.checkpoint.records import OptimizerRecord, read_residuals
from tfcommx.collectives import process
from tfcommx.core import CheckpointError, log
from tfcommx.launch.supervision import Supervision, supervision

# Checked saves: folder, head, rank and number of ranks -> the head to load
_taken: dict[tuple[Path, str, int, int], Head] = {}


def read_inherited(
    folder: Path, head: Head, weights: Path
) -> tuple[list[list[OptimizerRecord]], str, str]:
    """Read the files of a save that this rank inherits; rank 0 also checks the model's file.

    Returns:
        The records of each file; the first missing file, empty if none; the error of the first
        damaged file, empty if none.
    """
    comm = process.current()
    inherited = range(comm.rank, head.ranks, comm.topology.size)
    paths = [folder / residuals_name(head.save, rank) for rank in inherited]
    needed = [weights, *paths] if comm.rank == 0 else paths
    if missing := next((str(path) for path in needed if not is_file(path)), ""):
        return [], missing, ""
    try:
        if comm.rank == 0:
            check_zip("The model of a checkpoint", weights, COPY)
        files = [read_residuals(path, head) for path in paths]
    except CheckpointError as error:
        return [], "", str(error)
    return files, "", ""


def newest_whole(folder: Path, head: Head | None) -> Head | None:
    """Return a head, or the head of the newest complete older save if a file cannot be read.

    **Ranks:** all. **Cost:** if older saves exist, every file of the newest is read once.
    """
    if head is None or not head.older:
        return head
    key = _key_of(folder, head)
    # All files of a save are read to check it, so `last`, `next_epoch` and `restore` share one look
    if key not in _taken:
        _taken[key] = _look(folder, head)
    return _taken[key]


def known_whole(folder: Path, head: Head | None) -> Head | None:
    """Return the result of an earlier `newest_whole`, or the head if there was none.

    **Ranks:** local; the same on all.
    """
    return None if head is None else _taken.get(_key_of(folder, head), head)


def _key_of(folder: Path, head: Head) -> tuple[Path, str, int, int]:
    comm = process.current()
    # The head as text, because its notes are a dict, which has no hash
    return folder.absolute(), repr(head), comm.rank, comm.topology.size


def _look(folder: Path, head: Head) -> Head:
    comm, first = process.current(), ""
    for number, candidate in enumerate((head, *head.older)):
        _, missing, problem = read_inherited(folder, candidate, folder / model_name(candidate.save))
        problems = comm.gather_objects(problem or (missing and f"{missing} is missing."))
        reason = next((f"rank {rank}: {text}" for rank, text in enumerate(problems) if text), "")
        if not reason:
            if number and comm.rank == 0:
                log.warning(
                    "The newest checkpoint, save %d of epoch %d, cannot be read by %s Save %d, of "
                    "epoch %d, is taken in its place.",
                    head.save,
                    head.epoch,
                    first,
                    candidate.save,
                    candidate.epoch,
                )
            return candidate._replace(older=head.older[number:])
        first = first or reason
    return head  # Loading it raises the error


# Key of a head's notes: the supervised run that has saved it
RUN = "run"
# Bytes of one broadcast
PIECE = 1 << 28


class Newest(NamedTuple):
    """The checkpoint from which a run resumes."""

    head: Head
    # Folder of its files, on disk or in this host's shared memory
    folder: Path
    # "memory" or "file"
    source: str


# Checkpoint folder -> head of the snapshot that this generation found in memory; None: none
_found: dict[Path, Head | None] = {}


def newest(folder: Path) -> Newest | None:
    """Return the newest complete checkpoint; None without one.

    The memory is searched once, from the second generation of a supervised run on.

    **Ranks:** all. **Cost:** in the first call each host reads its snapshots, and missing files are
    broadcast. **Raises:** CheckpointError if checkpoint.json is damaged.
    """
    head = read_heads(folder)[0]
    if head is None and process.current().rank == 0 and (models := models_in(folder)):
        # As after a copy of some files alone: a run would begin anew, and delete these
        log.warning(
            "%s has %s, but no checkpoint.json, which names the newest complete save: nothing is "
            "restored, and the first save of a new run deletes such files. Put checkpoint.json "
            "beside them, or, after a run that was killed in its first save, delete them.",
            folder,
            models[-1],
        )
    disk = newest_whole(folder, head)
    supervised = supervision()
    if supervised is None or not supervised.generation:
        return None if disk is None else Newest(disk, folder, "file")
    snapshot_folder = SnapshotFolder(supervised.memory, folder)
    # Once, because `_bring` deletes the other snapshots, and later calls must name the same one
    if folder not in _found:
        _found[folder] = _bring(snapshot_folder, supervised, disk)
    memory = _found[folder]
    if memory is not None and not _is_newer(disk, memory):
        return Newest(memory, snapshot_folder.path, "memory")
    return None if disk is None else Newest(disk, folder, "file")


def newest_of_run(folder: Path) -> Newest | None:
    """Return the newest complete checkpoint of the earlier generations of this run.

    None in the first generation, and without a supervisor.

    **Ranks:** all. **Cost, Raises:** as `newest`.
    """
    supervised = supervision()
    if supervised is None or not supervised.generation:
        return None
    checkpoint = newest(folder)
    return checkpoint if checkpoint and checkpoint.head.notes.get(RUN) == supervised.run else None


def continues_from_memory(folder: Path) -> bool:
    """Return True if this generation continues from a snapshot. **Ranks, Raises:** as `newest`."""
    checkpoint = newest_of_run(folder)
    return checkpoint is not None and checkpoint.source == "memory"


def _is_newer(disk: Head | None, memory: Head) -> bool:
    """Return True if a save of the same run is newer on disk than in memory."""
    # An earlier run in this folder may have come further, but this one continues its own steps
    if disk is None or disk.notes.get(RUN) != memory.notes.get(RUN):
        return False
    return _progress(disk) > _progress(memory)


def _progress(head: Head) -> tuple[int, float]:
    """Return the epochs that have ended, and the finished part of the next one."""
    # The part, because generations on other numbers of ranks have other numbers of steps
    return head.epoch, head.step / head.steps if head.steps else float(head.step)


def _bring(
    snapshot_folder: SnapshotFolder, supervised: Supervision, disk: Head | None
) -> Head | None:
    """Find the newest complete snapshot, send its files to the hosts, delete other snapshots."""
    comm = process.current()
    hosts = comm.gather_objects(supervised.host)
    speaks = hosts.index(supervised.host) == comm.rank
    make_on_all(snapshot_folder, speaks)
    own_saves = snapshot_folder.held() if speaks else {}
    rows = comm.gather_objects(
        {n: (fields_of(held.head), held.files) for n, held in own_saves.items()}
    )
    everyone = [
        {number: Held(head_of(fields), files) for number, (fields, files) in saves.items()}
        for saves in rows
    ]
    head = choose(everyone)
    if head is not None and _is_newer(disk, head):
        head = None
    if speaks:
        # Before the broadcasts, because the files of another generation's save may have the names
        # of those that are received
        own_heads = [held.head for held in own_saves.values()]
        snapshot_folder.keep({head.save} if head is not None and head in own_heads else set())
    if head is not None:
        files = missing(head, everyone, hosts)
        # A list, because each rank must take part in all broadcasts, also after its own failure
        problems = [_broadcast(snapshot_folder, *file, speaks) for file in files]
        # On all ranks, because a host without room would otherwise end its own ranks alone
        for rank, text in enumerate(comm.gather_objects(next(filter(None, problems), ""))):
            if text:
                raise CheckpointError(
                    "A host that continues from a snapshot in memory needs room for it in "
                    f"/dev/shm. Received, on rank {rank}: {text}. Enlarge it (--shm-size of a "
                    "container), or leave this host out."
                )
    # The other ranks of a host read the files after its first rank has stored them
    comm.gather_objects("in place")
    return head


def make_on_all(snapshot_folder: SnapshotFolder, speaks: bool) -> None:
    """Create the folder of snapshots on each host, by the rank with `speaks`.

    **Ranks:** all. **Raises:** CheckpointError, on all, if a host has no private folder.
    """
    problem = ""
    if speaks:
        try:
            snapshot_folder.make()
        except OSError as error:
            problem = str(error)
    for rank, text in enumerate(process.current().gather_objects(problem)):
        if text:
            raise CheckpointError(
                "Snapshots in memory need a folder that only this user can enter, on each host. "
                f"Received, on rank {rank}: {text} Remove it, or leave `memory_every` out."
            )


def choose(everyone: Sequence[dict[int, Held]]) -> Head | None:
    """Return the newest save of which some host has each file; None without one.

    The newest is of the latest generation, because each generation deletes the snapshots that it
    does not continue from, and numbers its own from 0 if it continues from a file. A host that was
    away may still hold those of an earlier one.

    `everyone` has, for each rank, the files of its host, by the number of the save.
    """
    # By the text of the head, because hosts may hold saves of one number and two generations, and
    # the notes of a head are a dict, which has no hash
    parts: dict[str, list[Held]] = {}
    for saves in everyone:
        for held in saves.values():
            parts.setdefault(repr(held.head), []).append(held)
    whole = [
        same[0].head
        for same in parts.values()
        if {name for part in same for name in part.files}.issuperset(needed(same[0].head))
    ]
    return max(whole, key=lambda head: (_generation_of(head), head.save), default=None)


def _generation_of(head: Head) -> int:
    """Return the generation that took a snapshot; -1 if its tag names none."""
    number = head.tag.rpartition("/")[2]
    return int(number) if number.isdecimal() else -1


def missing(
    head: Head, everyone: Sequence[dict[int, Held]], hosts: Sequence[str]
) -> list[tuple[str, int, int]]:
    """Return the files that some host lacks: name, bytes, and a rank whose host has it.

    `everyone` is as for `choose`, but empty for all ranks of a host except its first.
    """
    held = {
        hosts[rank]: (rank, saves[head.save].files)
        for rank, saves in enumerate(everyone)
        if head.save in saves and saves[head.save].head == head
    }
    wanted: set[str] = set()
    for host in dict.fromkeys(hosts):
        names = {memory_model_name(head.save)}
        for rank in (rank for rank, rank_host in enumerate(hosts) if rank_host == host):
            inherited = range(rank, head.ranks, len(hosts))
            names |= {residuals_name(head.save, old_rank) for old_rank in inherited}
        wanted |= names - set(held[host][1] if host in held else ())
    rows = []
    # Sorted, because a set of text has another order in each process, and files are broadcast in
    # turn
    for name in sorted(wanted):
        rank, files = next(row for row in held.values() if name in row[1])
        rows.append((name, files[name], rank))
    return rows


def _broadcast(
    snapshot_folder: SnapshotFolder, name: str, size: int, root: int, speaks: bool
) -> str:
    """Broadcast a file of rank `root`'s host to every host.

    Returns:
        The reason why this rank could not write it; empty if it did, or another rank does.

    **Ranks:** all.
    """
    target, problem = snapshot_folder.path / name, ""
    pieces = _pieces(target, size, root)
    try:
        if speaks and not target.exists():
            with snapshot_folder.writing(name) as file:
                file.writelines(piece.numpy().tobytes() for piece in pieces)
    except OSError as error:
        problem = str(error)
    # The rest, too, after a failure or without a file: the other ranks would wait
    for _ in pieces:
        pass
    return problem


def _pieces(path: Path, size: int, root: int) -> Iterator[tf.Tensor]:
    """Broadcast the file of rank `root`, piece by piece. **Ranks:** all, to the last piece."""
    comm = process.current()
    with path.open("rb") if comm.rank == root else contextlib.nullcontext() as source:
        # In pieces, because a collective carries at most 2^31 - 1 entries
        for start in range(0, size, PIECE):
            count = min(PIECE, size - start)
            piece = source.read(count) if source else bytes(count)
            with tf.device("/cpu:0"):
                tensor = tf.constant(np.frombuffer(piece, np.uint8))
                received = comm.broadcast(tensor, root, f"tfcommx/snapshot/{path.name}/{start}")
            yield received

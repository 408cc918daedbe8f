"""The files of a checkpoint: their names, and writing each one atomically."""

from __future__ import annotations

import contextlib
import json
import os
import re
import tempfile
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from tfcommx.collectives import process
from tfcommx.core import CheckpointError, json_text, log, reading, require_equal, write_text

HEAD = "checkpoint.json"
# Remedy for a damaged file
COPY = "Put a whole copy in its place."

# Groups: number of the save of a model; number of the save of residuals, their rank. With names
# that users do not give their own files, because a Checkpoint deletes and replaces such files
_OURS = re.compile(r"tfcommx-(\d{4,})\.keras|residuals-(\d{4,})-rank-(\d{4,})\.npz")
# The same for partial files of a killed run (`replacing` names them)
_HALF = re.compile(
    r"\.(?:tfcommx-\d{4,}|checkpoint|residuals-\d{4,}-rank-(\d{4,}))-[0-9a-f]{8}"
    r"\.(?:keras|json|npz)"
)


class Head(NamedTuple):
    """Contents of checkpoint.json: the last complete save."""

    # Number of the save, >= 0
    save: int
    # The last epoch that had ended, from 0; -1: none
    epoch: int
    # Number of ranks that saved, >= 1
    ranks: int
    # Finished steps of the current epoch, >= 0
    step: int = 0
    # Steps of the current epoch; 0 at the end of an epoch, or if unknown
    steps: int = 0
    # Values of the saving program, as JSON; NaN is read back as None
    notes: dict[str, Any] = {}  # noqa: RUF012 - never changed
    # False if some weight is NaN or infinite
    finite: bool = True
    # Older saves that are kept, the newest first; each with an empty `older`
    older: tuple[Head, ...] = ()
    # Random text that all files of the save repeat; empty if the file was written by hand
    tag: str = ""


class UnreadableHead(CheckpointError, OSError):
    """A checkpoint.json that the system does not let a rank read, such as by a stale mount."""


# Key of the error that a rank gathers if the system does not let it read its head
UNREADABLE = "unreadable"


def read_heads(folder: Path) -> list[Head | None]:
    """Return the contents of checkpoint.json on each rank; None for a rank that sees no file.

    **Ranks:** all. **Raises:** on all, CheckpointError if a file is damaged, UnreadableHead if the
    system does not let a rank read it, ConfigurationError if the ranks name different folders.
    """
    seen: dict[str, Any] | str | None
    try:
        own_head = _read_head(folder / HEAD)
        seen = fields_of(own_head) if isinstance(own_head, Head) else own_head
    except OSError as error:  # Raised on all ranks below, because the others wait in the gather
        seen = {UNREADABLE: str(error)}
    # Each rank reads the file itself, because a folder on its node's own disk may lack it
    everyone = process.current().gather_objects((str(folder), seen))
    # Compared first, because other differences follow from different folders
    require_equal("folder of a checkpoint", [name for name, _ in everyone])
    for rank, (_, row) in enumerate(everyone):
        if isinstance(row, dict) and UNREADABLE in row:
            raise UnreadableHead(
                f"A checkpoint.json that every rank can read is required. Received, on rank {rank}:"
                f" {row[UNREADABLE]}. Check the mount, the links and the rights of {folder}."
            )
    heads = [head_of(row) if isinstance(row, dict) else row for _, row in everyone]
    for rank, head in enumerate(heads):
        if isinstance(head, str):
            raise CheckpointError(
                f'{folder / HEAD} must name a save, such as {{"save": 3, "epoch": 3, "ranks": '
                f"4}}. Received {head[:80]!r} on rank {rank}. Write into it what lies beside it "
                f"({model_name(3)}, {residuals_name(3, 0)} to rank-0003.npz are save 3 of 4 "
                "ranks), or delete it to begin anew."
            )
    return [head for head in heads if not isinstance(head, str)]


def read_own_head(folder: Path) -> Head | None:
    """Return checkpoint.json as this rank sees it; None if it cannot be read, or is damaged."""
    try:
        head = _read_head(folder / HEAD)
    except OSError:
        return None
    return head if isinstance(head, Head) else None


def _read_head(path: Path) -> Head | str | None:
    """Return the head; the text of a damaged file; None without a file. **Raises:** OSError."""
    try:
        text = path.read_text(errors="replace")
    except (FileNotFoundError, NotADirectoryError):
        # A run would take a link to a disk that is not mounted for no checkpoint, and begin anew
        if path.is_symlink():
            raise
        return None
    try:
        return head_of(json.loads(text))
    # `int` overflows for the Infinity that Python reads, and nested brackets recurse
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError):
        return text


def head_of(fields: dict[str, Any]) -> Head:
    """Return the head in a JSON object; fields that are left out are 0 or empty.

    **Raises:** ValueError, TypeError, KeyError, AttributeError or OverflowError for anything else.
    """
    head = Head(
        **{name: int(fields[name]) for name in ("save", "epoch", "ranks")},
        step=int(fields.get("step", 0)),
        steps=int(fields.get("steps", 0)),
        notes=dict(fields.get("notes", {})),
        finite=bool(fields.get("finite", True)),
        older=tuple(map(head_of, fields.get("older", ()))),
        tag=str(fields.get("tag", "")),
    )
    # A user may write this file by hand, as the error of `read_heads` advises
    if head.save < 0 or head.epoch < -1 or head.ranks < 1 or min(head.step, head.steps) < 0:
        raise ValueError(f"numbers out of range: {head}")
    return head


def fields_of(head: Head) -> dict[str, Any]:
    """Return a head as a JSON object, the inverse of `head_of`."""
    return head._asdict() | {"older": [fields_of(older_head) for older_head in head.older]}


def write_head(head: Head, folder: Path) -> None:
    """Write checkpoint.json; ranks that share a folder replace it by equal files."""
    write_text(folder / HEAD, json_text(fields_of(head)) + "\n")


def put_back_head(folder: Path, failed: Head, before: Head | None) -> None:
    """Write the head before a failed save again, if checkpoint.json names that one already."""
    if not names_save(folder, failed):
        return
    with contextlib.suppress(OSError):  # Then the new head stays, with its files
        if before is None:
            (folder / HEAD).unlink()
        else:
            write_head(before, folder)


def names_save(folder: Path, head: Head) -> bool:
    """Return True unless checkpoint.json, as this rank sees it, names another save, or none."""
    try:
        seen = _read_head(folder / HEAD)
    except OSError:  # Unknown, so the files of the save must stay
        return True
    # The number alone may be that of another run's save
    return isinstance(seen, Head) and (seen.save, seen.tag) == (head.save, head.tag)


@contextlib.contextmanager
def arrays_in(path: Path, kind: str, remedy: str = COPY) -> Iterator[np.lib.npyio.NpzFile]:
    """Open a file of arrays for a block, which reads them. **Raises:** CheckpointError."""
    with reading(kind, path, remedy, CheckpointError), np.load(path) as stored:
        yield stored


def model_name(save: int) -> str:
    """Return the name of a save's model, such as tfcommx-0003.keras."""
    return f"tfcommx-{save:04d}.keras"


def memory_model_name(save: int) -> str:
    """Return the name of the model of a save in memory, such as model-0003.npz."""
    return f"model-{save:04d}.npz"


def residuals_name(save: int, rank: int) -> str:
    """Return the name of a rank's file of a save, such as residuals-0003-rank-0000.npz."""
    return f"residuals-{save:04d}-rank-{rank:04d}.npz"


def remove_other_saves(folder: Path, saves: Collection[int], rank: int, ranks: int) -> None:
    """Delete this rank's files of all saves except `saves`; keep files with other names.

    A warning names a file that cannot be deleted, such as one of another user.
    """
    # Not raised, because the new save is complete, and an error on one rank alone would end the run
    problem = ""
    for old in _entries(folder):
        match, half = _OURS.fullmatch(old.name), _HALF.fullmatch(old.name)
        if match and int(match[1] or match[2]) not in saves:
            writer = int(match[3] or 0)
        elif half:
            writer = int(half[1] or 0)
        else:
            continue
        # Files of ranks that no longer exist, from an earlier run with more, are divided, too
        if writer % ranks == rank:
            try:
                old.unlink(missing_ok=True)
            except OSError as error:
                problem = problem or str(error)
    if problem:
        log.warning(
            "Log of rank %d: a file of an earlier save stays, because it cannot be deleted: %s. "
            "Delete it, because such files fill the disk.",
            rank,
            problem,
        )


def models_in(folder: Path) -> list[str]:
    """Return the names of the models of all saves in a folder, in order."""
    return sorted(
        path.name for path in _entries(folder) if (match := _OURS.fullmatch(path.name)) and match[1]
    )


def _entries(folder: Path) -> list[Path]:
    try:
        return list(folder.iterdir())
    except OSError:
        return []


def is_file(path: Path) -> bool:
    """Return True if this rank sees a file at `path`; False also for an error of the system."""
    # Not `Path.is_file`, which raises some errors, in front of a gather in which others would wait
    return os.path.isfile(path)


def remove_save(folder: Path, save: int, rank: int) -> None:
    """Delete a rank's files of a save; ignore files that cannot be deleted."""
    for name in [residuals_name(save, rank), *[model_name(save)] * (rank == 0)]:
        with contextlib.suppress(OSError):
            (folder / name).unlink()


def why_not_writable(folder: Path) -> str | None:
    """Create a folder; return the reason why it is not writable, None if it is."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as file:  # Permissions are not enough on NFS
            file.write(b"0")
    except FileExistsError:
        kind = f"a link to {os.readlink(folder)}" if folder.is_symlink() else "a file"
        return f"{folder} is {kind}, and no folder"
    except OSError as error:
        return str(error)
    return None

"""The files of a checkpoint: their names, and writing each one atomically."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
from collections.abc import Collection
from pathlib import Path
from typing import Any, NamedTuple

from tfcommx.comm import process
from tfcommx.terms import PlanError

HEAD = "checkpoint.json"

# Groups: number of the save of a model; number of the save of residuals, their rank
_OURS = re.compile(r"\.?(?:model-(\d{4,})\.keras|residuals-(\d{4,})-rank-(\d{4,})\.npz)")


class Head(NamedTuple):
    """What checkpoint.json says of the save that is whole."""

    # Number of the save, >= 0
    save: int
    # The epoch that had ended when it was saved, from 0; -1: none
    epoch: int
    # Number of ranks that saved, >= 1
    ranks: int
    # Steps taken since then: of the epoch under way, >= 0
    step: int = 0
    # Steps of the epoch under way; 0 if none is
    steps: int = 0
    # What the saving program wants to find again, as JSON has it
    notes: dict[str, Any] = {}  # noqa: RUF012 - never changed
    # Saves before this one that are kept, the newest first; each without older ones
    older: tuple[Head, ...] = ()


def read_heads(folder: Path) -> list[Head | None]:
    """Return what checkpoint.json says, as each rank sees it; None if a rank sees none.

    **Ranks:** all. **Raises:** PlanError, on all, if one is damaged.
    """
    own = _read_head(folder / HEAD)
    said = process.current().gather_objects(fields_of(own) if isinstance(own, Head) else own)
    everyone = [head_of(one) if isinstance(one, dict) else one for one in said]
    for rank, head in enumerate(everyone):
        if isinstance(head, str):
            raise PlanError(
                f'{folder / HEAD} must name a save, such as {{"save": 3, "epoch": 3, "ranks": '
                f"4}}. Received {head[:80]!r} on rank {rank}. Write into it what lies beside it "
                f"({model_name(3)}, {residuals_name(3, 0)} to rank-0003.npz are save 3 of 4 "
                "ranks), or delete it to begin anew."
            )
    return everyone


def read_own_head(folder: Path) -> Head | None:
    """Return what checkpoint.json says, as this rank alone sees it; None if it is damaged."""
    head = _read_head(folder / HEAD)
    return head if isinstance(head, Head) else None


def _read_head(path: Path) -> Head | str | None:
    """Return the head; the text of one that is damaged."""
    if not path.is_file():
        return None
    text = path.read_text(errors="replace")
    try:
        return head_of(json.loads(text))
    except (ValueError, TypeError, KeyError, AttributeError):
        return text


def head_of(found: dict[str, Any]) -> Head:
    """Return the head in a JSON object; what older writers left out is 0."""
    return Head(
        **{name: int(found[name]) for name in ("save", "epoch", "ranks")},
        step=int(found.get("step", 0)),
        steps=int(found.get("steps", 0)),
        notes=dict(found.get("notes", {})),
        older=tuple(map(head_of, found.get("older", ()))),
    )


def fields_of(head: Head) -> dict[str, Any]:
    """Return a head as a JSON object, of which `head_of` makes it again."""
    return head._asdict() | {"older": [fields_of(one) for one in head.older]}


def write_head(head: Head, folder: Path, rank: int) -> None:
    """Name the save that is whole; ranks that share a folder write equal files one by one."""
    part = folder / f".{HEAD}.{rank}"
    part.write_text(json.dumps(fields_of(head)) + "\n")
    put_in_place(part, folder / HEAD)


def model_name(save: int) -> str:
    """Return the name of a save's model.

    >>> model_name(3)
    'model-0003.keras'
    """
    return f"model-{save:04d}.keras"


def memory_model_name(save: int) -> str:
    """Return the name of the model of a save in memory.

    >>> memory_model_name(3)
    'model-0003.npz'
    """
    return f"model-{save:04d}.npz"


def residuals_name(save: int, rank: int) -> str:
    """Return the name of what a rank keeps of a save.

    >>> residuals_name(3, 0)
    'residuals-0003-rank-0000.npz'
    """
    return f"residuals-{save:04d}-rank-{rank:04d}.npz"


def remove_other_saves(folder: Path, kept: Collection[int], rank: int, ranks: int) -> None:
    """Delete this rank's files of all saves except some; files of other makers stay.

    Files of ranks that no longer exist, from an earlier run with more ranks, are divided among the
    ranks.
    """
    for old in folder.iterdir():
        found = _OURS.fullmatch(old.name)
        if found and int(found[1] or found[2]) not in kept:
            writer = int(found[3] or 0)
            if writer % ranks == rank:
                old.unlink(missing_ok=True)


def remove_save(folder: Path, save: int, rank: int) -> None:
    """Delete what a rank has written of a save, if anything; files that cannot be deleted stay."""
    names = [residuals_name(save, rank), *[model_name(save)] * (rank == 0)]
    for name in [*names, *(f".{name}" for name in names), f".{HEAD}.{rank}"]:
        with contextlib.suppress(OSError):
            (folder / name).unlink()


def put_in_place(part: Path, path: Path) -> None:
    """Give a written file its name; both are on the disk afterwards, also if the machine fails."""
    _sync(part)
    part.rename(path)
    try:
        _sync(path.parent)
    except OSError as error:
        # Some network file systems cannot, for a folder.
        if error.errno not in (errno.EINVAL, errno.EBADF, errno.ENOTSUP):
            raise


def _sync(path: Path) -> None:
    opened = os.open(path, os.O_RDONLY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)


def why_not_writable(folder: Path) -> str | None:
    """Make a folder; say why nothing can be written there."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        return str(error)
    if os.access(folder, os.W_OK | os.X_OK):
        return None
    return "no permission, or a read-only file system"

"""The files of a checkpoint: their names, and writing each one atomically."""

from __future__ import annotations

import contextlib
import json
import re
import tempfile
from collections.abc import Collection
from pathlib import Path
from typing import Any, NamedTuple

from tfcommx.collectives import process
from tfcommx.core import CheckpointError, require_equal, write_text

HEAD = "checkpoint.json"

# Groups: number of the save of a model; number of the save of residuals, their rank
_OURS = re.compile(r"model-(\d{4,})\.keras|residuals-(\d{4,})-rank-(\d{4,})\.npz")
# The same of files that a killed run has left half written (`replacing` names them); `.*.keras` and
# `.checkpoint.json.0` are those of older writers
_HALF = re.compile(
    r"\.model-\d{4,}(?:-[0-9a-f]{8})?\.keras|\.checkpoint(?:-[0-9a-f]{8})?\.json(?:\.\d+)?"
    r"|\.residuals-\d{4,}-rank-(\d{4,})(?:-[0-9a-f]{8})?\.npz"
)


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

    **Ranks:** all. **Raises:** CheckpointError, on all, if one is damaged, or if the ranks name
    different folders.
    """
    own = _read_head(folder / HEAD)
    seen = fields_of(own) if isinstance(own, Head) else own
    everyone = process.current().gather_objects((str(folder), seen))
    require_equal("folder of a checkpoint", [name for name, _ in everyone])
    heads = [head_of(one) if isinstance(one, dict) else one for _, one in everyone]
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
    """Return what checkpoint.json says, as this rank alone sees it; None if it is damaged."""
    head = _read_head(folder / HEAD)
    return head if isinstance(head, Head) else None


def _read_head(path: Path) -> Head | str | None:
    """Return the head; the text of one that is damaged."""
    if not path.is_file():
        return None
    try:
        text = path.read_text(errors="replace")
    except OSError as error:
        return str(error)
    try:
        return head_of(json.loads(text))
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError):
        return text


def head_of(found: dict[str, Any]) -> Head:
    """Return the head in a JSON object; what older writers left out is 0.

    **Raises:** ValueError, TypeError, KeyError, AttributeError or OverflowError for anything else.
    """
    head = Head(
        **{name: int(found[name]) for name in ("save", "epoch", "ranks")},
        step=int(found.get("step", 0)),
        steps=int(found.get("steps", 0)),
        notes=dict(found.get("notes", {})),
        older=tuple(map(head_of, found.get("older", ()))),
    )
    if head.save < 0 or head.epoch < -1 or head.ranks < 1 or min(head.step, head.steps) < 0:
        raise ValueError(f"numbers out of range: {head}")
    return head


def fields_of(head: Head) -> dict[str, Any]:
    """Return a head as a JSON object, of which `head_of` makes it again."""
    return head._asdict() | {"older": [fields_of(one) for one in head.older]}


def write_head(head: Head, folder: Path) -> None:
    """Name the save that is whole; ranks that share a folder write equal files one by one."""
    write_text(folder / HEAD, json.dumps(fields_of(head)) + "\n")


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
        found, half = _OURS.fullmatch(old.name), _HALF.fullmatch(old.name)
        if found and int(found[1] or found[2]) not in kept:
            writer = int(found[3] or 0)
        elif half:
            writer = int(half[1] or 0)
        else:
            continue
        if writer % ranks == rank:
            old.unlink(missing_ok=True)


def remove_save(folder: Path, save: int, rank: int) -> None:
    """Delete what a rank has written of a save, if anything; files that cannot be deleted stay."""
    for name in [residuals_name(save, rank), *[model_name(save)] * (rank == 0)]:
        with contextlib.suppress(OSError):
            (folder / name).unlink()


def why_not_writable(folder: Path) -> str | None:
    """Make a folder; return why nothing can be written there, None if it can."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as file:  # Permissions alone do not tell it on NFS
            file.write(b"0")
    except FileExistsError:
        return f"{folder} is a file, and no folder"
    except OSError as error:
        return str(error)
    return None

"""Save a checkpoint: rank 0 writes the model, every rank its residuals.

    folder/
      checkpoint.json                  written last: names the save that is whole, its epoch and
                                       step, the number of ranks, and older saves that are kept
      model-0003.keras                 of save 3: weights and optimizers' state, a plain Keras file
      residuals-0003-rank-0000.npz     one per rank: residuals and velocities, as they lie in its
                                       plans; sums of gradients; seeds

Saves are numbered, each one more than the last, also if an epoch is saved twice: no file of the
checkpoint that checkpoint.json names is ever replaced. So a run that is killed while it saves, or
has no room to, leaves the one before intact, or the new one. A second run is refused (lock.py),
because it would delete what this one has just written.
"""

from __future__ import annotations

import logging
import shutil
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras

from tfcommx.checkpoint import lock
from tfcommx.checkpoint.files import (
    Head,
    model_name,
    read_heads,
    read_own_head,
    remove_other_saves,
    remove_save,
    residuals_name,
    write_head,
)
from tfcommx.checkpoint.records import write_residuals
from tfcommx.collectives import process
from tfcommx.collectives.comm import Comm
from tfcommx.core import CheckpointError, local_path, replacing
from tfcommx.optim.centre import with_centre
from tfcommx.optim.step_boundary import consolidate
from tfcommx.optim.wrapped import trains_alone, wrapped_optimizers

log = logging.getLogger("tfcommx")

# Saves that may fail one after the other before a run ends
FAILURES = 3


class SaveError(CheckpointError, OSError):
    """A checkpoint that could not be written, on all ranks; the one before is intact."""


class Patience:
    """Lets a run go on if a save fails, until FAILURES have failed in a row."""

    def __init__(self) -> None:
        self._failures = 0

    def save(self, write: Callable[[], None]) -> None:
        """Save; log a failure on rank 0. **Raises:** SaveError for the last one in a row."""
        try:
            write()
        except SaveError as error:
            self._failures += 1
            if self._failures == FAILURES:
                raise
            if process.current().rank == 0:
                log.error(
                    "%s The run goes on, and tries again at the next save; it ends after %d "
                    "failures in a row.",
                    error,
                    FAILURES,
                )
        else:
            self._failures = 0


# Of each Comm, the folders into which its ranks save, and the name of their run
_claimed: weakref.WeakKeyDictionary[Comm, dict[Path, lock.Owner]] = weakref.WeakKeyDictionary()


def claim(folder: Path) -> list[int]:
    """Let no other run save into a folder, until `release` or the end of this process.

    Returns:
        The ranks that do not see the files of rank 0: their folder is another, of the same name.

    **Ranks:** all. **Raises:** SaveError, on all, if another run saves there, or if the lock file
    cannot be written.
    """
    here, owner, problem = process.current(), lock.Owner.here(), ""
    if here.rank == 0:
        problem = _problem_of_lock(folder, owner)
    (problem_of_root, of_root), *_ = here.gather_objects((problem, tuple(owner)))
    owner = lock.Owner._make(of_root)
    if not problem_of_root and here.rank and _speaks_for_node(here):
        problem = _problem_of_lock(folder, owner)
    rows = here.gather_objects((problem, lock.seen_owner(folder) == owner))
    for rank, (text, _) in enumerate(rows):
        if text:
            raise SaveError(
                f"One run at a time can save into a folder. Received {folder}; on rank {rank}: "
                f"{text}"
            )
    _claimed.setdefault(here, {})[folder] = owner
    return [rank for rank, (_, sees) in enumerate(rows) if not sees]


def release(folder: Path) -> None:
    """Let other runs save into a folder. **Ranks:** all."""
    _claimed.get(process.current(), {}).pop(folder, None)
    lock.release(folder)


def _problem_of_lock(folder: Path, owner: lock.Owner) -> str:
    try:
        lock.take(folder, owner)
    except OSError as error:
        return str(error)
    return ""


def _speaks_for_node(here: Comm) -> bool:
    """Return True for one rank of each node: the folder may be the node's own."""
    return here.rank % here.topology.slots == 0


def save(
    model: keras.Model,
    folder: str | Path,
    epoch: int,
    keep: int = 1,
    *,
    step: int = 0,
    steps: int = 0,
    notes: dict[str, Any] | None = None,
) -> None:
    """Write a whole checkpoint of `epoch`, then delete those that are not to be kept.

    Args:
        model: built, compiled with wrapped optimizers.
        folder: is made if it is not there.
        epoch: the epoch that has ended, from 0; -1: none.
        keep: saves that are kept, this one included, >= 1.
        step: steps taken since: of the epoch under way.
        steps: that the epoch under way has; 0 if none is.
        notes: what `last` is to return, as JSON has it; those of rank 0 count.

    **Ranks:** all, between the same two steps; with ElasticAveraging each when it likes: the lowest
    that is there writes, the centre in the place of its weights.
    **Raises:** SaveError, on all ranks, if one of them cannot write, as on a full disk, or if
    another run saves into the folder. The save before is intact, and nothing is left of this one.
    CheckpointError if the ranks name different folders, or an address such as gs://bucket/run.
    """
    here, folder = process.current(), local_path("folder", folder)
    if trains_alone(model):
        _save_centre(model, folder, Head(0, epoch, 1, step, steps, notes or {}), keep)
        return
    heads = read_heads(folder)
    if folder not in _claimed.get(here, {}):
        claim(folder)
        heads = read_heads(folder)  # Another run may have saved until now
    number = max((head.save + 1 for head in heads if head is not None), default=0)
    for optimizer in wrapped_optimizers(model):
        consolidate(optimizer)
    older = _older(heads[0], keep)
    head = Head(number, epoch, here.topology.size, step, steps, notes or {}, older)

    def write() -> None:
        folder.mkdir(parents=True, exist_ok=True)
        if _speaks_for_node(here):
            lock.take(folder, _claimed[here][folder])
        if here.rank == 0:
            _write_model(model, folder / model_name(number))
        write_residuals(model, folder / residuals_name(number, here.rank), here.rank == 0)

    def name() -> None:
        if _speaks_for_node(here):
            write_head(head, folder)

    for stage in (write, name):
        problems = here.gather_objects(_problem_of(stage, model, folder))
        if any(problems):
            remove_save(folder, number, here.rank)
            here.gather_objects("removed")
            rank = next(rank for rank, problem in enumerate(problems) if problem)
            raise SaveError(
                f"A checkpoint needs room in {folder}. Received, on rank {rank}: {problems[rank]} "
                "The checkpoint before is intact."
            )
    kept = {number, *(one.save for one in older)}
    remove_other_saves(folder, kept, here.rank, here.topology.size)


def _problem_of(stage: Callable[[], None], model: keras.Model, folder: Path) -> str:
    """Return why a part of saving failed on this rank; empty if it did not."""
    try:
        stage()
    except (OSError, RuntimeError) as error:  # The latter from HDF5, when it closes a file
        size = sum(one.value.dtype.size * one.value.shape.num_elements() for one in model.weights)
        free = shutil.disk_usage(folder).free if folder.is_dir() else 0
        return f"{error}; the weights have {size} bytes, and {free} are free there."
    return ""


def _write_model(model: keras.Model, path: Path) -> None:
    with replacing(path) as part:
        model.save(part)


def _older(before: Head | None, keep: int) -> tuple[Head, ...]:
    """Return the saves that are kept beside the new one, the newest first."""
    return () if before is None else (before._replace(older=()), *before.older)[: keep - 1]


def _save_centre(model: keras.Model, folder: Path, head: Head, keep: int) -> None:
    """Write what one rank has, with the centre as weights, while the other ranks train on.

    It is a checkpoint of one rank, from which any number of them starts; `head` lacks its number
    and the saves before. Rank 0 writes it; if that has died, the lowest that is there.
    """
    here = process.current()
    if here.rank != min(set(range(here.topology.size)) - here.membership.gone()):
        return
    try:
        lock.take(folder, lock.Owner.here())
    except OSError as error:
        raise SaveError(
            f"One run at a time can save into a folder. Received {folder}; on rank {here.rank}: "
            f"{error}"
        ) from error
    before = read_own_head(folder)
    number = 0 if before is None else before.save + 1
    older = _older(before, keep)
    with with_centre(model):
        _write_model(model, folder / model_name(number))
        write_residuals(model, folder / residuals_name(number, 0), True)
        write_head(head._replace(save=number, older=older), folder)
    remove_other_saves(folder, {number, *(one.save for one in older)}, 0, 1)

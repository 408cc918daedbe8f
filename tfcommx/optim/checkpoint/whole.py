"""Which saves on disk are whole: every rank looks at the files that it would read."""

from __future__ import annotations

import logging
from pathlib import Path
from zipfile import ZipFile

from tfcommx.comm import process
from tfcommx.optim.checkpoint.files import Head, model_name, residuals_name
from tfcommx.optim.checkpoint.records import COPY, OptimizerRecord, read_residuals
from tfcommx.terms import PlanError, reading

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
            with reading("The model of a checkpoint", weights, COPY), ZipFile(weights) as file:
                if damaged := file.testzip():
                    raise ValueError(f"a wrong checksum of {damaged}")
        files = [read_residuals(path, rank) for path, rank in zip(paths, inherited, strict=True)]
    except PlanError as error:
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

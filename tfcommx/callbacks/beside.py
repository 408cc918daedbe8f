"""Warn of Keras's callbacks that make ranks differ, stop one rank alone, or write one file.

On every rank, in this order:

    EarlyStopping()          decides by the metrics of its rank
    BroadcastState()         averages metrics, and warns
    TerminateOnNaN()         stops its rank alone
    CSVLogger("log.csv")     writes one file on all ranks
"""

import os
from collections.abc import Sequence
from typing import Any

import keras

from tfcommx.callbacks.agree import AgreeOnStop
from tfcommx.callbacks.average import AverageMetrics
from tfcommx.core import log

# Callback of Keras -> its attribute with the path that it writes to
_PATHS = {
    "ModelCheckpoint": "filepath",
    "OrbaxCheckpoint": "directory",
    "BackupAndRestore": "backup_dir",
    "CSVLogger": "filename",
    "TensorBoard": "log_dir",
}


def conflicts_of(
    callbacks: Sequence[keras.callbacks.Callback], average: type, in_lock_step: bool
) -> tuple[Any, ...]:
    """Return the callbacks that may conflict with those of other ranks, as plain data.

    Args:
        callbacks: of `fit`, in its order.
        average: a class that averages metrics, in addition to AverageMetrics.
        in_lock_step: False if each rank may stop and decide for itself.

    Returns:
        Names of callbacks that read metrics before they are averaged; True if TerminateOnNaN has no
        AgreeOnStop behind it; class and path of those that write a file or folder.
    """
    averages = _positions(callbacks, AverageMetrics, average)
    early = callbacks[: min(averages, default=0)]
    stops = _positions(callbacks, keras.callbacks.TerminateOnNaN)
    agreements = _positions(callbacks, AgreeOnStop)
    files = list(filter(None, map(_file, callbacks)))
    if not in_lock_step:
        return [], False, files
    deciding = (keras.callbacks.EarlyStopping, keras.callbacks.ReduceLROnPlateau)
    names = [
        type(callback).__name__
        for callback in early
        if isinstance(callback, deciding) or getattr(callback, "save_best_only", False)
    ]
    return names, max(stops, default=-1) > max(agreements, default=-1), files


def warn_of_conflicts(rows: Sequence[tuple[Any, ...]]) -> None:
    """Log a warning for each conflict between callbacks of several ranks.

    Args:
        rows: `conflicts_of` of each rank, in rank order.

    **Ranks:** one.
    """
    if len(rows) == 1:
        return
    early, stop_alone, files = zip(*rows, strict=True)
    for name in sorted(set().union(*early)):
        log.warning(
            "%s is before BroadcastState in the list of callbacks, so each rank decides by its own "
            "metrics. Put it behind BroadcastState, where it reads the metrics of all ranks.",
            name,
        )
    if any(stop_alone):
        log.warning(
            "TerminateOnNaN stops only the ranks that have the NaN in their loss, and the others "
            "would wait for them. Put cx.callbacks.AgreeOnStop() behind it."
        )
    ranks_of: dict[tuple[str, str], list[int]] = {}
    for rank, of_rank in enumerate(files):
        for file in dict.fromkeys(of_rank):
            ranks_of.setdefault(file, []).append(rank)
    for (name, path), ranks in ranks_of.items():
        if len(ranks) == 1:
            continue
        remedy = (
            'Give each rank a separate folder, such as f"backup/{cx.rank()}".'
            if name == "BackupAndRestore"
            else "Add it on rank 0 alone: if cx.is_chief(): callbacks.append(...)."
        )
        log.warning(
            "%s writes %s on %d ranks at once, such as %d and %d, which can damage or mix its "
            "contents if they share its file system. %s",
            name,
            path,
            len(ranks),
            *ranks[:2],
            remedy,
        )


def _positions(callbacks: Sequence[keras.callbacks.Callback], *classes: type) -> list[int]:
    return [position for position, part in enumerate(callbacks) if isinstance(part, classes)]


def _file(callback: keras.callbacks.Callback) -> tuple[str, str] | None:
    """Return the class of a callback of Keras, and the file or folder that it writes, if any."""
    for name, attribute in _PATHS.items():
        cls = getattr(keras.callbacks, name, None)  # Not each version of Keras has all
        if cls is not None and isinstance(callback, cls):
            path = os.fspath(getattr(callback, attribute))
            return name, path if "://" in path else os.path.abspath(path)
    return None

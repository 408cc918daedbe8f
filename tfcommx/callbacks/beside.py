"""Warn of Keras's callbacks that make ranks differ, stop one rank alone, or write one file.

On every rank, in this order:

    EarlyStopping()          decides by the metrics of its rank
    BroadcastState()         averages metrics, and warns
    TerminateOnNaN()         stops its rank alone
    CSVLogger("log.csv")     writes one file on all ranks
"""

import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from socket import gethostname
from typing import Any, NamedTuple

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
}


class File(NamedTuple):
    """A file or folder that a callback of one rank writes."""

    callback: str
    path: str
    # Two ranks write the same file if the path and one of these are equal
    host: str
    folder: str


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
        AgreeOnStop behind it; the fields of each `File`.
    """
    averages = _positions(callbacks, AverageMetrics, average)
    early = callbacks[: min(averages, default=0)]
    stops = _positions(callbacks, keras.callbacks.TerminateOnNaN)
    agreements = _positions(callbacks, AgreeOnStop)
    files = [tuple(file) for callback in callbacks for file in _files(callback)]
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
    for (name, path), ranks in _written_together(files).items():
        remedy = (
            'Give each rank a separate folder, such as f"backup/{cx.rank()}".'
            if name == "BackupAndRestore"
            else "Add it on rank 0 alone: if cx.is_chief(): callbacks.append(...)."
        )
        log.warning(
            "%s writes %s on %d ranks at once, such as %d and %d, which can damage it. %s",
            name,
            path,
            len(ranks),
            *ranks[:2],
            remedy,
        )


def _positions(callbacks: Sequence[keras.callbacks.Callback], *classes: type) -> list[int]:
    return [position for position, part in enumerate(callbacks) if isinstance(part, classes)]


def _files(callback: keras.callbacks.Callback) -> list[File]:
    """Return the file or folder that a callback of Keras writes; none for others."""
    for name, attribute in _PATHS.items():
        cls = getattr(keras.callbacks, name, None)  # Not each version of Keras has all
        if cls is not None and isinstance(callback, cls):
            path = os.fspath(getattr(callback, attribute))
            # An address is the same file on all hosts
            if "://" in path:
                return [File(name, path, "", "")]
            whole = Path(path).absolute()
            return [File(name, str(whole), gethostname(), _identity(whole))]
    return []


def _identity(path: Path) -> str:
    """Return a text that two hosts have in common if the path is on a file system of both."""
    # The nearest parent that exists, because the callback may make the others
    for folder in path.parents:
        try:
            status = folder.stat()
        except OSError:
            continue
        # With the time, because folders of two file systems may have the same inode number
        return f"{status.st_ino} {status.st_ctime_ns}"
    return ""


def _written_together(files: Sequence[Any]) -> dict[tuple[str, str], list[int]]:
    """Return (callback, path) -> the ranks that write the same file, if these are several."""
    by_path: dict[tuple[str, str], list[tuple[int, File]]] = {}
    for rank, of_rank in enumerate(files):
        for file in map(File._make, of_rank):
            by_path.setdefault((file.callback, file.path), []).append((rank, file))
    together = {}
    for key, rows in by_path.items():
        hosts = Counter(file.host for _, file in rows)
        folders = Counter(file.folder for _, file in rows)
        ranks = [rank for rank, file in rows if max(hosts[file.host], folders[file.folder]) > 1]
        if len(set(ranks)) > 1:
            together[key] = sorted(set(ranks))
    return together

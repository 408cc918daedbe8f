"""Save a checkpoint: rank 0 writes the model, every rank its residuals.

    folder/
      checkpoint.json                  written last: the last complete save, its epoch and step,
                                       the number of ranks, and older saves that are kept
      tfcommx-0003.keras               weights and optimizers' state of save 3, a plain Keras file
      residuals-0003-rank-0000.npz     one per rank: residuals and velocities in the order of its
                                       plans; sums of gradients; seeds

A run that is killed while it saves, or has no disk space, leaves either the previous checkpoint or
the new one intact. A second run is refused (lock.py), because it would delete the files of the
first.
"""

import contextlib
import errno
import functools
import json
import secrets
import shutil
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras

from tfcommx.checkpoint import lock
from tfcommx.checkpoint.files import (
    Head,
    UnreadableHead,
    model_name,
    names_save,
    put_back_head,
    read_heads,
    read_own_head,
    remove_other_saves,
    remove_save,
    residuals_name,
    write_head,
)
from tfcommx.checkpoint.newest import known_whole
from tfcommx.checkpoint.records import write_residuals
from tfcommx.checkpoint.state import not_finite_in
from tfcommx.collectives import process
from tfcommx.collectives.comm import Comm
from tfcommx.core import (
    CheckpointError,
    ConfigurationError,
    check_whole,
    json_text,
    local_path,
    log,
    replacing,
)
from tfcommx.optim.step_boundary import consolidate, with_centre
from tfcommx.optim.wrapped import trains_alone, wrapped_optimizers

# Errors of a folder without room; a limit to a file's size is one of the user's
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
# Consecutive failed saves after which a run ends
FAILURES = 3
# State of the folder after most failed saves
BEFORE = "An earlier checkpoint, if there is one, is intact."
# Consequence of a failed save, while another will follow
RETRY = (
    f"The run continues, and tries again at the next save; it ends after {FAILURES} failures in a "
    "row."
)


# Key of a head's notes: the epochs of a `fit` that was stopped after the save, as by EarlyStopping
STOPPED = "stopped"


class SaveError(CheckpointError, OSError):
    """A checkpoint could not be written; raised on all ranks; the previous one is intact."""


class Patience:
    """Tolerates failed saves, until FAILURES have failed in a row."""

    def __init__(self) -> None:
        self._failures = 0

    def save(self, write: Callable[[], None], then: str = RETRY) -> None:
        """Save; log a failure and its consequence `then` on one rank.

        **Raises:** SaveError after FAILURES in a row.
        """
        try:
            write()
        except SaveError as error:
            self._failures += 1
            if self._failures == FAILURES:
                raise
            if process.current().rank == _first_rank():
                log.error("%s %s", error, then)
        else:
            self._failures = 0


# Tags of the newest saves of this process, by their folder
_own_tags: dict[Path, str] = {}
# Comm -> the folders into which its ranks save, with the owner of each
_claimed: weakref.WeakKeyDictionary[Comm, dict[Path, lock.Owner]] = weakref.WeakKeyDictionary()


def _first_rank() -> int:
    """Return the lowest remaining rank: 0, unless it has left, as with ElasticAveraging."""
    comm = process.current()
    return min(set(range(comm.topology.size)) - comm.membership.gone())


def claim(folder: Path) -> list[int]:
    """Lock a folder against other runs, until `release` or the end of this process.

    Returns:
        The ranks that do not see the files of rank 0, because they have a separate folder of the
        same name.

    **Ranks:** all. **Raises:** SaveError, on all, if another run saves there, or if the lock file
    cannot be written.
    """
    comm, owner, problem = process.current(), lock.Owner.here(), ""
    if comm.rank == 0:
        problem = _problem_of_lock(folder, owner)
    (problem_of_root, of_root), *_ = comm.gather_objects((problem, tuple(owner)))
    owner = lock.Owner._make(of_root)
    # After rank 0, whose lock decides which run owns a folder that all nodes see
    if not problem_of_root and comm.rank and _speaks_for_node(comm):
        problem = _problem_of_lock(folder, owner)
    rows = comm.gather_objects((problem, lock.seen_owner(folder) == owner))
    for rank, (text, _) in enumerate(rows):
        if text:
            release(folder)  # For the other run, if the program continues
            raise SaveError(
                f"One run at a time can save into a folder. Received {folder}; on rank {rank}: "
                f"{text}"
            )
    _claimed.setdefault(comm, {})[folder] = owner
    return [rank for rank, (_, sees) in enumerate(rows) if not sees]


def release(folder: Path) -> None:
    """Unlock a folder. **Ranks:** all."""
    _claimed.get(process.current(), {}).pop(folder, None)
    lock.release(folder)


def _problem_of_lock(folder: Path, owner: lock.Owner) -> str:
    try:
        lock.take(folder, owner)
    except OSError as error:
        return str(error)
    return ""


def _speaks_for_node(comm: Comm) -> bool:
    """Return True for one rank of each node, because each node may have a separate folder."""
    return comm.rank % comm.topology.slots == 0


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
    """Write a complete checkpoint of `epoch`, then delete the saves beyond `keep`.

    Args:
        model: built, compiled with wrapped optimizers.
        folder: target folder; created if it does not exist.
        epoch: the last epoch that has ended, from 0; -1: none.
        keep: number of saves to keep, including this one, >= 1.
        step: finished steps of the current epoch, >= 0.
        steps: steps of the current epoch; 0 at the end of an epoch, or if unknown.
        notes: JSON values that `last` will return; those of rank 0 count.

    Weights with a NaN or Inf are not saved if the newest save is finite: it stays, with a warning,
    because a diverged run would otherwise end without any state to continue from.

    **Ranks:** all, between the same two steps; with ElasticAveraging each at any time: the lowest
    remaining rank writes the checkpoint, with the centre as weights.
    **Raises:** SaveError, on all ranks, if one of them cannot write, as on a full disk, or if
    another run saves into the folder. The previous save is intact, and the partial one is removed.
    CheckpointError for a damaged checkpoint.json; ConfigurationError if the ranks name different
    folders, or an address such as gs://bucket/run, for numbers out of range, and for notes that
    JSON cannot hold.
    """
    comm, folder = process.current(), local_path("folder", folder)
    epoch, keep = check_whole("epoch", epoch, least=-1), check_whole("keep", keep, least=1)
    step, steps = check_whole("step", step, least=0), check_whole("steps", steps, least=0)
    try:
        # Now, because only the ranks that write checkpoint.json would fail later
        text = json_text(notes or {})
    except (TypeError, ValueError) as error:  # The latter for a NaN as a key
        raise ConfigurationError(
            f"`notes` must be values that JSON can hold. Received {notes!r:.200}: {error}. Give "
            "Python's numbers, texts, lists and dicts, such as float(loss)."
        ) from error
    if trains_alone(model):
        _save_centre(model, folder, Head(0, epoch, 1, step, steps, notes or {}), keep)
        return
    heads = _heads(folder)
    if folder not in _claimed.get(comm, {}):
        claim(folder)
        heads = _heads(folder)  # Another run may have saved until now
    # The next one, even if an epoch is saved twice, so that no file in use is ever replaced
    number = max((head.save + 1 for head in heads if head is not None), default=0)
    # Before the check of weights, which may differ between ranks, or be one update old
    for optimizer in wrapped_optimizers(model):
        consolidate(optimizer)
    # Rank 0 alone checks its weights, because it writes the model
    own_facts = (not_finite_in(model), secrets.token_hex(8), text) if comm.rank == 0 else ("",) * 3
    # Its tag, too, which distinguishes this save from another run's save of the same number, and
    # its notes, because each node's first rank writes checkpoint.json, perhaps into one folder
    not_finite, tag, text = comm.gather_objects(own_facts)[0]
    if not_finite and heads[0] is not None and heads[0].finite:
        if comm.rank == 0:
            _warn_of_divergence(not_finite, epoch, heads[0], folder)
        return
    # Not of a save that was found damaged, because it would replace one that is whole
    older, size = _older(known_whole(folder, heads[0]), keep), comm.topology.size
    head = Head(number, epoch, size, step, steps, json.loads(text), not not_finite, older, tag)

    # checkpoint.json names the save only when every rank has written its files
    for stage in (_hold, _write, _name):
        work = functools.partial(stage, model, folder, head)
        problems = comm.gather_objects(_problem_of(work, model, folder))
        if any(problems):
            # Not after `_hold`, because files of that number may be those of the other run
            named = stage is not _hold and _withdraw(folder, head, heads[comm.rank])
            rank = next(rank for rank, problem in enumerate(problems) if problem)
            raise _not_written(folder, rank, problems[rank], named)
    _own_tags[folder] = tag
    saves = {number, *(older_head.save for older_head in older)}
    # Only now, because until now a checkpoint.json may have named them as the newest
    remove_other_saves(folder, saves, comm.rank, comm.topology.size)


def warn_of_replaced(folder: Path, head: Head | None, epoch: int) -> None:
    """Warn if a `fit` that begins at `epoch` replaces a later save of an earlier run.

    **Ranks:** any; `head` is its view of the folder before the `fit`.
    """
    # A program that calls `fit` again continues its own training
    if head is None or epoch > head.epoch or head.tag == _own_tags.get(folder):
        return
    log.warning(
        "The checkpoint folder %s holds a save of %d epochs, and this training begins after %d: "
        "its saves replace that one. To continue from it, take "
        "`first = cx.checkpoint.restore(model, folder)` and fit(initial_epoch=first); to begin "
        "anew, give another folder.",
        folder,
        head.epoch + 1,
        epoch,
    )


def note_stop(folder: Path, epoch: int, epochs: int) -> None:
    """Note in the save of `epoch` that a `fit` for `epochs` was stopped after it.

    **Ranks:** all.
    """
    head = read_own_head(folder)
    if _speaks_for_node(process.current()) and head is not None and head.epoch == epoch:
        with contextlib.suppress(OSError):  # A restart would train one more epoch
            write_head(head._replace(notes=head.notes | {STOPPED: epochs}), folder)


def _heads(folder: Path) -> list[Head | None]:
    """Return `read_heads`; an error of the system is a failed save, after which a run continues."""
    try:
        return read_heads(folder)
    except UnreadableHead as error:
        raise SaveError(str(error)) from error


def _hold(model: keras.Model, folder: Path, head: Head) -> None:
    comm = process.current()
    folder.mkdir(parents=True, exist_ok=True)
    if _speaks_for_node(comm):
        # Again at each save, because a run that could not see the lock may have come since
        lock.take(folder, _claimed[comm][folder])


def _write(model: keras.Model, folder: Path, head: Head) -> None:
    rank = process.current().rank
    if rank == 0:
        _write_model(model, folder / model_name(head.save))
    write_residuals(model, folder / residuals_name(head.save, rank), rank == 0, head)


def _name(model: keras.Model, folder: Path, head: Head) -> None:
    if _speaks_for_node(process.current()):
        write_head(head, folder)


def _withdraw(folder: Path, head: Head, before: Head | None) -> bool:
    """Remove a save that failed; keep its files and return True if a checkpoint.json names it.

    A rank may fail after another one, or itself, has replaced checkpoint.json. It then names the
    new save, and all files of that exist.

    Args:
        before: the head that this rank saw before the save.

    **Ranks:** all.
    """
    comm = process.current()
    if _speaks_for_node(comm):
        put_back_head(folder, head, before)
    seen = comm.gather_objects(names_save(folder, head))
    if not any(seen):
        remove_save(folder, head.save, comm.rank)
    comm.gather_objects("removed")
    return any(seen)


def _not_written(folder: Path, rank: int, problem: str, named: bool = False) -> SaveError:
    kept = "The new files stay, because checkpoint.json may name them." if named else BEFORE
    return SaveError(
        f"Every rank must be able to write a checkpoint into {folder}. Received, on rank {rank}: "
        f"{problem} {kept}"
    )


def _problem_of(stage: Callable[[], None], model: keras.Model, folder: Path) -> str:
    """Return the reason why a stage of saving failed on this rank; empty if it did not."""
    try:
        stage()
    except (OSError, RuntimeError) as error:  # The latter from HDF5, when it closes a file
        # Without the sizes, which would explain no lock that another run holds, and no lost mount
        if isinstance(error, OSError) and error.errno not in FULL:
            return f"{str(error).removesuffix('.')}."
        size = sum(
            variable.value.dtype.size * variable.value.shape.num_elements()
            for variable in model.weights
        )
        free = 0
        with contextlib.suppress(OSError):  # Because the other ranks wait for this one
            free = shutil.disk_usage(folder).free
        return f"{error}; the weights have {size} bytes, and {free} are free there."
    except Exception as error:  # A layer's `get_config` may raise any; the other ranks wait
        log.warning("Log of rank %d: a save failed.", process.rank(), exc_info=True)
        return f"{type(error).__name__}: {str(error).removesuffix('.')}."
    return ""


def _warn_of_divergence(variable: str, epoch: int, newest: Head, folder: Path) -> None:
    log.warning(
        "A checkpoint keeps finite weights. Received a NaN or Inf in %s after %d epochs, which is "
        "not saved: the save after %d epochs in %s stays. Continue from it with a smaller learning "
        "rate, or delete the folder.",
        variable,
        epoch + 1,
        newest.epoch + 1,
        folder,
    )


def _write_model(model: keras.Model, path: Path) -> None:
    with replacing(path) as part:
        model.save(part)


def _older(before: Head | None, keep: int) -> tuple[Head, ...]:
    """Return the older saves that are kept with the new one, the newest first."""
    return () if before is None else (before._replace(older=()), *before.older)[: keep - 1]


def _save_centre(model: keras.Model, folder: Path, head: Head, keep: int) -> None:
    """Write a checkpoint of one rank, with the centre as weights, while the others continue.

    `head` lacks its number and the older saves.
    """
    comm = process.current()
    if comm.rank != _first_rank():
        return
    try:
        lock.take(folder, lock.Owner.here())
    except OSError as error:
        raise SaveError(
            f"One run at a time can save into a folder. Received {folder}; on rank {comm.rank}: "
            f"{error}"
        ) from error
    # Read without the others, because these continue to train, and take part in no exchange
    before = read_own_head(folder)
    number = 0 if before is None else before.save + 1
    older = _older(before, keep)
    with with_centre(model):
        not_finite = not_finite_in(model)
        if not_finite and before is not None and before.finite:
            _warn_of_divergence(not_finite, head.epoch, before, folder)
            return
        head = head._replace(
            save=number, finite=not not_finite, older=older, tag=secrets.token_hex(8)
        )

        def write() -> None:
            _write_model(model, folder / model_name(number))
            write_residuals(model, folder / residuals_name(number, 0), True, head)
            write_head(head, folder)

        if problem := _problem_of(write, model, folder):
            put_back_head(folder, head, before)
            if not (named := names_save(folder, head)):
                remove_save(folder, number, 0)
            raise _not_written(folder, comm.rank, problem, named)
    _own_tags[folder] = head.tag
    remove_other_saves(folder, {number, *(older_head.save for older_head in older)}, 0, 1)


def save_after_loss(model: keras.Model, folder: Path, epoch: int, keep: int) -> None:
    """Save the end of a training with ElasticAveraging if the rank that saved has died before it.

    The lowest remaining rank may have ended its last epoch by then, when it had nothing to save.

    **Ranks:** any, after the training. **Raises:** as `save`.
    """
    head = read_own_head(folder)
    if process.current().rank == _first_rank() != 0 and (head is None or head.epoch < epoch):
        save(model, folder, epoch, keep)

"""Checkpoint: save at the end of every epoch; in a supervised run also in memory, and resume."""

import contextlib
import json
from pathlib import Path
from socket import gethostname
from typing import Any

import keras

from tfcommx.checkpoint.files import Head, read_heads, why_not_writable
from tfcommx.checkpoint.followers import Followers, drop_rows, follow
from tfcommx.checkpoint.newest import Newest
from tfcommx.checkpoint.restoring import finish_followers, resume_followers
from tfcommx.checkpoint.saving import (
    RETRY,
    STOPPED,
    Patience,
    SaveError,
    claim,
    note_stop,
    release,
    save,
    save_after_loss,
    warn_of_replaced,
)
from tfcommx.checkpoint.snapshots import RestoreRankValues, Snapshots
from tfcommx.collectives import process
from tfcommx.core import CheckpointError, check_whole, local_path, log, require_equal
from tfcommx.keras_internals.fit import (
    begin_at_epoch,
    callbacks_of_fit,
    restore_train_function,
    skip_steps,
)
from tfcommx.launch.supervision import supervision
from tfcommx.optim.wrapped import trains_alone, wrapped_optimizers

# Consequence of a failed save at the end of `fit`
LAST = "It was the last save of `fit`: make room, and call cx.checkpoint.save on all ranks."


class Checkpoint(keras.callbacks.Callback):
    """Save model, optimizers and residuals at the end of every epoch; keep the last saves.

    In a supervised run (`tfcommx run --min-np`) it also keeps snapshots in the hosts' memory, and
    SIGTERM to a rank makes its host leave. From the second generation on, `fit` resumes at the step
    after the newest snapshot, or at the epoch after the last save. The batches of an epoch must not
    depend on the previous epochs, because the batches trained before the restart are read and
    discarded.

    Keras's EarlyStopping, ReduceLROnPlateau, and ModelCheckpoint with save_best_only continue with
    the best values and waits that they had, also behind `restore`.

    Args:
        folder: target folder, on every node, or on a file system that all nodes see.
        keep: number of saves to keep, >= 1.
        memory_every: steps between two snapshots in memory, >= 1; None: none, except before a host
            leaves or joins. Without a supervisor no snapshot is taken.

    **Ranks:** all. **Cost:** rank 0 writes the model, each rank its residuals (4 bytes per entry
    that it selects from, or sends in 16 or fewer bits). For snapshots, see Snapshots.
    **Raises:** CheckpointError, before the first step, for a model that Keras cannot serialize,
    for a damaged checkpoint.json, and for a folder that a rank cannot write to or another run saves
    into; ConfigurationError for an address such as gs://bucket/run, and for different arguments on
    the ranks.
    """

    def __init__(self, folder: str | Path, keep: int = 1, memory_every: int | None = None) -> None:
        super().__init__()
        self.folder = local_path("folder", folder)
        self.keep = check_whole("keep", keep, least=1)
        self.memory_every = memory_every
        if memory_every is not None:
            check_whole("memory_every", memory_every, least=1)
        self._snapshots: Snapshots | None = None
        # Checkpoint from which `fit` resumes, until its first epoch begins; values of this rank
        self._begins_at: Newest | None = None
        self._values: RestoreRankValues | None = None
        # Skipped steps and finished steps of the epoch; number of the epoch
        self._skipped = self._done = self._epoch = 0
        # Newest save in the folder before this `fit`
        self._head: Head | None = None
        self._open, self._patience = contextlib.ExitStack(), Patience()
        # Callbacks of this `fit` whose state is saved; True until its first epoch begins
        self._followers: Followers | None = None
        self._begins = False

    def set_model(self, model: keras.Model) -> None:
        """Load the newest checkpoint, from the second generation on, before BroadcastState."""
        super().set_model(model)
        if model is not None and supervision() is not None and self._snapshots is None:
            self._snapshots = Snapshots(model, self.folder, self.memory_every)
            self._snapshots.load()
            self._begins_at = self._snapshots.found
            if self._begins_at is not None:
                # Before any callback opens its file, because the log of the generations before
                # would be lost, and the user does not start this one
                for callback in callbacks_of_fit():
                    if isinstance(callback, keras.callbacks.CSVLogger):
                        if not callback.append:  # All rows are of this `fit`
                            drop_rows(callback, self._begins_at.head.epoch + 1)
                        callback.append = True

    def on_train_begin(self, logs: Any = None) -> None:
        """Refuse a folder or a model for which no checkpoint could be written."""
        # A `fit` that was interrupted may have left a train function that skips steps
        restore_train_function(self.model)
        self._claim_folder()
        # Also because a damaged checkpoint.json ends the run here, before the first step, and not
        # at its first save
        self._head = read_heads(self.folder)[0]
        wrapped_optimizers(self.model)
        self._followers, self._begins = None, True
        if not trains_alone(self.model):
            self._followers = Followers(callbacks_of_fit(), self)
            follow(self.model, self._followers)
        try:
            json.dumps(keras.saving.serialize_keras_object(self.model))
        except Exception as error:  # Any class, because a get_config() of the user raises it
            raise CheckpointError(
                "A checkpoint needs a model that model.save can write down, with its optimizer "
                f"and its loss. Received {self.model.name!r}, for which Keras says: {error} Give "
                "that object a get_config(), or train without Checkpoint."
            ) from error
        if self._begins_at is not None:
            head = self._begins_at.head
            begin_at_epoch(self.model, self._epochs if self._was_stopped(head) else head.epoch + 1)
            self._values = RestoreRankValues(self.folder)
            self._values.set_model(self.model)
        if self._snapshots is not None:
            self._open.enter_context(self._snapshots.leaving_on_sigterm())

    def _claim_folder(self) -> None:
        """Check that all ranks can save into one folder; lock it against other runs."""
        comm, absolute = process.current(), str(self.folder.absolute())
        rows = comm.gather_objects(
            (
                why_not_writable(self.folder),
                {"folder": str(self.folder), "keep": self.keep, "memory_every": self.memory_every},
                (gethostname(), absolute),
            )
        )
        for name in ("folder", "keep", "memory_every"):
            require_equal(f"`{name}` of Checkpoint", [arguments[name] for _, arguments, _ in rows])
        first_of_host: dict[str, tuple[int, str]] = {}
        for rank, (_, _, (host, path)) in enumerate(rows):
            first_rank, first = first_of_host.setdefault(host, (rank, path))
            if path != first:
                raise CheckpointError(
                    "All ranks of a host must save into one folder. Received a relative path, and "
                    f"other working directories: {first} on rank {first_rank}, {path} on rank "
                    f"{rank}. Give an absolute path."
                )
        for rank, (reason, _, _) in enumerate(rows):
            if not reason:
                continue
            needs = (
                "A checkpoint needs a folder that every rank can write to. Received "
                f"{self.folder}, of which rank {rank} says: {reason}."
            )
            # The state of such a run is in memory alone, and would be lost with its end. A save
            # claims the folder once it can be written
            if self._begins_at is not None and self._begins_at.source == "memory":
                if comm.rank == 0:
                    log.error("%s Make room for it. %s", needs, RETRY)
                return
            raise CheckpointError(f"{needs} Make room for it, or give another.")
        if trains_alone(self.model):
            return
        try:
            blind = claim(self.folder)
        except SaveError as error:
            raise CheckpointError(
                f"A checkpoint needs a folder of one run alone. {error}"
            ) from error
        if blind and comm.rank == 0:
            log.warning(
                "The checkpoint folder %s of rank %d is another than that of rank 0, on its own "
                "node's disk: each node keeps the files of its ranks. Only the same ranks on "
                "the same nodes can continue from it. Take a folder that all nodes see.",
                absolute,
                blind[0],
            )

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Skip the finished steps of an interrupted epoch."""
        self._epoch, self._skipped, self._done = epoch, 0, 0
        begins, self._begins = self._begins, False
        if self._followers is not None:
            self._followers.ended = None
            if begins:
                resume_followers(self.model, self._followers, epoch)
        if self._begins_at is None:
            if begins and process.current().rank == 0:
                warn_of_replaced(self.folder, self._head, epoch)
            return
        head, self._begins_at = self._begins_at.head, None
        begin_at_epoch(self.model, None)
        if epoch != head.epoch + 1 or not head.step:
            return
        # Here, because on_train_begin of BroadcastState gives all ranks the values of rank 0
        assert self._values is not None, "on_train_begin has made it"
        self._values.on_train_begin()
        self._values.on_epoch_begin(epoch)
        steps, together = (self.params or {}).get("steps"), self.model.steps_per_execution
        # The same share of the epoch, which has other steps if the number of ranks has changed
        step = head.step * steps // head.steps if head.steps and steps else head.step
        # `fit` can skip whole executions only, which take `steps_per_execution` batches each
        self._skipped = self._done = step // together * together
        skip_steps(self.model, self._skipped, self._values.on_skipped_batch)

    # Not on_train_batch_end, because Keras would wait for every step
    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Take a snapshot after the previous step, if one is due."""
        # The first batch has no finished step before it, and skipped steps change nothing
        if self._snapshots is not None and batch > self._skipped:
            self._snapshots.after_step(
                self._epoch, batch, (self.params or {}).get("steps") or 0, batch - self._done
            )
            self._done = batch

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Save; continue after a failure. **Raises:** SaveError after three failures in a row."""
        notes = {}
        if self._followers is not None:
            self._followers.end_epoch(epoch, logs)
        if self._snapshots is not None:
            # The last execution of an epoch may be shorter than the others
            taken, steps = self.model.steps_per_execution, (self.params or {}).get("steps")
            taken = min(taken, steps - self._done) if steps else taken
            self._snapshots.end_epoch(epoch, taken)
            notes = self._snapshots.notes()
        is_last = epoch + 1 == self._epochs
        self._patience.save(
            lambda: save(self.model, self.folder, epoch, self.keep, notes=notes),
            LAST if is_last else RETRY,
        )

    def on_train_end(self, logs: Any = None) -> None:
        """Restore the effect of SIGTERM, and unlock the folder."""
        if self._snapshots is not None and not self._begins and self.model.stop_training:
            note_stop(self.folder, self._epoch, self._epochs)
        if self._begins and self._followers is not None:
            ended = self._begins_at is not None and self._was_stopped(self._begins_at.head)
            finish_followers(self.model, self._followers, None if ended else self._epochs)
        if self._begins_at is not None:
            # No epoch was left to train. Keras would begin the next `fit`, as of another phase of
            # the training, at the same epoch, and skip those before it without a word
            begin_at_epoch(self.model, None)
            head = self._begins_at.head
            # Otherwise the checkpoint is of a later `fit`, which continues the epochs' numbers
            if self._was_stopped(head) or (head.epoch + 1 == self._epochs and not head.step):
                self._begins_at = None
        if trains_alone(self.model) and not self._begins:
            self._patience.save(
                lambda: save_after_loss(self.model, self.folder, self._epoch, self.keep), LAST
            )
        # SIGTERM has its former effect first, because no rank votes on leaving after `fit`
        self._open.close()
        release(self.folder)
        self._followers = None

    @property
    def _epochs(self) -> int:
        return int((self.params or {}).get("epochs") or 0)

    def _was_stopped(self, head: Head) -> bool:
        """Return True if this `fit` was stopped after a save, as by EarlyStopping."""
        return head.notes.get(STOPPED) == self._epochs

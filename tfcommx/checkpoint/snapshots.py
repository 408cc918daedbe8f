"""Snapshots: copies of all ranks' state in the memory of the hosts, written during the steps.

step 40          vote: all have written save 20?     yes: copy the state
steps 41 ...                                         a thread writes the copy, and sends the mirror
step 60          vote: all have written save 40?     yes: 40 is complete, 20 is deleted; copy
                                                     no: vote again after each step

Two saves are kept: the last complete one, and the one that is being written. Weights with a NaN or
Inf are not written, because a run that has diverged would be restored from them.

`Snapshots` takes them, and `write_snapshot` writes one, in a thread.
`RestoreRankValues` restores the statistics and metrics of each rank in mid-epoch.
"""

import contextlib
import functools
import json
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, ClassVar, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from tfcommx.checkpoint.files import Head, memory_model_name, residuals_name
from tfcommx.checkpoint.mirror import Row, mirrors_of, partner
from tfcommx.checkpoint.newest import RUN, Newest, make_on_all, newest, newest_of_run
from tfcommx.checkpoint.place import SnapshotFolder, head_array
from tfcommx.checkpoint.records import read_own, residual_arrays
from tfcommx.checkpoint.restoring import load, restored
from tfcommx.checkpoint.state import copy_model, not_finite_in
from tfcommx.collectives import process
from tfcommx.core import CheckpointError, check_whole, json_text, local_path, log
from tfcommx.keras_internals.fit import build_metrics
from tfcommx.keras_internals.models import finalize_layers, statistics_of
from tfcommx.launch.launcher import launch_interfaces
from tfcommx.launch.supervision import MEMORY, PAUSED, SupervisorLink, supervision, supervisor_link
from tfcommx.optim.broadcast import broadcast_variables
from tfcommx.optim.step_boundary import consolidate
from tfcommx.optim.wrapped import exchanger_in, shared_state, trains_alone, wrapped_optimizers
from tfcommx.strategies.background import in_thread


@dataclass
class SnapshotCost:
    """Sums over the snapshots of this rank, in this process."""

    # Snapshots that are complete on all ranks
    count: int = 0
    # Seconds of copying, during which the step waits, and of writing in a thread
    copy_seconds: float = 0.0
    write_seconds: float = 0.0
    # Bytes of this rank's last snapshot, without its mirror
    bytes: int = 0

    def summary(self) -> dict[str, Any]:
        """Return count, bytes, and mean seconds per snapshot, as JSON values."""
        count = self.count or 1
        return {
            "count": self.count,
            "copy_seconds": round(self.copy_seconds / count, 6),
            "write_seconds": round(self.write_seconds / count, 6),
            "bytes": self.bytes,
        }


class Captured(NamedTuple):
    """A snapshot of this rank that is not written yet."""

    save: int
    # State of this rank alone
    own: Mapping[str, np.ndarray]
    # The model, if this rank writes it for its host; None: another rank does
    model: Mapping[str, np.ndarray] | None
    # True if the mirror needs the model, too, because no other rank writes it
    only_model: bool
    # Paths of the weights, in order, if all of them must be finite; empty: any values are written
    finite: tuple[str, ...] = ()

    def check_finite(self) -> None:
        """Refuse weights with a NaN or Inf. **Raises:** ValueError that names the first one."""
        for number, path in enumerate(self.finite):
            weight = (self.model or {}).get(f"weight{number}", np.zeros(0))
            if weight.dtype.kind == "f" and not np.isfinite(weight).all():
                raise ValueError(f"a NaN or Inf in {path}")


class Written(NamedTuple):
    """The result of writing a snapshot."""

    bytes: int
    seconds: float
    # The reason of a failure; empty if there was none
    problem: str


def write_snapshot(
    captured: Captured,
    rank: int,
    folder: SnapshotFolder,
    mirror: Callable[[list[str], list[int]], None] | None,
    keep: int | None,
) -> Written:
    """Write a snapshot to this host's memory, then to the mirror.

    Args:
        folder: target folder in this host's memory.
        mirror: sends a list of files to the mirror; None without one.
        keep: the save that is complete on all ranks; None: none is.
    """
    saves = {captured.save} | ({keep} if keep is not None else set())
    start, mirrored = time.monotonic(), [residuals_name(captured.save, rank)]
    written, problem = 0, ""
    try:
        # In this thread, because it costs a pass over the weights
        captured.check_finite()
        folder.make()  # Because the user may have removed the folder
        # Before the write, so that the memory holds at most two saves at a time
        folder.keep(saves, rank, models=captured.model is not None)
        if captured.model is not None:
            name = memory_model_name(captured.save)
            written += folder.write(name, captured.model)
            mirrored += [name] * captured.only_model
        written += folder.write(mirrored[0], captured.own)
        if mirror is not None:
            mirror(mirrored, sorted(saves))
    except Exception as error:  # Any, because a snapshot without a problem counts as written
        problem = str(error) or type(error).__name__
    return Written(written, time.monotonic() - start, problem)


class RestoreRankValues(keras.callbacks.Callback):
    """Restore the values of each rank in mid-epoch: batch norm's statistics, sums of metrics.

    Put it behind BroadcastState, because that sets the values of one rank everywhere. Metrics must
    be built, unless `on_skipped_batch` is called. No value changes for a checkpoint of an epoch's
    end, where all are equal, and with another number of ranks.

    **Ranks:** all.
    """

    def __init__(self, folder: str | Path) -> None:
        super().__init__()
        self.folder = local_path("folder", folder)
        self.values: list[np.ndarray] = []
        # The part of the values that is of metrics
        self._sums: list[np.ndarray] = []

    def on_train_begin(self, logs: Any = None) -> None:
        """Read the values of this rank, and set the statistics."""
        comm, checkpoint = process.current(), newest(self.folder)
        if (
            checkpoint is None
            or not checkpoint.head.step
            or checkpoint.head.ranks != comm.topology.size
        ):
            return
        self.values = read_own(checkpoint.folder / residuals_name(checkpoint.head.save, comm.rank))
        self._assign(statistics_of(self.model), self.values)
        finalize_layers(self.model)

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Set the metrics, which Keras has just reset."""
        count = len(statistics_of(self.model))
        self._sums, self.values = self.values[count:], []
        self._assign(self.model.metrics_variables, self._sums)

    def on_skipped_batch(self, batch: Any) -> None:
        """Set the metrics that Keras builds in the first step, with a batch that is skipped."""
        if len(self._sums) <= len(self.model.metrics_variables):
            return
        try:
            build_metrics(self.model, batch)
        except Exception as error:  # Any class, of a model or metric of the user
            log.warning(
                "The metrics of this epoch are those of its steps from here on, because they could "
                "not be built before the first step: %s",
                error,
            )
            return
        self._assign(self.model.metrics_variables, self._sums)

    @staticmethod
    def _assign(variables: Sequence[keras.Variable], values: Sequence[np.ndarray]) -> None:
        for variable, value in zip(variables, values, strict=False):
            variable.assign(value)


# Approximate seconds between two votes on leaving
ASK_SECONDS = 0.5
# Seconds between two reports of rank 0's steps
SAY_SECONDS = 0.05
# Largest number of steps between two votes
ASK_STEPS = 1000
# Key of a head's notes: steps of the whole run
TOTAL = "total_steps"


class Snapshots:
    """Snapshots of one model in a supervised run; without effect elsewhere.

    Args:
        model: built, compiled with wrapped optimizers.
        folder: folder of its checkpoints, with the same path on all ranks.
        every: steps between two snapshots, >= 1; None: only one before the ranks are replaced.

    **Ranks:** all. **Cost:** a snapshot copies the state of this rank alone, and the model on the
    first rank of each host; a thread writes the copies. About twice a second, and for each
    snapshot, an allreduce of 16 bytes.
    **Raises:** CheckpointError, in a supervised run, for strategy=ElasticAveraging with `every`,
    because its ranks have no step in common; ConfigurationError for `every` < 1.
    """

    _counted: ClassVar[int] = 0  # Steps of the whole run, over all calls of `fit` of a script

    def __init__(self, model: keras.Model, folder: str | Path, every: int | None) -> None:
        self.model, self.folder = model, local_path("folder", folder)
        self.every = every if every is None else check_whole("every", every, least=1)
        self.supervised = supervision()
        # Steps of the whole run; the checkpoint from which this generation resumes
        self.total = 0
        self.found: Newest | None = None
        self.cost = SnapshotCost()
        # The snapshot that a thread writes, whose number is that before the next one
        self._writing: Future[Written] | None = None
        # Seconds of the last copy
        self._copying = 0.0
        # True if the weights were finite when this generation began: a NaN means that they have
        # diverged since. False also for weights that are infinite by intention, as of a mask
        self._began_finite = False
        # The save that is complete on all ranks; the number of the next one; True if one is due
        self._whole: int | None = None
        self._next, self._due = 0, False
        self._until, self._between, self._asked_at = 1, 1, time.monotonic()
        # Not an Event, because a signal handler sets it and may interrupt a holder of the lock
        self._leave, self._said = False, 0.0
        self._link: SupervisorLink | None = None
        if self.supervised is None:
            return
        if trains_alone(model) and every is None:
            self.supervised = None  # Because such ranks continue without a restart
            return
        if trains_alone(model):
            raise CheckpointError(
                "Snapshots in memory need ranks that take each step together. Received "
                "strategy=ElasticAveraging, which continues by itself when a rank is lost. Leave "
                "`memory_every` out."
            )
        self.place = SnapshotFolder(self.supervised.memory, self.folder)
        comm = process.current()
        self._comm = comm
        if comm.rank == 0:
            self._link = supervisor_link(self.supervised, comm.topology.size)
        hosts = comm.gather_objects(self.supervised.host)
        self._writes_model = hosts.index(self.supervised.host) == comm.rank
        # Sends files to the mirror; None if all ranks are on one host
        self._send: Callable[[list[str], list[int]], None] | None = None
        if (keeper := partner(comm.rank, hosts)) is not None:
            mirrors = mirrors_of(self.supervised, (*launch_interfaces(),), self.folder)
            rows = comm.gather_objects(tuple(mirrors.row))
            self._send = functools.partial(mirrors.send, Row._make(rows[keeper]), comm.rank)
        make_on_all(self.place, self._writes_model)

    def restore(self) -> tuple[int, int]:
        """Load the newest checkpoint of earlier generations; return the first epoch and step.

        Both from 0; (0, 0) in the first generation. Call it behind `broadcast_variables`, because
        it also loads values that differ between the ranks, such as batch norm's statistics.

        **Ranks:** all, before the first step. **Raises:** as `checkpoint.restore`.
        """
        self.load()
        if self.found is None:
            return 0, 0
        if self.found.source == "file":
            # Only the ranks of one node have the model's file if each has a separate disk
            broadcast_variables([*self.model.weights, *shared_state(self.model, 0)])
        values = RestoreRankValues(self.folder)
        values.set_model(self.model)
        values.on_train_begin()
        return self.found.head.epoch + 1, self.found.head.step

    def load(self) -> None:
        """Load the newest checkpoint of earlier generations, and report it to the supervisor.

        **Ranks:** all. **Raises:** as `checkpoint.restore`.
        """
        start = time.monotonic()
        self.found = checkpoint = newest_of_run(self.folder)
        if checkpoint is not None and restored(self.model) != checkpoint:
            load(self.model, checkpoint)
        head = Head(-1, -1, 1) if checkpoint is None else checkpoint.head
        counted = Snapshots._counted  # Not fewer, because a run without progress is given up
        self.total = Snapshots._counted = max(counted, int(head.notes.get(TOTAL, 0)))
        self._began_finite = self.supervised is not None and not not_finite_in(self.model)
        if checkpoint is not None and checkpoint.source == "memory":
            self._whole, self._next = checkpoint.head.save, checkpoint.head.save + 1
            # At once, because a host that was lost had the mirrors of others
            self._due = self.every is not None
        # An earlier `fit` of this process has reported its checkpoint
        if self._link is not None and (checkpoint is not None or not counted):
            self._link.say(
                resumed={
                    "from": "start" if checkpoint is None else checkpoint.source,
                    "epoch": head.epoch + 1,
                    "step": head.step,
                    "total": self.total,
                    "seconds": round(time.monotonic() - start, 3),
                }
            )

    def notes(self) -> dict[str, Any]:
        """Return the notes of a head by which a later generation recognises this run's saves."""
        # Also with ElasticAveraging, whose ranks are started again if the centre is lost
        supervised = supervision()
        return {} if supervised is None else {TOTAL: self.total, RUN: supervised.run}

    @contextlib.contextmanager
    def leaving_on_sigterm(self) -> Iterator[None]:
        """While entered, SIGTERM makes this rank's host leave; only in Python's main thread."""
        if self.supervised is None or threading.current_thread() is not threading.main_thread():
            yield
            return
        pid = os.getpid()

        def leave(number: int, frame: FrameType | None) -> None:
            if os.getpid() == pid:
                self.leave()
                return
            # A forked child, such as a worker that reads samples, ends
            signal.signal(number, before)
            os.kill(os.getpid(), number)

        before = signal.signal(signal.SIGTERM, leave)
        try:
            yield
        finally:
            signal.signal(signal.SIGTERM, before)

    def leave(self) -> None:
        """Request the next generation, without this host. **Ranks:** local."""
        self._leave = True

    def after_step(
        self,
        epoch: int,
        step: int,
        steps: int,
        taken: int = 1,
        notes: Callable[[], dict[str, Any]] = dict,
    ) -> None:
        """Take a snapshot if one is due; end the process if the ranks are to be replaced.

        Args:
            epoch: epoch of the step, from 0.
            step: finished steps of the epoch, >= 1.
            steps: steps of the epoch; 0: unknown.
            taken: steps since the last call, >= 1.
            notes: returns the JSON values that `last` will return; those of rank 0 count.

        **Ranks:** all, after each step. **Raises:** SystemExit with status 75 (PAUSED).
        """
        self._count(taken)
        if self.supervised is None:
            return
        self._until -= 1
        if not self._due and self._until > 0:
            return
        ready, leaves = self._vote()
        if not ready and not leaves:
            return
        if leaves and self._writing is not None:
            self._writing.result()  # On all ranks, so that the next vote finds all ready
            ready, _ = self._vote()
        if self._due or leaves:
            ranks, text = self._comm.topology.size, json_text(notes() | self.notes())
            # Rank 0's on all, because hosts recognise the files of one save by their equal heads
            text = self._comm.gather_objects(text if self._comm.rank == 0 else "")[0]
            # Because a host that was away may hold files of the same save of another generation
            tag = f"{self.supervised.run}/{self.supervised.generation}"
            head = Head(self._next, epoch - 1, ranks, step, steps, json.loads(text), tag=tag)
            self._capture(head)
        if leaves:
            self._end()

    def end_epoch(self, epoch: int, taken: int = 1) -> None:
        """Count the last steps of an epoch; a due snapshot waits for the next step."""
        self._count(taken)
        if self._link is not None:
            self._link.say(steps=self.total)
            self._link.say(epoch_ended=epoch)

    def _count(self, taken: int) -> None:
        before, self.total = self.total, self.total + taken
        Snapshots._counted = self.total
        if self.every is not None and before // self.every != self.total // self.every:
            self._due = True
        time_now = time.monotonic()
        if self._link is not None and time_now - self._said >= SAY_SECONDS:
            self._said = time_now
            self._link.say(steps=self.total)

    def _vote(self) -> tuple[bool, bool]:
        """Return whether all ranks have finished writing, and whether ranks are to be replaced.

        **Ranks:** all. **Cost:** an allreduce of 16 bytes.
        """
        writing, time_now = self._writing, time.monotonic()
        busy = writing is not None and not writing.done()
        failed = writing is not None and writing.done() and bool(writing.result().problem)
        pause = self._leave or (self._link is not None and self._link.asked_to_pause.is_set())
        step = max(time_now - self._asked_at, 1e-6) / self._between
        # 0 on the other ranks, so that the sum is rank 0's wish
        wish = int(np.clip(ASK_SECONDS / step, 1, ASK_STEPS)) if self._comm.rank == 0 else 0
        with tf.device("/cpu:0"):
            vote = tf.constant([busy, failed, pause, wish], tf.float32)
            votes = self._comm.allreduce(vote, "world", "tfcommx/snapshots", counted=False).numpy()
        # From the sum, equal on all ranks, because a rank that voted alone would wait
        self._until = self._between = max(1, round(float(votes[3])))
        self._asked_at = time.monotonic()
        if votes[0]:  # A rank still writes: the snapshot is not complete, and the next must wait
            return False, bool(votes[2])
        if writing is not None:
            self._ended(writing.result(), bool(votes[1]))
        return True, bool(votes[2])

    def _ended(self, written: Written, failed: bool) -> None:
        self._writing = None
        if written.problem:
            log.warning(
                "Log of rank %d: no snapshot in memory after step %d: %s. The one before stays; "
                "%d bytes are free in %s.",
                self._comm.rank,
                self.total,
                written.problem,
                shutil.disk_usage(MEMORY).free,
                self.place.path,
            )
        if failed:  # On any rank: the one before stays the last complete one on all
            return
        self._whole = self._next - 1
        self.cost.count += 1
        self.cost.copy_seconds += self._copying
        self.cost.write_seconds += written.seconds
        self.cost.bytes = written.bytes
        if self._link is not None:
            seconds = round(written.seconds, 3)
            facts = {"total": self.total, "seconds": seconds, "bytes": written.bytes}
            self._link.say(snapshot=facts)

    def _capture(self, head: Head) -> None:
        """Copy the state, and start a thread that writes it. **Ranks:** all."""
        start, sharded = time.monotonic(), False
        for optimizer in wrapped_optimizers(self.model):
            consolidate(optimizer)
            sharded |= exchanger_in(optimizer).sharding is not None
        # With shards only rank 0 has the optimizer's whole state, gathered by `consolidate`
        writes = self._comm.rank == 0 if sharded else self._writes_model
        # Copies, because the next step changes the variables while the thread still writes
        own = residual_arrays(self.model)
        model = copy_model(self.model) if writes else None
        finite = tuple(weight.path for weight in self.model.weights) if self._began_finite else ()
        captured = Captured(head.save, {"head": head_array(head), **own}, model, sharded, finite)
        rank, place, mirror, keep = self._comm.rank, self.place, self._send, self._whole
        write = functools.partial(write_snapshot, captured, rank, place, mirror, keep)
        self._writing = in_thread(write, "tfcommx-snapshot")
        self._next, self._due = head.save + 1, False
        self._copying = time.monotonic() - start

    def _end(self) -> None:
        """End all ranks, once the snapshot is complete. **Raises:** SystemExit."""
        assert self._writing is not None and self.supervised is not None
        self._writing.result()
        self._vote()
        leaving = self._comm.gather_objects(self.supervised.host if self._leave else "")
        if self._link is not None:
            for host in dict.fromkeys(filter(None, leaving)):
                self._link.say(leaving=host)
        # No rank ends before rank 0 has told the supervisor which hosts leave
        self._comm.gather_objects("told")
        raise SystemExit(PAUSED)

"""DataCache: read and decode once, then feed every process of a node from memory.

    source (any file system)  ->  local disk: encoded bytes  ->  node's memory: decoded uint8, one
    slab  ->  batches

**Source:** Shi et al., "Towards Scalable Distributed Training of Deep Learning on Public Cloud
Clusters" (2021), section 4.1; we keep one copy per node in shared memory and not one per process.
Loading runs ahead of training as in Ma et al., "Theano-MPI" (2016), section 3.3.
"""

from __future__ import annotations

import json
import math
import os
import time
import warnings
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from tfcommx.comm.launcher import run_name
from tfcommx.data.cache import batches, capacity, order
from tfcommx.data.cache.batches import Phase
from tfcommx.data.cache.disk import Disk
from tfcommx.data.cache.fill import Filler, until_exit
from tfcommx.data.cache.options import Options
from tfcommx.data.cache.reshuffle import Transport, swap
from tfcommx.data.cache.slab import Slab, reclaim
from tfcommx.data.sources.base import Source, key_of, stored_size
from tfcommx.terms import PlanError, Topology

# bytes by which tf.data may lengthen its queue: two batches of 38 MB, where longer queues cost
# fresh memory
READ_AHEAD = 64 << 20


WARM = 64  # samples of a step of `warming`: enough for all threads, few enough for a steady bar


NAME_BYTES = 2000  # of the source's name in the facts of a slab, whose page is 4096


AGAIN = (
    "Epoch {epoch} is served again, in the same order and with the same crops and flips, as its "
    "dataset is iterated again. To train, "
    "ask for all epochs at once: `dataset(phase, 0, epochs=90)` and `fit(..., "
    "steps_per_epoch=cache.steps(phase))`. To evaluate, give "
    "the phase shuffle=False."
)


FORMAT = 1  # of what is kept in memory: raised when decoding or the layout changes


class DataCache:
    """One process's view of the node's cache.

    Args:
      source: of samples; the same on all ranks.
      topology: the ranks and their nodes.
      rank: this process's.
      options: how samples are kept; the same on all ranks.
    **Ranks:** every rank makes one; none waits for another.
    **Cost:** one walk over the source's list; 64 samples are read to estimate the memory, by the
      first process of a node and, without `partial`, by one that finds a slab made for another
      part.
    **Raises:** SlabError where memory does not suffice, shared memory cannot be used or no sample
      be read; PlanError for a bad rank, and with `exchange` where the launcher gives the run no
      name.
    """

    def __init__(
        self,
        source: Source,
        topology: Topology | None = None,
        rank: int = 0,
        options: Options | None = None,
    ) -> None:
        self.source, self.topology, self.rank = source, topology or Topology(1, 1), rank
        self.options = options or Options()
        self.node, self.slot = order.place(self.topology, rank)
        slots = order.slots_of(self.topology)
        self.reclaimed = reclaim(Path(self.options.memory))
        self.key = key_of((FORMAT, source.key, source.count, source.channels, self.options.store))
        self.disk = (
            Disk(self.options.disk, source.key, source.count)
            if self.options.disk is not None
            else None
        )
        part = order.parts(source.count, slots, self.options.seed)[self.node]

        facts = {"source": _end_of(source.name), "node": str(self.node)}

        def length() -> int:
            size, known = capacity.slab_bytes(source, self.disk, part, self.options, name)
            facts.update(known)
            return size

        name = f"tfcommx-{os.getuid()}-{self.key[:16]}-{self.node}"
        if self.options.exchange > 0 and self.topology.nodes > 1:
            name += f"-{key_of((run_name(),))[:16]}"
        self.slab = Slab(self.options.memory, name, self.key, source.count, length, facts)
        try:
            capacity.check_length(self.slab, source, self.disk, part, self.options)
        except BaseException:
            self.slab.close()
            raise
        own = len(os.sched_getaffinity(0))
        # by the launcher: the other processes of the node have other processors
        bound = own < (os.cpu_count() or own)
        threads = self.options.threads or (own if bound else max(1, own // slots[self.node]))
        skip, partial = self.options.on_error == "skip", self.options.partial
        self.filler = Filler(
            source, self.slab, self.disk, self.options.store, skip, partial, threads
        )
        self._read = self._for_tensorflow(lambda cache, *args: cache.filler.read(*args))
        self._settle = self._for_tensorflow(lambda cache, *args: cache.filler.settle(*args))
        self._arrived: dict[int, int] = {}  # epoch -> samples that came from other nodes for it
        # (first epoch, float64 [epochs, 2] variable: seconds waited, samples served)
        self._meters: list[tuple[int, Any]] = []
        self._closed = weakref.finalize(self, _close, self.filler, self.slab, self.disk)

    def _for_tensorflow(self, work: Callable[..., Any]) -> Callable[..., Any]:
        """Return `work`, whose first argument is this cache, for TensorFlow: it keeps functions for
        ever, and would keep the cache.
        """
        here = weakref.ref(self)

        def call(*args: Any) -> Any:
            cache = here()
            if cache is None:
                raise RuntimeError(
                    "The DataCache is gone. Keep it, or the dataset that it made, as long as "
                    "batches are asked for."
                )
            return work(cache, *args)

        return until_exit(call)

    def steps(self, phase: Phase) -> int:
        """Return the batches of an epoch, the same on every rank."""
        return order.steps(self.source.count, self.topology, phase.batch, phase.drop_remainder)

    def share(self, epoch: int, shuffle: bool = True) -> np.ndarray:
        """Return int64 [n]: the samples of this rank in an epoch, in order."""
        return order.share(
            self.source.count,
            self.topology,
            self.rank,
            self.options.seed,
            epoch,
            self.options.exchange,
            shuffle,
        )

    def dataset(self, phase: Phase, first_epoch: int = 0, epochs: int = 1, step: int = 0) -> Any:
        """Return the batches of some epochs, one after the other, as a `tf.data.Dataset` of
        (images, labels).

        Args:
          phase: how the samples are served.
          first_epoch: number of the first epoch, >= 0.
          epochs: how many, >= 1. With Keras: `fit(dataset, steps_per_epoch=cache.steps(phase))`.
          step: first step of the first epoch, in [0, steps]: to resume in mid-epoch.
        Returns:
          images phase.dtype [b, h, w, c] and labels int64 [b]. A skipped sample leaves its batch
          smaller by one.

        Loading runs ahead in the background; tf.data measures how far it must, up to 64 MB
        (`autotune.ram_budget`, which holds for all stages that are added; your own options replace
        it). The order is a pure function of the seed, the epoch, the ranks and this rank: datasets
        of the same arguments give the same batches, and so does one that is iterated again, which
        for a shuffled phase is announced by a warning.
        **Raises:** PlanError for arguments out of range, and inside a tf.function.
        """
        import tensorflow as tf

        if tf.inside_function():
            raise PlanError(
                "`dataset` must be called outside of tf.function, as it makes a variable. Pass "
                "the dataset to the function."
            )
        count = self.steps(phase)
        if first_epoch < 0 or epochs < 1 or not 0 <= step <= count:
            raise PlanError(
                f"`first_epoch` must be >= 0, `epochs` >= 1, `step` in [0, {count}]. Received "
                f"{first_epoch}, {epochs}, {step}."
            )
        if count == 0:
            raise PlanError(
                f"At least one batch per rank is required. {self.source.count} samples over "
                f"{self.topology.size} ranks give none "
                f"of {phase.batch}. Lower `batch`, or set drop_remainder=False."
            )
        store = self.options.store
        if store is not None and phase.resolution is not None and store < phase.resolution:
            warnings.warn(
                f"Images are kept with a short side of store={store} pixels, and enlarged for "
                f"resolution={phase.resolution}: details are "
                "lost. Make the DataCache with the largest resolution to come as its `store`.",
                stacklevel=2,
            )
        bounds = tf.constant(order.bounds(len(self.share(0, False)), phase.batch, count))
        static = phase.drop_remainder and self.options.on_error == "raise"
        with tf.device("/cpu:0"):
            meter = tf.Variable(tf.zeros([epochs, 2], tf.float64), trainable=False)
        self._meters.append((first_epoch, meter))

        def served_from(cache: DataCache, epoch: np.ndarray) -> np.ndarray:
            samples = cache.share(int(epoch), phase.shuffle)
            if phase.shuffle and len(samples) < 2 * meter.numpy()[int(epoch) - first_epoch, 1]:
                warnings.warn(AGAIN.format(epoch=epoch), stacklevel=2)
            return samples

        share = self._for_tensorflow(served_from)
        clock = tf.timestamp if _has_clock() else lambda: tf.constant(math.nan, tf.float64)

        def epoch_steps(epoch: Any) -> Any:
            samples = tf.numpy_function(share, [epoch], tf.int64, stateful=False)
            samples.set_shape([None])
            start = tf.where(epoch == first_epoch, tf.constant(step, tf.int64), 0)
            steps = tf.data.Dataset.range(start, count)
            return steps.map(lambda s: (samples[bounds[s] : bounds[s + 1]], epoch))

        def load(samples: Any, epoch: Any) -> Any:
            state = batches.check(self.slab, samples, epoch, self.options.verify, self.options.seed)
            none = tf.zeros([0], tf.uint8)

            there = (samples, none, -tf.ones_like(samples))
            samples, loose, at = tf.cond(
                tf.reduce_any(state > 0), lambda: self._bring(samples, state, epoch), lambda: there
            )
            images, labels, _ = batches.read(
                self.slab, samples, loose, at, epoch, phase, self.source.channels, self.options.seed
            )
            if phase.resolution is None and self.source.shape is not None:
                shape = [*stored_size(*self.source.shape, self.options.store), self.source.channels]
                # a batch without samples has no size that could be read
                none = tf.zeros([0, *shape], images.dtype)
                images = tf.ensure_shape(
                    tf.cond(tf.size(labels) == 0, lambda: none, lambda: images), [None, *shape]
                )
            if static:
                images = tf.ensure_shape(images, [phase.batch, *images.shape[1:]])
                labels = tf.ensure_shape(labels, [phase.batch])
            return images, labels, epoch

        def deliver(asked: Any, batch: Any) -> Any:
            images, labels, epoch = batch
            row = tf.stack([clock() - asked, tf.cast(tf.shape(labels)[0], tf.float64)])
            with tf.control_dependencies([meter.scatter_nd_add([[epoch - first_epoch]], [row])]):
                return tf.identity(images), tf.identity(labels)

        served_batches = tf.data.Dataset.range(first_epoch, first_epoch + epochs).flat_map(
            epoch_steps
        )
        served_batches = served_batches.map(
            load, num_parallel_calls=tf.data.AUTOTUNE, deterministic=True
        ).prefetch(tf.data.AUTOTUNE)
        # zip asks its inputs in turn, in the thread of the consumer: first for the time, then for
        # the batch
        times = tf.data.Dataset.range(np.iinfo(np.int64).max).map(lambda _: clock())
        options = tf.data.Options()
        # fresh pages cost more than the pixels in them: a queue that grows without bound never gets
        # to use its memory again
        options.autotune.ram_budget = READ_AHEAD
        served = tf.data.Dataset.zip((times, served_batches)).map(deliver)
        # else Keras says at the first end of a validation that training is interrupted, and
        # BroadcastState cannot compare steps
        return served.apply(
            tf.data.experimental.assert_cardinality(epochs * count - step)
        ).with_options(options)

    def _bring(self, samples: Any, state: Any, epoch: Any) -> tuple[Any, Any, Any]:
        """Bring what `state` says is missing, natively where that can be; return what
        `Filler.fetch` does.
        """
        import tensorflow as tf

        encoded, labels, level = tf.numpy_function(
            self._read, [samples, state], [tf.string, tf.int64, tf.uint8]
        )
        left = batches.fill(
            self.slab, encoded, samples, labels, state, self.source.channels, self.options.store
        )
        asked = [samples, state, left, epoch, encoded, labels, level]
        got = tf.numpy_function(self._settle, asked, [tf.int64, tf.uint8, tf.int64])
        for tensor in got:
            tensor.set_shape([None])
        return tuple(got)

    def report(self, epoch: int) -> dict[str, float]:
        """Return what this process saw in an epoch.

        Keys: samples (served), hit_memory, hit_disk, hit_source (shares of them), repaired,
        unreadable, overflow (samples), arrived (samples, by `swap`), corrupt_disk (since the
        start), loader_wait_seconds (that the consumer waited for batches; NaN under
        `enable_op_determinism`, which has no clock). What has been loaded ahead of the consumer is
        in the counts of its epoch already.
        """
        rows = [
            meter[epoch - first].numpy()
            for first, meter in self._meters
            if first <= epoch < first + meter.shape[0]
        ]
        waited, served = (
            (float(sum(column)) for column in zip(*rows, strict=True)) if rows else (0.0, 0.0)
        )
        counts = self.filler.counts.get(epoch, {})
        disk, source = (
            min(1.0, counts.get(level, 0) / served) if served else 0.0
            for level in ("disk", "source")
        )
        return {
            "samples": served,
            "hit_memory": max(0.0, 1 - disk - source) if served else 0.0,
            "hit_disk": disk,
            "hit_source": source,
            "repaired": counts.get("repaired", 0),
            "unreadable": counts.get("unreadable", 0),
            "overflow": counts.get("overflow", 0),
            "arrived": self._arrived.get(epoch, 0),
            "corrupt_disk": self.disk.corrupt if self.disk else 0,
            "loader_wait_seconds": waited,
        }

    def warm(self) -> None:
        """Bring all samples of this rank into memory now, before training."""
        for _ in self.warming():
            pass

    def warming(self) -> Iterator[None]:
        """As `warm`, in `warming_steps` steps of 64 samples: for a progress bar."""
        import tensorflow as tf

        def function(work: Callable[..., Any], *kinds: tf.DType) -> Callable[..., np.ndarray]:
            """TensorFlow keeps the ops that are called outside of functions for ever, and their
            hold on the slab.
            """
            traced = tf.function(work, autograph=False).get_concrete_function(
                *(tf.TensorSpec([None], kind) for kind in kinds)
            )
            return lambda *args: traced(*map(tf.constant, args)).numpy()

        def put(*args: Any) -> Any:
            return batches.fill(self.slab, *args, self.source.channels, self.options.store)

        check = function(
            lambda samples: batches.check(self.slab, samples, tf.constant(0, tf.int64), 0.0, 0),
            tf.int64,
        )
        put = function(put, tf.string, tf.int64, tf.int64, tf.uint8)
        share = self.share(0)
        for start in range(0, len(share), WARM):
            samples = share[start : start + WARM]
            state = check(samples)
            files, labels, level = self.filler.read(samples, state)
            self.filler.settle(
                samples, state, put(files, samples, labels, state), -1, files, labels, level
            )
            yield

    @property
    def warming_steps(self) -> int:
        """Steps of `warming`."""
        return -(-len(self.share(0)) // WARM)

    def swap(self, transport: Transport, epoch: int) -> int:
        """With `exchange`: bring the samples that are new on this node in `epoch` from the other
        nodes' memory.

        Without this call they are read from the disk level or the source, and take new room.
        Args:
          transport: the communicator, such as `tfcommx.comm.base.current()`.
          epoch: >= 1, whose samples are to come.
        Returns:
          samples that arrived.
        **Ranks:** all, after the dataset of the epoch before has ended everywhere and before that
        of `epoch` is made.
        """
        if self.options.exchange == 0 or self.topology.nodes == 1:
            return 0
        arrived = swap(
            self.slab,
            transport,
            self.topology,
            self.rank,
            self.options.seed,
            self.options.exchange,
            epoch,
        )
        self._arrived[epoch] = arrived
        return arrived

    def wait_filled(self, timeout_s: float) -> bool:
        """Wait until the node's part is in memory, or unreadable; False where it is not by then."""
        part = order.parts(self.source.count, order.slots_of(self.topology), self.options.seed)[
            self.node
        ]
        end = time.monotonic() + timeout_s
        while np.any(self.slab.index[part] == 0):
            if time.monotonic() > end:
                return False
            time.sleep(0.01)
        return True

    def close(self) -> None:
        """Let go of memory and files; the last process of the node removes the slab. Also done at
        the end of the process.

        No batch may be asked for afterwards: it ends in an error, and one that was on its way may
        be black.
        """
        self._closed()


def _end_of(name: str) -> str:
    """Return as much of the end of a name as a slab's facts can hold: up to 12 bytes a character,
    as JSON.
    """
    name = name[-NAME_BYTES:]
    while len(json.dumps(name)) > NAME_BYTES:
        name = name[1:]
    return name


def _has_clock() -> bool:
    """False under `enable_op_determinism`, where TensorFlow refuses to tell the time."""
    import tensorflow as tf

    try:
        tf.timestamp()
    except tf.errors.FailedPreconditionError:
        return False
    return True


def _close(filler: Filler, slab: Slab, disk: Disk | None) -> None:
    filler.close()
    slab.close()
    if disk is not None:
        disk.close()

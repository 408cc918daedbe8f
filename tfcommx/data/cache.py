"""DataCache: read and decode once, then feed every process of a node from memory.

    source (any file system)  ->  local disk: encoded bytes  ->  node's memory: decoded uint8, one
    slab  ->  batches

There are three lifetimes. The samples in memory outlive every dataset, and this process if another
one of the node uses them (`slab`). The cache and its threads live as long as the DataCache
(`loader`). The epochs and the counts of served samples belong to one call of `dataset`
(`epochs`).

**Source:** Shi et al., "Towards Scalable Distributed Training of Deep Learning on Public Cloud
Clusters" (2021), section 4.1. As there, each node keeps a part of the samples; its processes share
one copy. The paper caches samples after normalization; here it follows the cache, because decoded
uint8 takes a quarter of float32's memory and serves every spec. Loading runs ahead of training as
in Ma et al., "Theano-MPI" (2016), section 3.3.

Before it serves samples, the cache finds the rank of this process in its launch, states the facts
that must be equal on all ranks, and opens the node's slab.
"""

import contextlib
import json
import os
import threading
import warnings
import weakref
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from tfcommx.collectives import process
from tfcommx.collectives.comm import Comm
from tfcommx.collectives.comparisons import Facts
from tfcommx.core import ConfigurationError, Topology, check_name, check_whole
from tfcommx.data import capacity, order, slab_files
from tfcommx.data.disk import Disk
from tfcommx.data.epochs import Epochs, EpochStats, warn_if_served
from tfcommx.data.loader import WARM, Filler, Loader
from tfcommx.data.options import BatchSpec, Options
from tfcommx.data.pipeline import of_one_rank, prefetch_sizes, weak_method
from tfcommx.data.reshuffle import reshuffle
from tfcommx.data.slab import Slab
from tfcommx.data.slab_files import remove_unused
from tfcommx.data.sources import find_source
from tfcommx.data.sources.folder import Folder
from tfcommx.data.sources.source import Source, contents_of, key_of
from tfcommx.launch import launcher


def find_position(topology: Topology | None, rank: int | None) -> tuple[Topology, int]:
    """Return the topology and this process's rank, by default those of the running launch.

    Without a launcher and without `tfcommx.init()`, this process is the only rank.

    **Raises:** ConfigurationError if a launcher started several processes and `tfcommx.init()` was
    not called, and, in a launch of several, for a topology of another size without `rank`.
    """
    if process.started():
        comm = process.current()
        topology, size, own = topology or comm.topology, comm.topology.size, comm.rank
    else:
        launch = launcher.launcher()
        size, own = launch.size, launch.rank
    if topology is None and size > 1:
        raise ConfigurationError(
            f"tfcommx.init() must be called before a DataCache is made. Received {size} launched "
            "processes without it, each of which would serve all samples. Call it first, on "
            "every rank, or give `topology` and `rank`."
        )
    topology = topology or Topology(1, 1)
    if rank is None and 1 < size != topology.size > 1:
        raise ConfigurationError(
            f"`rank` is required with a `topology` of {topology.size} ranks in a launch of {size}. "
            "Received none. Give it, or leave `topology` out."
        )
    if rank is None:
        rank = own if size == topology.size else 0
    return topology, rank


# Largest number of bytes of the source's name in a slab's metadata, whose page has 4096
NAME_BYTES = 2000
# Version of the samples in memory, to be raised if decoding or the layout changes
FORMAT = 2


def open_slab(
    source: Source,
    disk: Disk | None,
    part: np.ndarray,
    options: Options,
    node: int,
    exclusive: bool,
) -> Slab:
    """Open the slab of this node, or create it.

    Args:
        part: the node's samples in the first epoch, int64 [n].
        node: number of the node; one machine may have several.

    **Raises:** SlabError if there is too little memory. ConfigurationError with `exclusive`, if the
    launcher assigns no name to the run.
    """
    # `max_pixels`, because the slab marks larger samples as unreadable for all of its processes
    decides = options.store, options.max_pixels
    key = key_of((FORMAT, source.key, source.count, source.channels, *decides))
    name = f"{slab_files.prefix()}{key[:16]}-{node}"
    if exclusive:
        name += f"-{key_of((launcher.run_name(),))[:16]}"
    metadata = {"source": _end_of(source.name), "node": str(node)}

    def length() -> int:
        size, facts = capacity.choose_length(source, disk, part, options, name)
        metadata.update(facts)
        return size

    slab = Slab(Path(options.memory, f"{name}.slab"), key, source.count, length, metadata)
    try:
        capacity.check_length(slab, source, disk, part, options)
    except BaseException:
        # Otherwise this process would hold the lock of another run's slab until it ends
        slab.close()
        raise
    return slab


def _end_of(name: str) -> str:
    """Return the longest end of a name that fits a slab's metadata, as JSON."""
    name = name[-NAME_BYTES:]
    while len(json.dumps(name)) > NAME_BYTES:  # Up to 12 bytes for a character
        name = name[1:]
    return name


SAME_SAMPLES = (
    "Copy the same files to every node, empty class folders too, or read one copy that all nodes "
    "see; pass equal options. A cache that one rank has for itself takes "
    "topology=Topology(1, 1), rank=0."
)
SAME_BATCHES = "Pass an equal BatchSpec and equal epochs to `dataset` on every rank."


class DataCache:
    """Serve images from the node's memory: one process's view of the node's cache.

    >>> import numpy as np, tensorflow as tf, tfcommx as cx
    >>> from tfcommx.data.sources import Arrays
    >>> images = np.zeros((100, 8, 8, 3), np.uint8)
    >>> cache = cx.DataCache(Arrays(images, np.arange(100) % 10), seed=7)
    >>> spec = cx.BatchSpec(32, resolution=16, flip=True)
    >>> [tuple(images.shape) for images, labels in cache.dataset(spec)]
    [(32, 16, 16, 3), (32, 16, 16, 3), (32, 16, 16, 3)]
    >>> cache.close()

    Args:
        source: source of the samples, the same on all ranks: a path of class folders or of
            ImageNet's shards, the name of a TensorFlow data set, or a source of
            `tfcommx.data.sources`.
        topology: the ranks and their nodes; by default those of the running launch.
        rank: rank of this process; by default that of the running launch. Required in a launch of
            another number of processes than `topology` has.
        options: the fields of `Options`, such as `store=160` and `disk="/local/cache"`; the same
            on all ranks.

    **Ranks:** every rank creates one; none waits for another. Samples, and the options that decide
    which rank serves them, are compared when the ranks next exchange objects, before the first step
    of a training. Names, sizes and labels are compared, and CRCs of records, but not the bytes of
    other files, because that would cost a read of all. `topology=Topology(1, 1), rank=0` makes a
    cache for this rank alone.
    **Cost:** one walk over the source's list. 64 samples are read to estimate the memory, by the
    first process of a node and, without `partial`, by one that finds a slab made for another part.
    **Raises:** SlabError if memory is too small, shared memory cannot be used or no sample can be
    read. ConfigurationError for unknown or bad options, a bad rank, a launch without
    `tfcommx.init()`, and with `reshuffle_fraction` if the launcher assigns no name to the run or
    the nodes have unequal slots; later, on all ranks, for samples or options that differ between
    ranks.
    """

    def __init__(
        self,
        source: Source | str | os.PathLike[str],
        *,
        topology: Topology | None = None,
        rank: int | None = None,
        **options: Any,
    ) -> None:
        for name in options:
            check_name("option of DataCache", name, Options.__dataclass_fields__)
        self.options = Options(**options)
        self.source = find_source(source) if isinstance(source, str | os.PathLike) else source
        if missing := [name for name in ("count", "key", "read") if not hasattr(self.source, name)]:
            raise ConfigurationError(
                "A source is required: a path, the name of a TensorFlow data set, or an object of "
                "tfcommx.data.sources, such as Arrays(images, labels). Received a "
                f"{type(source).__name__}, without {', '.join(missing)}."
            )
        self.topology, self.rank = find_position(topology, rank)
        # A reshuffle removes samples from the slab, which another run would lose
        exclusive = self.options.reshuffle_fraction > 0 and self.topology.nodes > 1
        if exclusive:
            self.topology.require_even("reshuffle_fraction", "leave it out")
        self.node, self.slot = self.topology.position_of(self.rank)
        facts = contents_of(self.source) | self.options.to_agree_on()
        kind = "samples and options of a DataCache"
        self._state_equal(kind, facts, SAME_SAMPLES)
        # Before the new slab's length is chosen, because slabs of killed runs occupy memory
        self.reclaimed = remove_unused(Path(self.options.memory))
        self.disk = None
        if self.options.disk is not None:
            if isinstance(self.source, Folder):
                self.source.check_outside("disk", self.options.disk)
            self.disk = Disk(self.options.disk, self.source.key, self.source.count)
        part = self._part()
        self.slab = open_slab(self.source, self.disk, part, self.options, self.node, exclusive)
        self.filler = Filler(self.source, self.slab, self.disk, self.options, self._threads())
        self._loader = Loader(self.source, self.slab, self.filler, self.options)
        # Epoch -> number of samples received from other nodes for it
        self._arrived: dict[int, int] = {}
        self._stats: list[EpochStats] = []
        # Not `__del__`, because that may not run at the end of the process, and the node's last
        # process would leave the slab in shared memory. A function, because a method would keep the
        # cache alive
        self._closed = weakref.finalize(self, _close, self.filler, self.slab, self.disk)

    def _state_equal(self, kind: str, values: Mapping[str, str], remedy: str) -> None:
        """State facts that must be equal on all ranks, if the cache serves the launch's ranks."""
        comm = process.current() if process.started() else None
        # Not for a cache of this rank alone, whose samples other ranks need not have
        if comm is not None and (self.topology, self.rank) == (comm.topology, comm.rank):
            comm.comparisons.state(Facts(kind, self.source.name, values, remedy))

    def _part(self) -> np.ndarray:
        """Return the samples of this node in the first epoch, int64 [n]."""
        slots = self.topology.slots_by_node
        return order.parts(self.source.count, slots, self.options.seed)[self.node]

    def _threads(self) -> int:
        processors = len(os.sched_getaffinity(0))
        # Bound by the launcher: the other processes of the node then have other processors
        bound = processors < _allowed_processors()
        sharers = 1 if bound else self.topology.slots_by_node[self.node]
        return self.options.threads or max(1, processors // sharers)

    def steps(self, spec: BatchSpec) -> int:
        """Return the number of batches of an epoch, the same on every rank."""
        return order.steps(self.source.count, self.topology, spec.batch, spec.drop_remainder)

    def share(self, epoch: int, shuffle: bool = True) -> np.ndarray:
        """Return the samples of this rank in an epoch, in order, int64 [n]."""
        count, options = self.source.count, self.options
        by = (options.seed, epoch, options.reshuffle_fraction, shuffle)
        return order.share(count, self.topology, self.rank, *by)

    def dataset(
        self, spec: BatchSpec, first_epoch: int = 0, epochs: int = 1, step: int = 0
    ) -> tf.data.Dataset:
        """Return this rank's batches of some epochs, one after the other, as a `tf.data.Dataset`.

        It is sharded: leave out `.shard(cx.size(), cx.rank())`, which it refuses.

        Loading runs ahead in the background, by up to 64 MB or three batches. Autotuning of tf.data
        is disabled (`autotune.enabled` is False), because it delays the end of `fit`. Stages that
        you add therefore need numbers, `map(..., num_parallel_calls=4)` and `prefetch(2)`, not
        AUTOTUNE.

        Datasets of the same arguments return the same batches, because the order is a pure function
        of the seed, the epoch, the ranks and this rank. A dataset that is iterated again returns
        the same batches too, with a warning if the spec shuffles.

        Args:
            spec: settings of the batches.
            first_epoch: number of the first epoch, >= 0.
            epochs: number of epochs, >= 1. With Keras: `fit(dataset,
                steps_per_epoch=cache.steps(spec))`.
            step: first step of the first epoch, in [0, steps], to resume within an epoch.

        Returns:
            Batches (images spec.dtype [b, h, w, c], labels int64 [b]). A skipped sample makes its
            batch smaller by one. If that empties a batch of a spec that shuffles and drops the
            remainder, the next sample that can be read takes its place, with a warning. A spec that
            does not shuffle has no empty batches: a rank with fewer samples than steps has fewer
            batches.

        **Raises:** ConfigurationError for arguments out of range, and inside a tf.function.
        """
        first_epoch, epochs, step = (
            check_whole(name, value)
            for name, value in (("first_epoch", first_epoch), ("epochs", epochs), ("step", step))
        )
        request = Epochs(spec, first_epoch, epochs, step, self.steps(spec))
        request.check(self.source.count, self.topology.size, self.options.store)
        spec.check_channels(self.source.channels)
        if spec.shuffle:  # For training only, because a single rank may evaluate
            facts = request.to_agree_on()
            self._state_equal("batches of a DataCache", facts, SAME_BATCHES)
        stats = EpochStats(first_epoch, epochs)
        self._stats.append(stats)

        def share(cache: DataCache, epoch: np.ndarray) -> np.ndarray:
            samples = cache.share(int(epoch), spec.shuffle)
            if spec.shuffle:
                warn_if_served(stats, int(epoch), len(samples))
            return samples

        # Unconverted here and below, because AutoGraph takes .05 CPU seconds for each function
        @tf.autograph.experimental.do_not_convert
        def load(samples: tf.Tensor, epoch: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
            return *self._loader.load(samples, epoch, spec, of_epoch, replacing), epoch

        def replace(cache: DataCache, skipped: np.ndarray, epoch: np.ndarray) -> Any:
            return cache.filler.replace(skipped, cache.share(int(epoch)), int(epoch))

        replacing = weak_method(self, replace)

        length = len(self.share(0, False))
        bounds = order.batch_bounds(length, spec.batch, request.steps)
        # Without the dropped remainder: `Filler` compares it with the number of skipped samples
        of_epoch = int(bounds[-1])
        indices = request.indices(weak_method(self, share), length)
        at_once, ready = prefetch_sizes(self._loader.batch_bytes(spec), self._threads())
        # In order, because a run that resumes at (epoch, step) must receive the remaining batches
        batches = indices.map(load, num_parallel_calls=at_once, deterministic=True)
        count, is_known = epochs * request.steps - step, True
        if not spec.shuffle:
            # Because a convolution refuses an empty batch on CPUs. Training steps need a batch on
            # every rank
            batches = batches.filter(lambda images, labels, epoch: tf.size(labels) > 0)
            filled = np.diff(bounds) > 0
            count = int(filled[step:].sum() + (epochs - 1) * filled.sum())
            is_known = self.options.on_error == "raise"
        elif length < request.steps:
            warnings.warn(
                f"Rank {self.rank} has {length} samples for {request.steps} steps, so some of its "
                "batches are empty. Convolutions and batch normalization cannot be trained on "
                "these. Use drop_remainder=True, a larger batch, or fewer ranks.",
                stacklevel=2,
            )
        batches = stats.recorded(batches.prefetch(ready))
        if is_known:
            # Without the cardinality, Keras reports at the first end of a validation that training
            # is interrupted, and BroadcastState cannot compare steps
            batches = batches.apply(tf.data.experimental.assert_cardinality(count))
        return of_one_rank(batches, self.topology.size)

    def report(self, epoch: int) -> dict[str, float]:
        """Return this process's statistics of loading in an epoch.

        The counts include samples that have been loaded ahead of the consumer.

        Returns:
            samples: number of samples served in the epoch.
            hit_memory, hit_disk, hit_source: shares of them, in [0, 1].
            repaired, unreadable, overflow: numbers of samples whose damage in memory was repaired,
                that could not be read, and that did not fit into memory.
            arrived: number of samples that `reshuffle` received from other nodes.
            corrupt_disk: number of reads from the disk level with a wrong CRC, since the start.
            loader_wait_seconds: seconds that the consumer waited for batches; NaN under
                `enable_op_determinism`, which has no clock.
        """
        rows = [stats.of(epoch) for stats in self._stats]
        waited, served = (float(sum(row[column] for row in rows)) for column in (0, 1))
        counts = self.filler.counts.get(epoch, Counter[str]())
        # At most 1, because counts include samples that are loaded ahead of those that were served
        disk, source = (
            min(1.0, counts[level] / served) if served else 0.0 for level in ("disk", "source")
        )
        return {
            "samples": served,
            "hit_memory": max(0.0, 1 - disk - source) if served else 0.0,
            "hit_disk": disk,
            "hit_source": source,
            **{kind: counts[kind] for kind in ("repaired", "unreadable", "overflow")},
            "arrived": self._arrived.get(epoch, 0),
            "corrupt_disk": self.disk.corrupt if self.disk else 0,
            "loader_wait_seconds": waited,
        }

    def warm(self) -> None:
        """Load all samples of this rank into memory before training."""
        for _ in self.warming():
            pass

    def warming(self) -> Iterator[None]:
        """Load the samples like `warm`, in `warming_steps` steps of 64, for a progress bar."""
        return self._loader.warming(self.share(0))

    @property
    def warming_steps(self) -> int:
        """Number of steps of `warming`."""
        return -(-len(self.share(0)) // WARM)

    def reshuffle(self, epoch: int, transport: Comm | None = None) -> int:
        """Receive the samples that are new on this node in `epoch` from the other nodes' memory.

        Nothing moves without `reshuffle_fraction`, or on one node. Without this call the samples
        are read from the disk level or the source, and take additional memory.

        Args:
            epoch: the epoch whose samples are received, >= 1.
            transport: the communicator; by default that of the running launch.

        Returns:
            The number of received samples.

        **Ranks:** all, after the dataset of the epoch before has ended on all ranks, and before
        that of `epoch` is created.
        """
        fraction = self.options.reshuffle_fraction
        if fraction == 0 or self.topology.nodes == 1:
            return 0
        comm, seed = transport or process.current(), self.options.seed
        arrived = reshuffle(self.slab, comm, self.topology, self.rank, seed, fraction, epoch)
        self._arrived[epoch] = arrived
        return arrived

    def close(self) -> None:
        """Release memory and files; the last process of the node removes the slab.

        Also done at the end of the process. No batch may be requested afterwards: a request raises
        an error, and a batch that is being read may be black.
        """
        self._closed()


def _allowed_processors() -> int:
    """Return the number of processors that a process of this container or job may be bound to.

    Fewer than the host's in a container with a set of processors, which all its processes share.
    """
    allowed: set[int] = set()

    def widen() -> None:
        with contextlib.suppress(OSError):  # A sandbox may forbid it
            # The kernel leaves out the processors that the control group lacks
            os.sched_setaffinity(0, range(8192))
        allowed.update(os.sched_getaffinity(0))

    # In a thread, which alone is bound to more processors, until it ends
    thread = threading.Thread(target=widen)
    thread.start()
    thread.join()
    return len(allowed)


def _close(filler: Filler, slab: Slab, disk: Disk | None) -> None:
    # The threads first, because they use the slab and the disk level
    filler.close()
    slab.close()
    if disk is not None:
        disk.close()

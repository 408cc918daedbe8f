"""Collectives on the groups of a topology. The only door to Horovod.

Every collective takes a group (`world`, `node` or `peers`) and a name that must be equal on all
members and not be in flight twice. All members of the group must call, with equal dtype and shape.
A group of one returns its input.

Traffic is counted where it is sent: each call adds what the collective's ring moves for the buffer
that it was given, and messages between two ranks add themselves.
"""

from __future__ import annotations

import abc
import contextlib
import functools
import math
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import tensorflow as tf

from tfcommx.cost import alltoall_traffic, broadcast_traffic, ring_traffic
from tfcommx.terms import MPI_LAUNCH, PlanError, Topology, Traffic

RENDEZVOUS_SECONDS = 60  # how long a rank waits for the others before Horovod starts
MESSAGES_NEED_MPI = (
    "Routes made of messages between two ranks (pipeline, tree, bidirectional) need an MPI launch: "
    f"{MPI_LAUNCH}. Received a Gloo launch. Launch with MPI, or use allreduce or torus."
)
LARGEST_COUNT = 2**31 - 1  # entries; Gloo and NCCL count in int32


class Post(Protocol):
    """Messages between two ranks. A request is what `send` and `receive` return; buffers must live
    until it is done.
    """

    # Rank -> bytes sent to it so far
    sent: dict[int, int]

    def send(self, array: np.ndarray, target: int, tag: int) -> Any:
        """Start to send a contiguous array to a rank of the world. Does not wait."""

    def receive(self, array: np.ndarray, source: int, tag: int) -> Any:
        """Start to receive into a contiguous array of equal length; messages of one pair and tag
        arrive in order.
        """

    def wait_any(self, requests: list[Any]) -> int:
        """Wait until one of the requests is done; return its position."""


class Comm(abc.ABC):
    """One rank's view of the ranks it exchanges with."""

    def __init__(self, rank: int, topology: Topology) -> None:
        self.rank = rank
        self.topology = topology
        self._open_post: Callable[[], Post] | None = None
        self._post: Post | None = None
        self._scopes, self._scope = 0, ""

    def own_scope(self) -> str:
        """Return a name that nobody else has, for `scope`. **Ranks:** all, in the same order."""
        self._scopes += 1
        return f"tfcommx{self._scopes}/"

    @contextlib.contextmanager
    def scope(self, own: str) -> Iterator[None]:
        """Name the collectives within after `own`, and after nothing else.

        Horovod knows a tensor in a graph by its name, and the scopes around it are not equal on all
        ranks: Keras numbers its optimizers, so that one which is made on some ranks only would make
        all ranks wait.
        """
        before, self._scope = self._scope, own
        try:
            # that ends in a slash: it stands alone, and what is named twice in it gets a number
            with tf.name_scope(own):
                yield
        finally:
            self._scope = before

    def members(self, group: str) -> tuple[int, ...]:
        """Return the ranks of my group of that name, ascending."""
        return self.topology.group(group, self.rank)

    def allreduce(self, tensor: tf.Tensor, group: str, name: str) -> tf.Tensor:
        """Sum over the group. **Cost:** 2 (p - 1)/p of the buffer sent."""
        ranks = self._check(tensor, group)
        if len(ranks) == 1:
            return tensor
        self._count(
            ring_traffic(2 * (len(ranks) - 1) / len(ranks) * _bytes(tensor), group, self.topology)
        )
        return self._allreduce(tensor, group, name)

    def allreduce_list(self, tensors: list[tf.Tensor], name: str, average: bool) -> list[tf.Tensor]:
        """Sum or average each tensor over the world, as plain Horovod does: it merges and averages
        in its own buffer.

        **Cost:** as one allreduce of them all, without a flat copy.
        """
        for tensor in tensors:
            self._check(tensor, "world")
        if self.topology.size == 1:
            return tensors
        sent = 2 * (self.topology.size - 1) / self.topology.size * sum(map(_bytes, tensors))
        self._count(ring_traffic(sent, "world", self.topology))
        return self._allreduce_list(tensors, name, average)

    def reduce_scatter(self, tensor: tf.Tensor, group: str, name: str) -> tf.Tensor:
        """Sum over the group; member i receives the i-th of p equal shards. **Cost:** (p - 1)/p of
        the buffer sent.

        **Raises:** PlanError where the first dimension cannot be cut into p equal shards.
        """
        ranks = self._check(tensor, group)
        if len(ranks) == 1:
            return tensor
        self._check_shards("reduce_scatter", tensor, ranks, name)
        self._count(
            ring_traffic((len(ranks) - 1) / len(ranks) * _bytes(tensor), group, self.topology)
        )
        return self._reduce_scatter(tensor, group, name)

    def all_gather(self, tensor: tf.Tensor, group: str, name: str) -> tf.Tensor:
        """Concatenate the members' tensors, in rank order, on every member. **Cost:** p - 1 times
        the own buffer sent.

        **Raises:** PlanError where the result has more entries than MPI can count.
        """
        ranks = self._check(tensor, group)
        if len(ranks) == 1:
            return tensor
        if (entries := len(ranks) * tensor.shape.num_elements()) > LARGEST_COUNT:
            raise PlanError(
                f"An all-gather brings at most {LARGEST_COUNT} entries together. {name!r} brings "
                f"{entries} from {len(ranks)} "
                "ranks. Lower `density`, `bucket_bytes`, or the wire format's bytes."
            )
        self._count(ring_traffic((len(ranks) - 1) * _bytes(tensor), group, self.topology))
        return self._all_gather(tensor, group, name)

    def alltoall(self, tensor: tf.Tensor, group: str, name: str) -> tf.Tensor:
        """Cut into p equal shards and send the i-th to member i; return the shards meant for me, in
        rank order.

        **Cost:** (p - 1)/p of the buffer sent, straight to where it is needed: the share between
        nodes is what leaves them.
        **Raises:** PlanError where the first dimension cannot be cut into p equal shards.
        """
        ranks = self._check(tensor, group)
        if len(ranks) == 1:
            return tensor
        self._check_shards("alltoall", tensor, ranks, name)
        self._count(
            alltoall_traffic((len(ranks) - 1) / len(ranks) * _bytes(tensor), group, self.topology)
        )
        return self._alltoall(tensor, group, name)

    def broadcast(
        self, tensor: tf.Tensor, root: int, name: str, counted: bool = False
    ) -> tf.Tensor:
        """Return the tensor of rank `root` on every rank of the world.

        **Cost:** every other rank receives it once; counted, as along a chain, where it is part of
        the training steps.
        """
        if self.topology.size == 1:
            return tensor
        if counted:
            self._count(broadcast_traffic(_bytes(tensor), self.topology))
        return self._broadcast(tensor, root, name)

    @property
    def has_messages(self) -> bool:
        """Tell whether messages between two ranks are possible here; one rank alone needs none."""
        return self._open_post is not None or self.topology.size == 1

    def open_post(self) -> Post | None:
        """Get ready for messages; one rank alone has none. **Ranks:** all, outside of traced code.

        **Raises:** PlanError without an MPI launch.
        """
        if not self.has_messages:
            raise PlanError(MESSAGES_NEED_MPI)
        if self._post is None and self.topology.size > 1:
            self._post = self._open_post()
        return self._post

    def by_messages(
        self, work: Callable[[np.ndarray, Post], np.ndarray], tensor: tf.Tensor, name: str
    ) -> tf.Tensor:
        """Return `work(array, post)`: on the host, with messages between ranks; dtype and shape as
        the tensor's.

        In traced code the calls follow each other in the order in which they were traced, which is
        the plan's and so the same on every rank, also from one `tf.cond` to the next: TensorFlow
        orders what changes a variable, and each call changes one. Without that order, one rank's
        threads could all wait in one bucket while another's wait in the next one, or take the
        messages of another optimizer for their own.

        **Ranks:** as the messages need. `open_post` must have been called. **Cost:** a copy to the
        host and back on GPUs.
        """

        def call(array: np.ndarray) -> np.ndarray:
            return work(array, self._post)

        if tf.executing_eagerly():
            return tf.constant(call(tensor.numpy()))
        with tf.device("/cpu:0"):
            with tf.control_dependencies([self._calls.assign_add(1)]):
                result = tf.numpy_function(
                    call, [tensor], tensor.dtype, name=name.replace("/", "_")
                )
            with tf.control_dependencies([result]):
                self._calls.assign_add(1)
        return tf.ensure_shape(result, tensor.shape)

    @functools.cached_property
    def _calls(self) -> tf.Variable:
        with tf.init_scope(), tf.device("/cpu:0"):
            return tf.Variable(0, dtype=tf.int64, trainable=False, name="tfcommx/calls")

    @abc.abstractmethod
    def gather_objects(self, item: Any) -> list[Any]:
        """Return every rank's (picklable) item, in rank order. **Ranks:** all, outside of traced
        code.
        """

    def traffic(self) -> Traffic:
        """Return the bytes that this rank has sent so far: of collectives the mean over the ranks,
        of messages its own.
        """
        inside, between = self._counted()
        for rank, amount in (self._post.sent if self._post else {}).items():
            if self.topology.node_of(rank) == self.topology.node_of(self.rank):
                inside += amount
            else:
                between += amount
        return Traffic(inside, between)

    @abc.abstractmethod
    def _counted(self) -> Traffic: ...

    def _check_shards(
        self, what: str, tensor: tf.Tensor, ranks: tuple[int, ...], name: str
    ) -> None:
        if tensor.shape[0] % len(ranks):
            raise PlanError(
                f"{what} {name!r} needs a length that {len(ranks)} ranks divide. Received "
                f"{tensor.shape[0]} "
                f"on rank {self.rank}. Pad the buffer."
            )

    def _check(self, tensor: tf.Tensor, group: str) -> tuple[int, ...]:
        ranks, entries = self.members(group), tensor.shape.num_elements()
        if entries is None and len(ranks) > 1:
            raise PlanError(
                "A collective needs a tensor whose shape is known while tracing: its bytes are "
                "counted then. Received shape "
                f"{tensor.shape} on rank {self.rank}. Say it: tf.ensure_shape."
            )
        if entries is not None and entries > LARGEST_COUNT:
            raise PlanError(
                f"A collective carries at most {LARGEST_COUNT} entries. Received {entries}. "
                "Lower `bucket_bytes`, or split the variable."
            )
        return ranks

    @abc.abstractmethod
    def _count(self, sent: Traffic) -> None: ...

    @abc.abstractmethod
    def _allreduce(self, tensor: tf.Tensor, group: str, name: str) -> tf.Tensor: ...

    @abc.abstractmethod
    def _allreduce_list(
        self, tensors: list[tf.Tensor], name: str, average: bool
    ) -> list[tf.Tensor]: ...

    @abc.abstractmethod
    def _reduce_scatter(self, tensor: tf.Tensor, group: str, name: str) -> tf.Tensor: ...

    @abc.abstractmethod
    def _all_gather(self, tensor: tf.Tensor, group: str, name: str) -> tf.Tensor: ...

    @abc.abstractmethod
    def _alltoall(self, tensor: tf.Tensor, group: str, name: str) -> tf.Tensor: ...

    @abc.abstractmethod
    def _broadcast(self, tensor: tf.Tensor, root: int, name: str) -> tf.Tensor: ...


def _bytes(tensor: tf.Tensor) -> int:
    return math.prod(tensor.shape) * tensor.dtype.size


# --- the launcher -----------------------------------------------------------------------


class Launcher(NamedTuple):
    """What the environment says of the process's place before Horovod starts."""

    # "gloo", "mpi" or "none"
    kind: str
    rank: int
    size: int
    # Place on its host: chooses the GPU
    local_rank: int


def launcher() -> Launcher:
    """Read the launcher's environment variables; a process that none started is alone."""
    env = os.environ
    if "HOROVOD_RANK" in env:
        return Launcher(
            "gloo",
            int(env["HOROVOD_RANK"]),
            int(env["HOROVOD_SIZE"]),
            int(env["HOROVOD_LOCAL_RANK"]),
        )
    if "OMPI_COMM_WORLD_RANK" in env:
        return Launcher(
            "mpi",
            int(env["OMPI_COMM_WORLD_RANK"]),
            int(env["OMPI_COMM_WORLD_SIZE"]),
            int(env["OMPI_COMM_WORLD_LOCAL_RANK"]),
        )
    return Launcher("none", 0, 1, 0)


def run_name() -> str:
    """Return a name that all processes of this run have, and no other run that lives on the
    machine.

    Of the launch; in a process that none started, of the process.
    **Raises:** PlanError where the launcher gives none.
    """
    kind = launcher().kind
    # a process number may come again, and another container may have it: with its start it is one
    # process
    if kind == "none":
        return f"{os.getpid()} {Path('/proc/self/stat').read_text().rpartition(')')[2].split()[19]}"
    words = {
        "gloo": ("HOROVOD_GLOO_RENDEZVOUS_ADDR", "HOROVOD_GLOO_RENDEZVOUS_PORT"),
        "mpi": ("PMIX_NAMESPACE",),
    }[kind]
    if missing := [word for word in words if word not in os.environ]:
        raise PlanError(
            f"A name of the run is required in {' and '.join(words)}, as horovodrun and mpirun "
            "set them. "
            f"Received none in {' and '.join(missing)}. Launch with one of them, or set it, "
            "equal on all ranks."
        )
    return " ".join(os.environ[word] for word in words)


def launch_interfaces() -> list[str]:
    """Return the network interfaces that the launcher gave to the engine; none where it leaves the
    choice to it.
    """
    of_gloo, of_open_mpi = "HOROVOD_GLOO_IFACE", "OMPI_MCA_btl_tcp_if_include"
    names = os.environ.get(of_gloo) or os.environ.get(of_open_mpi) or ""
    return [name for name in names.split(",") if name]


def gloo_hosts(here: Launcher) -> list[str]:
    """Return every rank's host, in rank order, through the store that horovodrun keeps for a Gloo
    launch.

    Needed before Horovod starts, since its static process sets must be the same on every rank. Rank
    0 reads what each has written and writes the list for all: of p squared reads each took the
    store, one Python process, 0.65 ms, which makes 11 s at 128 ranks.

    **Ranks:** all. **Raises:** PlanError that names the first missing rank after
    RENDEZVOUS_SECONDS.
    """
    from horovod.runner.http import http_client

    store = (
        os.environ["HOROVOD_GLOO_RENDEZVOUS_ADDR"],
        os.environ["HOROVOD_GLOO_RENDEZVOUS_PORT"],
        "tfcommx_hosts",
    )
    http_client.put_data_into_kvstore(*store, str(here.rank), os.environ["HOROVOD_HOSTNAME"])
    hosts, deadline = [], time.monotonic() + RENDEZVOUS_SECONDS
    while len(hosts) < here.size:
        late = time.monotonic() > deadline
        try:
            if here.rank == 0 or late:
                hosts.append(http_client.read_data_from_kvstore(*store, str(len(hosts))))
            else:
                hosts = http_client.read_data_from_kvstore(*store, "all")
        except RuntimeError as error:
            if late:
                raise PlanError(
                    f"Rank {len(hosts)} of {here.size} has not come to init() within "
                    f"{RENDEZVOUS_SECONDS} s "
                    f"(seen from rank {here.rank}). Does every rank call tfcommx.init()?"
                ) from error
            time.sleep(max(0.02, here.size / 500))  # all together at most 500 reads a second
    if here.rank == 0:
        http_client.put_data_into_kvstore(*store, "all", hosts)
    return hosts


# --- Horovod ----------------------------------------------------------------------------


# How others than horovodrun and Open MPI's mpirun say of how many processes this is one: srun,
# Hydra (MPICH, Intel MPI), torchrun.
OTHERS_SIZES = ("SLURM_STEP_NUM_TASKS", "PMI_SIZE", "WORLD_SIZE")


@contextlib.contextmanager
def _alone() -> Iterator[None]:
    """Let Horovod start without MPI in a single process; the environment is as before afterwards,
    for launches from here.

    **Raises:** PlanError where another launcher has started several: each would train alone, and
    all would save as rank 0.
    """
    before = dict(os.environ)
    if found := [
        f"{name}={before[name]}"
        for name in OTHERS_SIZES
        if before.get(name, "1") not in ("", "0", "1")
    ]:
        raise PlanError(
            "Several processes must be started by horovodrun or by Open MPI's mpirun: by another "
            "launcher each trains alone. "
            f"Received {found[0]}. Start one of them in this allocation; to train in one "
            "process, unset the variable."
        )
    os.environ |= {"HOROVOD_CONTROLLER": "gloo", "HOROVOD_CPU_OPERATIONS": "gloo"}
    try:
        yield
    finally:
        for name in ("HOROVOD_CONTROLLER", "HOROVOD_CPU_OPERATIONS"):
            if name in before:
                os.environ[name] = before[name]
            else:
                del os.environ[name]


class HorovodComm(Comm):
    """Horovod's collectives on static process sets, over NCCL, MPI or Gloo."""

    def __init__(
        self, here: Launcher, topology: Topology, open_post: Callable[[], Post] | None = None
    ) -> None:
        import horovod.tensorflow as hvd
        from horovod.tensorflow import mpi_ops
        from tensorflow.python.framework.kernels import get_registered_kernels_for_op

        super().__init__(here.rank, topology)
        self._hvd, self._ops, self._open_post = hvd, mpi_ops, open_post
        wanted = (
            ()
            if topology.uneven
            else tuple(
                sorted(
                    {
                        ranks
                        for rank in range(topology.size)
                        for group in ("node", "peers")
                        if len(ranks := topology.group(group, rank)) > 1
                        and len(ranks) < topology.size
                    }
                )
            )
        )
        sets = {ranks: hvd.ProcessSet(ranks) for ranks in wanted}
        if hvd.is_initialized():
            raise PlanError(
                "tfcommx.init() starts Horovod itself, with its node and peer groups. Received "
                "an initialised Horovod. "
                "Call tfcommx.init() in place of hvd.init()."
            )
        with _alone() if here.kind == "none" else contextlib.nullcontext():
            hvd.init(process_sets=list(sets.values()))
        if (hvd.rank(), hvd.size()) != (here.rank, topology.size):
            raise PlanError(
                f"Horovod sees rank {hvd.rank()} of {hvd.size()}, the launcher said {here.rank} "
                f"of {topology.size}. "
                "Start the script with horovodrun (or mpirun)."
            )
        gpus = hvd.nccl_built() and tf.config.list_logical_devices("GPU")
        # A Horovod built without NCCL's reduce-scatter does it on the CPU, by MPI or Gloo.
        on_gpu = gpus and any(
            kernel.device_type == "GPU"
            for kernel in get_registered_kernels_for_op("HorovodReducescatter").kernel
        )
        self._gloo_scatters = here.kind != "mpi" and not on_gpu
        self._sets = {tuple(range(topology.size)): hvd.global_process_set, **sets}
        with tf.device("/cpu:0"):
            self._sent = {
                kind: tf.Variable(0.0, dtype=tf.float64, trainable=False, name=f"bytes_{kind}")
                for kind in Traffic._fields
            }

    def gather_objects(self, item: Any) -> list[Any]:
        if self.topology.size == 1:
            return [item]
        with tf.init_scope():
            return self._hvd.allgather_object(item)

    def _counted(self) -> Traffic:
        return Traffic(*(float(self._sent[kind].numpy()) for kind in Traffic._fields))

    def _count(self, sent: Traffic) -> None:
        for kind, amount in sent._asdict().items():
            if amount:
                self._sent[kind].assign_add(amount)

    def _named(self, name: str) -> dict[str, Any]:
        """What follows the last slash of a name is what Horovod goes by; TensorFlow puts more
        before it when it inlines functions.
        """
        return {"name": (self._scope + name).replace("/", "."), "ignore_name_scope": True}

    def _set(self, group: str) -> Any:
        return self._sets[self.members(group)]

    def _allreduce(self, tensor: tf.Tensor, group: str, name: str) -> tf.Tensor:
        return self._ops._allreduce(
            tensor, **self._named(name), op=self._hvd.Sum, process_set=self._set(group)
        )

    def _allreduce_list(
        self, tensors: list[tf.Tensor], name: str, average: bool
    ) -> list[tf.Tensor]:
        return self._ops._grouped_allreduce(
            tensors, **self._named(name), op=self._hvd.Average if average else self._hvd.Sum
        )

    def _reduce_scatter(self, tensor: tf.Tensor, group: str, name: str) -> tf.Tensor:
        ranks = len(self.members(group))
        # its own gives wrong sums for large vectors now and then, without a word
        # (tests/test_bugs.py)
        if self._gloo_scatters:
            shards = tf.reshape(self._alltoall(tensor, group, name), [ranks, -1, *tensor.shape[1:]])
            return tf.ensure_shape(
                tf.add_n(tf.unstack(shards)), [tensor.shape[0] // ranks, *tensor.shape[1:]]
            )
        return _sized(
            self._ops._reducescatter(
                tensor, **self._named(name), op=self._hvd.Sum, process_set=self._set(group)
            ),
            tensor,
            1 / ranks,
        )

    def _all_gather(self, tensor: tf.Tensor, group: str, name: str) -> tf.Tensor:
        return _sized(
            self._ops.allgather(tensor, **self._named(name), process_set=self._set(group)),
            tensor,
            len(self.members(group)),
        )

    def _alltoall(self, tensor: tf.Tensor, group: str, name: str) -> tf.Tensor:
        return _sized(
            self._ops.alltoall(tensor, **self._named(name), process_set=self._set(group)), tensor, 1
        )

    def _broadcast(self, tensor: tf.Tensor, root: int, name: str) -> tf.Tensor:
        return self._ops.broadcast(tensor, root, **self._named(name))


def _sized(result: tf.Tensor, tensor: tf.Tensor, factor: float) -> tf.Tensor:
    """Horovod's shape functions forget the first dimension of gathered and scattered tensors: say
    it again.

    Not by an op: TensorFlow's would take int32, which wire buffers are, from a GPU to the host and
    back.
    """
    result.set_shape([round(tensor.shape[0] * factor), *tensor.shape[1:]])
    return result


# --- the process's own Comm -------------------------------------------------------------

_current: Comm | None = None


def current() -> Comm:
    """Return the Comm that init() made. **Raises:** RuntimeError before init()."""
    if _current is None:
        raise RuntimeError(
            "tfcommx.init() must be called first, once, at the start of the script on every rank."
        )
    return _current


def started() -> bool:
    """Tell whether init() was called."""
    return _current is not None


def set_current(comm: Comm | None) -> None:
    """Make `comm` the process's own; None forgets it."""
    global _current
    _current = comm


def rank() -> int:
    """Return this process's rank, in [0, size())."""
    return current().rank


def size() -> int:
    """Return the number of ranks."""
    return current().topology.size


def is_chief() -> bool:
    """Tell whether this is rank 0, the one that prints and saves."""
    return rank() == 0

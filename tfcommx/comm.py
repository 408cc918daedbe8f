"""Collectives on the groups of a topology. The only door to Horovod; ThreadComm runs p ranks in one process for law tests.

Every collective takes a group (`world`, `node` or `peers`) and a name that must be equal on all members and not be in
flight twice. All members of the group must call, with equal dtype and shape. A group of one returns its input.

Traffic is counted where it is sent: each call adds what the collective's ring moves for the buffer that it was given.
"""

from __future__ import annotations

import abc
import math
import os
import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import tensorflow as tf

from tfcommx.cost import ring_traffic
from tfcommx.terms import PlanError, Topology, Traffic

RENDEZVOUS_SECONDS = 60  # how long a rank waits for the others before Horovod starts
LARGEST_COUNT = 2**31 - 1  # entries; Gloo and NCCL count in int32


class Comm(abc.ABC):
    """One rank's view of the ranks it exchanges with."""

    def __init__(self, rank: int, topology: Topology) -> None:
        self.rank = rank
        self.topology = topology

    def members(self, group: str) -> tuple[int, ...]:
        """Return the ranks of my group of that name, ascending."""
        return self.topology.group(group, self.rank)

    def allreduce(self, tensor: tf.Tensor, group: str, name: str) -> tf.Tensor:
        """Sum over the group. **Cost:** 2 (p - 1)/p of the buffer sent."""
        ranks = self._check(tensor, group)
        if len(ranks) == 1:
            return tensor
        self._count(2 * (len(ranks) - 1) / len(ranks) * _bytes(tensor), group)
        return self._allreduce(tensor, group, name)

    def reduce_scatter(self, tensor: tf.Tensor, group: str, name: str) -> tf.Tensor:
        """Sum over the group; member i receives the i-th of p equal shards. **Cost:** (p - 1)/p of the buffer sent.

        **Raises:** PlanError where the first dimension cannot be cut into p equal shards.
        """
        ranks = self._check(tensor, group)
        if len(ranks) == 1:
            return tensor
        if tensor.shape[0] % len(ranks):
            raise PlanError(f"reduce_scatter {name!r} needs a length that {len(ranks)} ranks divide. Received {tensor.shape[0]} "
                            f"on rank {self.rank}. Pad the buffer.")
        self._count((len(ranks) - 1) / len(ranks) * _bytes(tensor), group)
        return self._reduce_scatter(tensor, group, name)

    def all_gather(self, tensor: tf.Tensor, group: str, name: str) -> tf.Tensor:
        """Concatenate the members' tensors, in rank order, on every member. **Cost:** p - 1 times the own buffer sent."""
        ranks = self._check(tensor, group)
        if len(ranks) == 1:
            return tensor
        self._count((len(ranks) - 1) * _bytes(tensor), group)
        return self._all_gather(tensor, group, name)

    def broadcast(self, tensor: tf.Tensor, root: int, name: str) -> tf.Tensor:
        """Return the tensor of rank `root` on every rank of the world. Not counted: it is used before training only."""
        return tensor if self.topology.size == 1 else self._broadcast(tensor, root, name)

    @abc.abstractmethod
    def gather_objects(self, item: Any) -> list[Any]:
        """Return every rank's (picklable) item, in rank order. **Ranks:** all, outside of traced code."""

    @abc.abstractmethod
    def traffic(self) -> Traffic:
        """Return the bytes that this rank has sent so far, as the mean over the ranks of each collective."""

    def _check(self, tensor: tf.Tensor, group: str) -> tuple[int, ...]:
        if tensor.shape.num_elements() is not None and tensor.shape.num_elements() > LARGEST_COUNT:
            raise PlanError(f"A collective carries at most {LARGEST_COUNT} entries. Received {tensor.shape.num_elements()}. "
                            "Lower `bucket_bytes`, or split the variable.")
        return self.members(group)

    @abc.abstractmethod
    def _count(self, sent: float, group: str) -> None: ...

    @abc.abstractmethod
    def _allreduce(self, tensor: tf.Tensor, group: str, name: str) -> tf.Tensor: ...

    @abc.abstractmethod
    def _reduce_scatter(self, tensor: tf.Tensor, group: str, name: str) -> tf.Tensor: ...

    @abc.abstractmethod
    def _all_gather(self, tensor: tf.Tensor, group: str, name: str) -> tf.Tensor: ...

    @abc.abstractmethod
    def _broadcast(self, tensor: tf.Tensor, root: int, name: str) -> tf.Tensor: ...


def _bytes(tensor: tf.Tensor) -> int:
    return math.prod(tensor.shape) * tensor.dtype.size


# --- the launcher ----------------------------------------------------------------------------------------------------


class Launcher(NamedTuple):
    """What the environment says of the process's place before Horovod starts."""

    kind: str  # "gloo", "mpi" or "none"
    rank: int
    size: int
    local_rank: int  # place on its host: chooses the GPU


def launcher() -> Launcher:
    """Read the launcher's environment variables; a process that none started is alone."""
    env = os.environ
    if "HOROVOD_RANK" in env:
        return Launcher("gloo", int(env["HOROVOD_RANK"]), int(env["HOROVOD_SIZE"]), int(env["HOROVOD_LOCAL_RANK"]))
    if "OMPI_COMM_WORLD_RANK" in env:
        return Launcher("mpi", int(env["OMPI_COMM_WORLD_RANK"]), int(env["OMPI_COMM_WORLD_SIZE"]),
                        int(env["OMPI_COMM_WORLD_LOCAL_RANK"]))
    return Launcher("none", 0, 1, 0)


def launch_interfaces() -> list[str]:
    """Return the network interfaces that the launcher gave to the engine; none where it leaves the choice to it."""
    of_gloo, of_open_mpi = "HOROVOD_GLOO_IFACE", "OMPI_MCA_btl_tcp_if_include"
    names = os.environ.get(of_gloo) or os.environ.get(of_open_mpi) or ""
    return [name for name in names.split(",") if name]


def gloo_hosts(here: Launcher) -> list[str]:
    """Return every rank's host, in rank order, through the store that horovodrun keeps for a Gloo launch.

    Needed before Horovod starts, since its static process sets must be the same on every rank.

    **Ranks:** all. **Raises:** PlanError that names the first missing rank after RENDEZVOUS_SECONDS.
    """
    from horovod.runner.http import http_client

    store = (os.environ["HOROVOD_GLOO_RENDEZVOUS_ADDR"], os.environ["HOROVOD_GLOO_RENDEZVOUS_PORT"], "tfcommx_hosts")
    http_client.put_data_into_kvstore(*store, str(here.rank), os.environ["HOROVOD_HOSTNAME"])
    hosts, deadline = [], time.monotonic() + RENDEZVOUS_SECONDS
    while len(hosts) < here.size:
        try:
            hosts.append(http_client.read_data_from_kvstore(*store, str(len(hosts))))
        except RuntimeError as error:
            if time.monotonic() > deadline:
                raise PlanError(f"Rank {len(hosts)} of {here.size} has not come to init() within {RENDEZVOUS_SECONDS} s "
                                f"(seen from rank {here.rank}). Does every rank call tfcommx.init()?") from error
            time.sleep(0.02)
    return hosts


# --- Horovod ---------------------------------------------------------------------------------------------------------


class HorovodComm(Comm):
    """Horovod's collectives on static process sets, over NCCL, MPI or Gloo."""

    def __init__(self, here: Launcher, topology: Topology) -> None:
        if here.kind == "none":  # without this a build with MPI would start MPI for a single process
            os.environ.setdefault("HOROVOD_CONTROLLER", "gloo")
            os.environ.setdefault("HOROVOD_CPU_OPERATIONS", "gloo")
        import horovod.tensorflow as hvd
        from horovod.tensorflow import mpi_ops

        super().__init__(here.rank, topology)
        self._hvd, self._ops = hvd, mpi_ops
        wanted = () if topology.uneven else tuple(sorted({
            ranks for rank in range(topology.size) for group in ("node", "peers") if len(ranks := topology.group(group, rank)) > 1
            and len(ranks) < topology.size
        }))
        sets = {ranks: hvd.ProcessSet(ranks) for ranks in wanted}
        if hvd.is_initialized():
            raise PlanError("tfcommx.init() starts Horovod itself, with its node and peer groups. Received an initialised Horovod. "
                            "Call tfcommx.init() in place of hvd.init().")
        hvd.init(process_sets=list(sets.values()))
        if (hvd.rank(), hvd.size()) != (here.rank, topology.size):
            raise PlanError(f"Horovod sees rank {hvd.rank()} of {hvd.size()}, the launcher said {here.rank} of {topology.size}. "
                            "Start the script with horovodrun (or mpirun).")
        self._sets = {tuple(range(topology.size)): hvd.global_process_set, **sets}
        with tf.device("/cpu:0"):
            self._sent = {kind: tf.Variable(0.0, dtype=tf.float64, trainable=False, name=f"bytes_{kind}") for kind in Traffic._fields}

    def gather_objects(self, item: Any) -> list[Any]:
        if self.topology.size == 1:
            return [item]
        with tf.init_scope():
            return self._hvd.allgather_object(item)

    def traffic(self) -> Traffic:
        return Traffic(*(float(self._sent[kind].numpy()) for kind in Traffic._fields))

    def _count(self, sent: float, group: str) -> None:
        for kind, amount in ring_traffic(sent, group, self.topology)._asdict().items():
            if amount:
                self._sent[kind].assign_add(amount)

    def _set(self, group: str) -> Any:
        return self._sets[self.members(group)]

    def _allreduce(self, tensor: tf.Tensor, group: str, name: str) -> tf.Tensor:
        return self._ops._allreduce(tensor, name=name, op=self._hvd.Sum, process_set=self._set(group))

    def _reduce_scatter(self, tensor: tf.Tensor, group: str, name: str) -> tf.Tensor:
        return _sized(self._ops._reducescatter(tensor, name=name, op=self._hvd.Sum, process_set=self._set(group)),
                      tensor, 1 / len(self.members(group)))

    def _all_gather(self, tensor: tf.Tensor, group: str, name: str) -> tf.Tensor:
        return _sized(self._ops.allgather(tensor, name=name, process_set=self._set(group)), tensor, len(self.members(group)))

    def _broadcast(self, tensor: tf.Tensor, root: int, name: str) -> tf.Tensor:
        return self._ops.broadcast(tensor, root, name=name)


def _sized(result: tf.Tensor, tensor: tf.Tensor, factor: float) -> tf.Tensor:
    """Horovod's shape functions forget the first dimension of gathered and scattered tensors: say it again."""
    return tf.ensure_shape(result, [round(tensor.shape[0] * factor), *tensor.shape[1:]])


# --- the process's own Comm --------------------------------------------------------------------------------------------

_current: Comm | None = None


def current() -> Comm:
    """Return the Comm that init() made. **Raises:** RuntimeError before init()."""
    if _current is None:
        raise RuntimeError("tfcommx.init() must be called first, once, at the start of the script on every rank.")
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


# --- p ranks in one process ------------------------------------------------------------------------------------------


class _Meeting:
    """Where the threads of ThreadComm hand each other their tensors."""

    def __init__(self, topology: Topology) -> None:
        self.topology = topology
        self.lock = threading.Condition()
        self.rooms: dict[Any, dict[int, Any]] = {}
        self.failure: BaseException | None = None

    def exchange(self, ranks: tuple[int, ...], turn: int, rank: int, label: str, item: Any) -> list[Any]:
        """Wait until all of `ranks` are here for the same turn; return their items in rank order."""
        with self.lock:
            room = self.rooms.setdefault((ranks, turn), {})
            room[rank] = (label, item)
            self.lock.notify_all()
            if not self.lock.wait_for(lambda: self.failure is not None or len(room) == len(ranks), timeout=60):
                self.failure = TimeoutError(f"Rank {rank} waited for ranks {sorted(set(ranks) - set(room))} in {label!r}.")
            if self.failure is not None:
                raise RuntimeError(f"Rank {rank} was left alone in {label!r}: {self.failure}") from self.failure
        labels = {text for text, _ in room.values()}
        if len(labels) > 1:
            raise RuntimeError(f"Ranks {ranks} met in different collectives: {sorted(labels)}.")
        return [room[member][1] for member in ranks]


class ThreadComm(Comm):
    """p ranks as p threads of one process, in eager mode: for law tests and corner cases, not for speed.

    Sums are taken in rank order, in the tensor's own dtype. Ranks that meet in collectives of different names are an error.
    """

    def __init__(self, rank: int, meeting: _Meeting) -> None:
        super().__init__(rank, meeting.topology)
        self._meeting = meeting
        self._turns: dict[tuple[int, ...], int] = {}
        self._sent = Traffic(0.0, 0.0)

    @staticmethod
    def run(topology: Topology, work: Callable[[Comm], Any]) -> list[Any]:
        """Call `work(comm)` as every rank of the topology; return the results in rank order, or raise the first failure."""
        meeting, results = _Meeting(topology), [None] * topology.size
        failures: list[tuple[int, BaseException]] = []

        def play(rank: int) -> None:
            try:
                results[rank] = work(ThreadComm(rank, meeting))
            except BaseException as error:
                with meeting.lock:
                    failures.append((rank, error))
                    meeting.failure = meeting.failure or error
                    meeting.lock.notify_all()

        threads = [threading.Thread(target=play, args=(rank,)) for rank in range(topology.size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if failures:
            raise failures[0][1]
        return results

    def gather_objects(self, item: Any) -> list[Any]:
        return self._meet("world", "gather_objects", item)

    def traffic(self) -> Traffic:
        return self._sent

    def _meet(self, group: str, label: str, item: Any) -> list[Any]:
        ranks = self.members(group)
        self._turns[ranks] = turn = self._turns.get(ranks, 0) + 1
        return self._meeting.exchange(ranks, turn, self.rank, label, item)

    def _count(self, sent: float, group: str) -> None:
        self._sent = Traffic(*(a + b for a, b in zip(self._sent, ring_traffic(sent, group, self.topology), strict=True)))

    def _sum(self, tensor: tf.Tensor, group: str, label: str) -> tf.Tensor:
        total, *rest = self._meet(group, label, tensor)
        for other in rest:
            total = total + other
        return total

    def _allreduce(self, tensor: tf.Tensor, group: str, name: str) -> tf.Tensor:
        return self._sum(tensor, group, f"allreduce {name}")

    def _reduce_scatter(self, tensor: tf.Tensor, group: str, name: str) -> tf.Tensor:
        ranks = self.members(group)
        return tf.split(self._sum(tensor, group, f"reduce_scatter {name}"), len(ranks))[ranks.index(self.rank)]

    def _all_gather(self, tensor: tf.Tensor, group: str, name: str) -> tf.Tensor:
        return tf.concat(self._meet(group, f"all_gather {name}", tensor), axis=0)

    def _broadcast(self, tensor: tf.Tensor, root: int, name: str) -> tf.Tensor:
        return self._meet("world", f"broadcast {name}", tensor)[root]

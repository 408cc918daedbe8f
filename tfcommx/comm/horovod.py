"""Horovod's collectives. The only module that imports Horovod."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Mapping
from types import ModuleType
from typing import Any

import tensorflow as tf

from tfcommx.comm.base import Comm
from tfcommx.comm.launcher import Launcher, check_alone, rendezvous_seconds
from tfcommx.comm.messages import Messages
from tfcommx.comm.point_to_point import PointToPoint
from tfcommx.terms import PlanError, Topology, Traffic

# The release that is tested; its private functions are used.
HOROVOD = "0.28."
# How long ranks wait for each other before Horovod starts; TFCOMMX_RENDEZVOUS_SECONDS overrides it
RENDEZVOUS_SECONDS = 60


def gloo_hosts(here: Launcher) -> list[str]:
    """Return every rank's host, in rank order, through the store of a Gloo launch.

    Needed before Horovod starts, because its static process sets must be the same on every rank.
    Rank 0 reads what each rank has written, and writes the list for all: with p squared reads,
    each took the store, a single Python process, 0.65 ms, which makes 11 s at 128 ranks.

    **Ranks:** all.
    **Raises:** PlanError that names the first missing rank after RENDEZVOUS_SECONDS.
    """
    from horovod.runner.http import http_client

    place = (os.environ[f"HOROVOD_GLOO_RENDEZVOUS_{name}"] for name in ("ADDR", "PORT"))
    store = (*place, "tfcommx_hosts")
    http_client.put_data_into_kvstore(*store, str(here.rank), os.environ["HOROVOD_HOSTNAME"])
    seconds = rendezvous_seconds(RENDEZVOUS_SECONDS)
    hosts, deadline = [], time.monotonic() + seconds
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
                    f"Rank {len(hosts)} of {here.size} has not called init() within "
                    f"{seconds:g} s (seen from rank {here.rank}). Does every rank call "
                    "tfcommx.init()?"
                ) from error
            time.sleep(max(0.02, here.size / 500))  # All together at most 500 reads a second.
    if here.rank == 0:
        http_client.put_data_into_kvstore(*store, "all", hosts)
    return hosts


def import_horovod() -> tuple[ModuleType, ModuleType]:
    """Import Horovod's module for TensorFlow, and its operations.

    **Raises:** PlanError if Horovod is missing, of another release, or built for another
    TensorFlow.
    """
    remedy = (
        "Install it after TensorFlow: python scripts/setup, or as docs/how-to/install.md describes."
    )
    try:
        import horovod
        import horovod.tensorflow as hvd
        from horovod.tensorflow import mpi_ops
    except (ImportError, tf.errors.NotFoundError) as error:
        raise PlanError(
            f"Horovod {HOROVOD}x, built for TensorFlow {tf.__version__}, is required. Received: "
            f"{error}. {remedy}"
        ) from error
    if not horovod.__version__.startswith(HOROVOD):
        raise PlanError(f"Horovod {HOROVOD}x is required. Received {horovod.__version__}. {remedy}")
    return hvd, mpi_ops


def serve_rendezvous(slots: Mapping[str, int]) -> int:
    """Serve, as horovodrun would, what ranks under Gloo need to find each other.

    Args:
        slots: host -> its ranks, in rank order.

    Returns:
        The port. The server lives in a thread of this process.
    """
    import_horovod()
    from horovod.runner.common.util.hosts import HostInfo, get_host_assignments
    from horovod.runner.http.http_server import RendezvousServer

    hosts, server = [HostInfo(*pair) for pair in slots.items()], RendezvousServer()
    port = server.start()
    server.init(get_host_assignments(hosts, sum(slots.values())))
    return port


@contextlib.contextmanager
def without_mpi() -> Iterator[None]:
    """Let Horovod start without MPI in a single process; restore the environment afterwards.

    Launches that this process makes later must not inherit the change.
    **Raises:** PlanError if another launcher has started several processes.
    """
    check_alone()
    names = ("HOROVOD_CONTROLLER", "HOROVOD_CPU_OPERATIONS")
    before = {name: os.environ[name] for name in names if name in os.environ}
    os.environ |= dict.fromkeys(names, "gloo")
    try:
        yield
    finally:
        for name in names:
            os.environ.pop(name, None)
        os.environ |= before


def smaller_groups(topology: Topology) -> list[tuple[int, ...]]:
    """Return the groups that need a process set: some ranks, but neither one nor all."""
    if topology.uneven:
        return []
    groups = {
        topology.group(name, rank) for rank in range(topology.size) for name in ("node", "peers")
    }
    return sorted(ranks for ranks in groups if 1 < len(ranks) < topology.size)


def nccl_scatters(hvd: ModuleType) -> bool:
    """Tell whether Horovod reduce-scatters on a GPU: built without NCCL's, it uses the CPU."""
    from tensorflow.python.framework.kernels import get_registered_kernels_for_op

    if not hvd.nccl_built() or not tf.config.list_logical_devices("GPU"):
        return False
    kernels = get_registered_kernels_for_op("HorovodReducescatter").kernel
    return any(kernel.device_type == "GPU" for kernel in kernels)


class HorovodComm(Comm):
    """Horovod's collectives on static process sets, over NCCL, MPI or Gloo.

    Args:
        here: what the launcher says.
        topology: all ranks and their nodes.
        make_messages: makes a PointToPoint of this rank; None if there can be none.

    **Ranks:** all, with equal topologies. It starts Horovod.
    **Raises:** PlanError if Horovod is missing, runs already, or counts other ranks.
    """

    def __init__(
        self,
        here: Launcher,
        topology: Topology,
        make_messages: Callable[..., PointToPoint] | None = None,
    ) -> None:
        hvd, mpi_ops = import_horovod()
        centre_rank = here.size if here.centre else None
        messages = Messages(here.rank, topology, make_messages, centre_rank)
        super().__init__(here.rank, topology, messages)
        self._hvd, self._ops = hvd, mpi_ops
        sets = {ranks: hvd.ProcessSet(ranks) for ranks in smaller_groups(topology)}
        self._start(here, list(sets.values()))
        self._gloo_scatters = here.kind != "mpi" and not nccl_scatters(hvd)
        self._sets = {tuple(range(topology.size)): hvd.global_process_set, **sets}
        with tf.device("/cpu:0"):
            self._sent = {
                kind: tf.Variable(0.0, dtype=tf.float64, trainable=False, name=f"bytes_{kind}")
                for kind in Traffic._fields
            }

    def _start(self, here: Launcher, sets: list[Any]) -> None:
        hvd, size = self._hvd, self.topology.size
        if hvd.is_initialized():
            raise PlanError(
                "tfcommx.init() starts Horovod itself, with its node and peer groups. Received "
                "an initialised Horovod. Call tfcommx.init() instead of hvd.init()."
            )
        with without_mpi() if here.kind == "none" else contextlib.nullcontext():
            # The ranks that train; None: all processes of the launch
            hvd.init(comm=list(range(size)) if here.centre else None, process_sets=sets)
        if (hvd.rank(), hvd.size()) != (here.rank, size):
            raise PlanError(
                f"Horovod counts rank {hvd.rank()} of {hvd.size()}, the launcher rank {here.rank} "
                f"of {size}. Start the script with horovodrun (or mpirun)."
            )
        # Not the topology's: `node_size` may say what stands for a node
        self.local_rank, self.local_size = hvd.local_rank(), hvd.local_size()

    def _gather_objects(self, item: Any) -> list[Any]:
        self.membership.require_all()
        with tf.init_scope():
            return self._hvd.allgather_object(item)

    def _counted(self) -> Traffic:
        return Traffic(*(float(self._sent[kind].numpy()) for kind in Traffic._fields))

    def _count(self, sent: Traffic) -> None:
        for kind, amount in sent._asdict().items():
            if amount:
                self._sent[kind].assign_add(amount)

    def _named(self, name: str) -> dict[str, Any]:
        """Return the arguments that name a collective.

        Horovod reads only what follows the last slash, because TensorFlow puts more before it when
        it inlines functions; so the name has none. It stands in HOROVOD_TIMELINE, too.
        """
        scope = self._open_scope.name
        if scope:  # Which begins with the package's name
            name = name.removeprefix("tfcommx/")
        return {"name": (scope + name).replace("/", "."), "ignore_name_scope": True}

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
        # Gloo's own sometimes gives wrong sums for large vectors, without an error
        # (tests/bugs/test_bugs.py).
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
    """Restore the first dimension, which Horovod's shape functions forget.

    Not by an op: TensorFlow's would take int32, which wire buffers are, from a GPU to the host and
    back.
    """
    result.set_shape([round(tensor.shape[0] * factor), *tensor.shape[1:]])
    return result

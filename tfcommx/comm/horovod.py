"""Horovod's collectives. The only module that imports Horovod."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf

from tfcommx.comm.base import Comm, PointToPoint
from tfcommx.comm.launcher import Launcher
from tfcommx.terms import PlanError, Topology, Traffic

RENDEZVOUS_SECONDS = 60  # how long a rank waits for the others before Horovod starts


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
        self,
        here: Launcher,
        topology: Topology,
        open_point_to_point: Callable[[], PointToPoint] | None = None,
    ) -> None:
        import horovod.tensorflow as hvd
        from horovod.tensorflow import mpi_ops
        from tensorflow.python.framework.kernels import get_registered_kernels_for_op

        super().__init__(here.rank, topology)
        self._hvd, self._ops, self._open_point_to_point = hvd, mpi_ops, open_point_to_point
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
        # (tests/bugs/test_bugs.py)
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

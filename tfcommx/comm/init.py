"""init(): from what the launcher says to a running Horovod with its node and peer groups."""

from __future__ import annotations

import functools
import math
import socket

import tensorflow as tf

from tfcommx.comm import (
    base,
    cluster_environment,
    easgd_process,
    gpu_identity,
    horovod,
    launcher,
    liveness,
    mpi,
    process,
    rendezvous,
)
from tfcommx.comm.gloo_hosts import gloo_hosts
from tfcommx.comm.unwrapped import UnwrappedOptimizers
from tfcommx.terms import PlanError, Topology


def init(
    node_size: int | None = None,
    watch_seconds: float | None = liveness.LIMIT_SECONDS,
    stall_seconds: float | None = liveness.STALL_SECONDS,
    stall_limit_seconds: float | None = None,
) -> base.Comm:
    """Start Horovod with the groups that the routes need; call it instead of `hvd.init()`.

    Works under horovodrun (Gloo or MPI), mpirun, srun, torchrun and whatever sets torchrun's
    variables, and in a single process without a launcher.
    On GPUs each process keeps the one with the number of its local rank, with memory growth. A
    second call returns the same Comm.

    Args:
        node_size: ranks that stand for one node, if that is not what the hosts say (>= 1, divides
            the number of ranks); None: as the launcher placed them.
        watch_seconds: a rank that does not respond for this long (> 0) makes all others end with an
            error that names it, also if they wait for it in a collective; None: nothing watches.
            See comm/liveness.py.
        stall_seconds: if ranks have waited this long (> 0) for others that are alive, every rank
            logs who waits for whom, where, and what the others do; None: it does not. See
            comm/stalls.py. The environment variable TFCOMMX_STALL_SECONDS overrides it; 0 turns it
            off.
        stall_limit_seconds: if they have waited this long (> 0), all end with that message; None:
            they wait on. TFCOMMX_STALL_LIMIT_SECONDS overrides it. Nothing watches for stalls
            without `watch_seconds`.

    Returns:
        The Comm of this rank; `tfcommx.comm.current()` returns it too.

    **Ranks:** all, with equal `node_size`.
    **Cost:** one exchange of host names before Horovod starts; static process sets, so nothing per
    step.
    **Raises:** PlanError for seconds that are not > 0, for a node_size that does not divide the
    number of ranks, for ranks of a host that are not consecutive, for more ranks than GPUs on a
    host, if Horovod is missing, and if a rank does not come.
    """
    for name, seconds in (
        ("watch_seconds", watch_seconds),
        ("stall_seconds", stall_seconds),
        ("stall_limit_seconds", stall_limit_seconds),
    ):
        if seconds is not None and not 0 < seconds < math.inf:
            raise PlanError(
                f"`{name}` must be > 0 and finite, or None for no watch. Received {seconds!r}."
            )
    stall_seconds = launcher.seconds_from("TFCOMMX_STALL_SECONDS", stall_seconds, off=True)
    stall_limit_seconds = launcher.seconds_from(
        "TFCOMMX_STALL_LIMIT_SECONDS", stall_limit_seconds, off=True
    )
    if process.started():
        return _started_before(node_size)
    if launcher.launcher().kind == "environment":
        any_order = node_size is not None
        rendezvous.join(cluster_environment.cluster_environment(), any_order)
    here = launcher.launcher()
    if here.kind == "mpi":
        mpi.start()
    topology = _topology(here, node_size)
    gpu = _keep_one_gpu(here)
    watched = watch_seconds is not None
    # Messages between two ranks need MPI
    make_messages = functools.partial(mpi.MpiPointToPoint, watched) if here.kind == "mpi" else None
    comm = horovod.HorovodComm(here, topology, make_messages)
    process.set_current(comm)
    if here.size > 1:
        _check_one_rank_per_gpu(comm, gpu)
        liveness.start(
            comm,
            launcher.launch_interfaces(),
            liveness.Limits(watch_seconds, stall_seconds, stall_limit_seconds),
            mpi.gather_with_centre if here.centre else comm.gather_objects,
            launcher.on_one_host(),
        )
        if here.centre:
            # Before the end of the watch, which may end the process
            easgd_process.tell_the_centre_at_exit()
        UnwrappedOptimizers(here.rank).watch()
    return comm


def _started_before(node_size: int | None) -> base.Comm:
    comm = process.current()
    if node_size not in (None, comm.topology.slots):
        raise PlanError(
            f"init() was called before, with {comm.topology.slots} ranks to a node. Received "
            f"node_size={node_size}. Call it once."
        )
    return comm


def _topology(here: launcher.Launcher, node_size: int | None) -> Topology:
    if node_size is not None:
        if not isinstance(node_size, int) or node_size < 1 or here.size % node_size:
            raise PlanError(
                f"`node_size` must divide the number of ranks. Received node_size={node_size} "
                f"with {here.size} ranks."
            )
        return Topology(here.size // node_size, node_size)
    if here.size == 1:
        return Topology(1, 1)
    return Topology.of_hosts(gloo_hosts(here) if here.kind == "gloo" else mpi.mpi_hosts())


def _keep_one_gpu(here: launcher.Launcher) -> str:
    """Keep one of the GPUs that this process sees; return which it is, empty if it sees none.

    A launcher may bind one to each process, or some to each: they are then counted from 0 in each.
    """
    gpus = tf.config.list_physical_devices("GPU")
    if not gpus:
        return ""
    number = here.local_rank % len(gpus)
    tf.config.set_visible_devices(gpus[number], "GPU")
    tf.config.experimental.set_memory_growth(gpus[number], True)
    return gpu_identity.of(number)


def _check_one_rank_per_gpu(comm: base.Comm, gpu: str) -> None:
    """Refuse ranks that keep the same GPU of a host.

    **Ranks:** all. On the CPU: NCCL would fail at such ranks before it could be said why.
    """
    with tf.device("/cpu:0"):
        kept = comm.gather_objects((socket.gethostname(), gpu))
    for rank, (host, name) in enumerate(kept):
        first = kept.index((host, name))
        if name and first != rank:
            raise PlanError(
                f"One GPU per process is required. Ranks {first} and {rank} on {host} both keep "
                f"{name}. Launch at most as many processes on this host as it has GPUs, or bind "
                "another GPU to each."
            )

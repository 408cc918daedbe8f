"""init(): start Horovod with its node and peer groups, and one GPU per process."""

from __future__ import annotations

import functools

import tensorflow as tf

from tfcommx.comm import base, horovod, launcher, liveness, mpi, process
from tfcommx.terms import PlanError, Topology


def init(
    node_size: int | None = None, watch_seconds: float | None = liveness.LIMIT_SECONDS
) -> base.Comm:
    """Start Horovod with the groups that the routes need; call it in place of `hvd.init()`.

    Works under horovodrun (Gloo or MPI), under mpirun, and alone without a launcher. On GPUs each
    process keeps the one with the number of its local rank, with memory growth. A second call
    returns the same Comm.

    Args:
        node_size: ranks that stand for one node, if that is not what the hosts say (>= 1, divides
            the number of ranks); None: as the launcher placed them.
        watch_seconds: a rank that does not respond for so long (> 0) makes all others end with an
            error that names it, also if they wait for it in a collective; None turns this watch
            off. See liveness.py.

    Returns:
        the Comm of this rank.

    **Ranks:** all, with equal node_size.
    **Cost:** one exchange of host names before Horovod starts; static process sets, so nothing per
    step.
    **Raises:** PlanError for a node_size that does not divide the number of ranks, for ranks of a
    host that are not consecutive, and if a rank does not come.
    """
    if watch_seconds is not None and not watch_seconds > 0:
        raise PlanError(
            f"`watch_seconds` must be > 0, or None for no watch. Received {watch_seconds!r}."
        )
    if process.started():
        slots = process.current().topology.slots
        if node_size not in (None, slots):
            raise PlanError(
                f"init() was called before, with {slots} ranks to a node. Received "
                f"node_size={node_size}. Call it once."
            )
        return process.current()
    here = launcher.launcher()
    topology = _topology(here, node_size)
    gpus = tf.config.list_physical_devices("GPU")
    if gpus:
        if here.local_rank >= len(gpus):
            raise PlanError(
                f"One GPU per process is required. Rank {here.rank} has local rank "
                f"{here.local_rank} and sees {len(gpus)} "
                "GPUs. Launch at most that many processes on this host."
            )
        tf.config.set_visible_devices(gpus[here.local_rank], "GPU")
        tf.config.experimental.set_memory_growth(gpus[here.local_rank], True)
    open_point_to_point = (
        functools.partial(mpi.MpiPointToPoint, watched=watch_seconds is not None)
        if here.kind == "mpi"
        else None
    )
    process.set_current(horovod.HorovodComm(here, topology, open_point_to_point))
    if here.size > 1:
        liveness.start(process.current(), watch_seconds, launcher.launch_interfaces())
    return process.current()


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
    return Topology.of_hosts(horovod.gloo_hosts(here) if here.kind == "gloo" else mpi.mpi_hosts())

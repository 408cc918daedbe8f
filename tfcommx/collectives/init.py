"""init(): from what the launcher says to a running Horovod with its node and peer groups."""

from __future__ import annotations

import functools
import math

from tfcommx.collectives import comm as base
from tfcommx.collectives import exit_message, gpu_checks, horovod, mpi, process, rendezvous
from tfcommx.collectives.gloo_hosts import gloo_hosts
from tfcommx.collectives.unwrapped import UnwrappedOptimizers
from tfcommx.core import ConfigurationError, Topology
from tfcommx.launch import known_launchers, launcher
from tfcommx.watch import liveness


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
            See watch/liveness.py.
        stall_seconds: if ranks have waited this long (> 0) for others that are alive, every rank
            logs who waits for whom, where, and what the others do; None: it does not. See
            watch/stalls.py. The environment variable TFCOMMX_STALL_SECONDS overrides it; 0 turns it
            off.
        stall_limit_seconds: if they have waited this long (> 0), all end with that message; None:
            they wait on. TFCOMMX_STALL_LIMIT_SECONDS overrides it. Nothing watches for stalls
            without `watch_seconds`.

    Returns:
        The Comm of this rank; `tfcommx.collectives.current()` returns it too.

    **Ranks:** all, with equal `node_size`.
    **Cost:** one exchange of host names before Horovod starts, and on GPUs a small sum that is
    verified; static process sets, so nothing per step.
    **Raises:** ConfigurationError for seconds that are not > 0, for a node_size that does not
    divide the number of ranks, and for ranks of a host that are not consecutive; LaunchError for
    more ranks than GPUs on a host, for a GPU that the native library was not built for or on which
    Horovod adds wrongly, if Horovod is missing, and if a rank does not come.
    """
    for name, seconds in (
        ("watch_seconds", watch_seconds),
        ("stall_seconds", stall_seconds),
        ("stall_limit_seconds", stall_limit_seconds),
    ):
        if seconds is not None and not 0 < seconds < math.inf:
            raise ConfigurationError(
                f"`{name}` must be > 0 and finite, or None for no watch. Received {seconds!r}."
            )
    stall_seconds = launcher.seconds_from("TFCOMMX_STALL_SECONDS", stall_seconds, off=True)
    stall_limit_seconds = launcher.seconds_from(
        "TFCOMMX_STALL_LIMIT_SECONDS", stall_limit_seconds, off=True
    )
    if process.started():
        return _started_before(node_size)
    here = launcher.launcher()
    if here.kind == "environment" and (found := known_launchers.cluster_environment()):
        rendezvous.join(found, any_order=node_size is not None)
        here = launcher.launcher()
    if here.kind == "mpi":
        mpi.start()
    topology = _topology(here, node_size)
    gpu = gpu_checks.keep_one_gpu(here.local_rank)
    watched = watch_seconds is not None
    # Messages between two ranks need MPI
    make_messages = functools.partial(mpi.MpiPointToPoint, watched) if here.kind == "mpi" else None
    comm = horovod.HorovodComm(here, topology, make_messages)
    process.set_current(comm)
    sums = gpu.architecture > 0 and horovod.sums_on_gpus()
    gpus = gpu_checks.check_gpus(comm, gpu._replace(sums=sums))
    if here.size > 1:
        liveness.start(
            comm,
            launcher.launch_interfaces(),
            liveness.Limits(watch_seconds, stall_seconds, stall_limit_seconds),
            mpi.gather_with_centre if here.centre else comm.gather_objects,
            launcher.on_one_host(),
        )
        if here.centre:
            # Before the end of the watch, which may end the process
            exit_message.tell_the_centre_at_exit()
        # Under the watch, because it is the first collective on GPUs
        gpu_checks.check_fused_sum(comm, gpus)
        UnwrappedOptimizers(here.rank).watch()
    return comm


def _started_before(node_size: int | None) -> base.Comm:
    comm = process.current()
    if node_size not in (None, comm.topology.slots):
        raise ConfigurationError(
            f"init() was called before, with {comm.topology.slots} ranks to a node. Received "
            f"node_size={node_size}. Call it once."
        )
    return comm


def _topology(here: launcher.Launcher, node_size: int | None) -> Topology:
    if node_size is not None:
        if not isinstance(node_size, int) or node_size < 1 or here.size % node_size:
            raise ConfigurationError(
                f"`node_size` must divide the number of ranks. Received node_size={node_size} "
                f"with {here.size} ranks."
            )
        return Topology(here.size // node_size, node_size)
    if here.size == 1:
        return Topology(1, 1)
    return Topology.of_hosts(gloo_hosts(here) if here.kind == "gloo" else mpi.mpi_hosts())

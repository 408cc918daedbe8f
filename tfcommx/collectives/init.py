"""init(): start Horovod with its node and peer groups, by the launcher's settings."""

import functools
import multiprocessing
import os

import tensorflow as tf

from tfcommx.collectives import comm as base
from tfcommx.collectives import gpu_checks, horovod, mpi, process, rendezvous
from tfcommx.collectives.gloo_hosts import CHILD, gloo_hosts, require_network, require_rendezvous
from tfcommx.collectives.unwrapped import UnwrappedOptimizers
from tfcommx.core import ConfigurationError, Topology, check_number, log
from tfcommx.launch import known_launchers, launcher
from tfcommx.watch import liveness


def init(
    node_size: int | None = None,
    watch_seconds: float | None = liveness.LIMIT_SECONDS,
    stall_seconds: float | None = liveness.STALL_SECONDS,
    stall_limit_seconds: float | None = None,
) -> base.Comm:
    """Start Horovod with the groups that the routes need; call it instead of `hvd.init()`.

    It works under horovodrun (Gloo or MPI), mpirun, srun, torchrun and other launchers that set
    torchrun's variables, and in a single process without a launcher. Each process uses the GPU
    whose number is its local rank, with memory growth. A second call returns the same Comm.

    Args:
        node_size: ranks that count as one node (>= 1, divides the number of ranks); None: the ranks
            of each host, as the launcher placed them.
        watch_seconds: seconds (> 0) without a response of a rank after which all others end with an
            error that names it, even if they wait for it in a collective; None: no watch.
        stall_seconds: seconds (> 0) of waiting for ranks that are alive after which every rank logs
            the waiting ranks, the ranks and collectives that they wait for, and the activity of the
            others; after five times as long all end if none of them can continue; None: neither.
            The environment variable TFCOMMX_STALL_SECONDS overrides it; 0 turns it off.
        stall_limit_seconds: seconds (> 0) of such waiting after which all end with that message;
            None: they continue to wait. TFCOMMX_STALL_LIMIT_SECONDS overrides it. Without
            `watch_seconds` there is no watch for stalls.

    Returns:
        The Comm of this rank; `tfcommx.collectives.current()` returns it, too.

    **Ranks:** all, with equal `node_size`.
    **Cost:** one exchange of host names before Horovod starts, and on GPUs a small sum that is
    verified. None per step; process sets are static.
    **Raises:** ConfigurationError for seconds that are not > 0, for a node_size that does not
    divide the number of ranks, for ranks of a host that are not consecutive, in a process that
    a rank of MPI has started, in a graph of TensorFlow 1, and with GPUs after TensorFlow's first
    operation; LaunchError for more ranks than GPUs on a host, for a GPU that the native library was
    not built for or on which Horovod's sums are wrong, if Horovod is missing, and if a rank is
    missing.
    """
    for name, seconds in (
        ("watch_seconds", watch_seconds),
        ("stall_seconds", stall_seconds),
        ("stall_limit_seconds", stall_limit_seconds),
    ):
        if seconds is not None:
            check_number(name, seconds, "> 0")
    stall_seconds = launcher.seconds_from("TFCOMMX_STALL_SECONDS", stall_seconds, off=True)
    stall_limit_seconds = launcher.seconds_from(
        "TFCOMMX_STALL_LIMIT_SECONDS", stall_limit_seconds, off=True
    )
    if process.started():
        comm = process.current()
        if isinstance(comm, horovod.HorovodComm) and not comm.is_running:
            raise ConfigurationError(
                "Horovod must run as long as its process trains. Received a call of init() after "
                "hvd.shutdown(). Leave hvd.shutdown() out: Horovod ends with the process."
            )
        if node_size not in (None, comm.topology.slots):
            raise ConfigurationError(
                f"init() was called before, with {comm.topology.slots} ranks to a node. Received "
                f"node_size={node_size}. Call it once."
            )
        return comm
    if not tf.executing_eagerly():
        raise ConfigurationError(
            "TensorFlow must execute eagerly when init() is called. Received a graph, as after "
            "tf.compat.v1.disable_eager_execution() or in tf.Graph().as_default(). Scripts of "
            "TensorFlow 1 are not supported: leave that call out, and train a Keras model by "
            "`fit`, or in a loop as docs/how-to/move-from-horovod.md shows."
        )
    launch = launcher.launcher()
    # Gloo ends the process by SIGSEGV if the host's own name does not resolve
    if launch.kind != "mpi":
        require_network()
    if launch.kind == "environment" and (cluster := known_launchers.cluster_environment()):
        rendezvous.join(cluster, any_order=node_size is not None)
        launch = launcher.launcher()  # Gloo, because `join` has set its variables
    inits = _check_process(launch)
    if launch.kind == "mpi":
        mpi.start()
    topology = _topology(launch, node_size, inits)
    # Before any tensor is made, because TensorFlow fixes the visible GPUs when it initialises them
    gpu = gpu_checks.keep_one_gpu(launch.local_rank)
    watched = watch_seconds is not None
    # Messages between two ranks need MPI
    make_messages = (
        functools.partial(mpi.MpiPointToPoint, watched) if launch.kind == "mpi" else None
    )
    comm = horovod.HorovodComm(launch, topology, make_messages)
    process.set_current(comm)
    sums = gpu.architecture > 0 and horovod.runs_on_gpus("HorovodGroupedAllreduce")
    gpus = gpu_checks.check_gpus(comm, gpu._replace(sums=sums))
    if launch.size > 1:
        # Processes that this rank starts inherit its variables, and must not join as the same rank
        launcher.record_init()
        liveness.start(
            comm.rank,
            comm.membership,
            comm.progress.watch,
            launcher.launch_interfaces(),
            liveness.Limits(watch_seconds, stall_seconds, stall_limit_seconds),
            mpi.gather_with_centre if launch.centre else comm.gather_objects,
            launcher.on_one_host(),
        )
        if launch.centre:
            # Before the end of the watch, which may end the process
            mpi.tell_the_centre_at_exit()
        # After the start of the watch, because it is the first collective on GPUs
        gpu_checks.check_fused_sum(comm, gpus)
        UnwrappedOptimizers(launch.rank).watch()
        from tfcommx.keras_internals.adapted import record_adapted_layers

        record_adapted_layers()
    return comm


def _check_process(launch: launcher.Launcher) -> int:
    """Refuse a process that cannot be a rank; return the ancestors that have been the same rank."""
    if launch.size == 1:
        if launch.kind == "none" and (unused := known_launchers.unused_tasks()):
            log.warning(
                "This process trains alone, in a job of %s. To train on all, start it by `tfcommx "
                "run -- python train.py`, or in a job of Slurm by srun. To train in one process "
                "without this warning, set WORLD_SIZE=1.",
                unused,
            )
        return 0
    # Set while a child imports the script. A child may train with those of other ranks under Gloo,
    # but not all children that a pool or a data loader starts
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        raise ConfigurationError(
            "init() must not be called where `multiprocessing` imports the script again. Received "
            f"a call in process {os.getpid()}, which rank {launch.rank} has started. Put init() "
            'and the training under `if __name__ == "__main__":`.'
        )
    if launch.kind == "gloo":
        require_rendezvous()
    inits = launcher.earlier_inits()
    # MPI has one process for a rank: a second one ends the first by a segmentation fault
    if inits and launch.kind == "mpi":
        raise ConfigurationError(
            f"Under MPI, init() must be called by the ranks alone. Received a call of rank "
            f"{launch.rank} in a process that it has started. {CHILD}"
        )
    return inits


def _topology(launch: launcher.Launcher, node_size: int | None, inits: int) -> Topology:
    if node_size is not None:
        if not isinstance(node_size, int) or node_size < 1 or launch.size % node_size:
            raise ConfigurationError(
                f"`node_size` must divide the number of ranks. Received node_size={node_size} "
                f"with {launch.size} ranks."
            )
        return Topology(launch.size // node_size, node_size)
    if launch.size == 1:
        return Topology(1, 1)
    return Topology.of_hosts(
        gloo_hosts(launch, inits) if launch.kind == "gloo" else mpi.mpi_hosts()
    )

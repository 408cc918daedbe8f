"""Communication between ranks: how a run starts, how tensors travel, how a failure is noticed.

Starting (no TensorFlow, except horovod and init)
    host_names           which texts are names of hosts
    allocation           the hosts of a launch: -H, a hostfile, Slurm, PBS, LSF, Kubernetes
    horovodrun           start ranks by horovodrun, and wait for them
    commands             run a short command to its end, whatever it leaves
    rank_output          start a rank, and end when it ends, whatever it leaves
    rank_lines           show what the ranks write
    launcher             what horovodrun, mpirun and the user's TFCOMMX_... variables say
    cluster_environment  what srun, torchrun and TF_CONFIG say of a process
    other_launchers      refuse processes of launchers that are not understood
    rendezvous           make a Gloo launch of processes that these have started
    gloo_hosts           every rank's host, before Horovod starts under Gloo
    challenge            two processes prove to each other that they know a secret
    entrance             hear the callers of a listening socket side by side
    mpi_start            end the ranks that wait in MPI's start for one that does not come
    gpu_checks           a GPU for each rank, code that was built for it, right sums of Horovod
    gpu_identity         which GPU of the machine a process means by a number
    init                 init(): from all of this to a running Horovod
    process              the process's own Comm: rank(), size(), ...

Tensors and messages
    base                 Comm, the contract
    plain_data           what ranks tell each other, as bytes and back, without pickle
    point_to_point       PointToPoint, the contract of messages between two ranks
    messages             how a Comm's ranks open and end such messages
    horovod              Comm on Horovod: NCCL, MPI or Gloo (the only `import horovod`)
    mpi                  PointToPoint on MPI (the only `import mpi4py`)
    threads              both, for p ranks as threads of one process: the law tests
    easgd_server         holds the centre of elastic averaging
    easgd_process        a process for it, beside the ranks that train

Failures
    liveness             start the watch of this rank; end it at an alarm
    watcher              the watch's process, one beside each rank: sockets and clock
    watch_protocol       what a watcher says and decides, without sockets
    watch_tree           which watchers are connected
    watch_alarm          from the first sign of a missing rank to this rank's end
    membership           which ranks have left while the others go on
    progress             what this rank is doing
    stalls               who waits for whom, from the progress of all ranks

Misuse, and trials
    unwrapped            warn of optimizers that take steps without an exchange
    trial_queue          of several plans under trial, which one is measured now

Only this room, `cli`, `ray` and `kernels.loader` read the environment.
"""

from __future__ import annotations

from typing import Any


def __getattr__(name: str) -> Any:
    """Return `current`, loaded at its first use: the launcher's part needs no TensorFlow."""
    if name == "current":
        from tfcommx.comm.process import current

        return current
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

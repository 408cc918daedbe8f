"""Collectives and messages between ranks, and how a process finds its rank among them.

launcher    what the launcher's environment variables say           (reads os.environ)
allocation  the hosts of a launch: -H, a hostfile, Slurm, PBS, LSF, Kubernetes (reads os.environ)
horovodrun  one start of ranks, from its command line to its exit status  (reads os.environ)
rank_lines  what is shown of the lines that ranks write
announced   who a process is, as srun and torchrun say               (reads os.environ)
rendezvous  makes a Gloo launch of such processes                    (writes os.environ)
base        Comm, the contract, and its checks
point_to_point   PointToPoint, the contract of messages between two ranks
line        of several that measure step times on one rank, who goes first
horovod     Comm on Horovod: NCCL, MPI or Gloo                       (the only `import horovod`)
mpi         PointToPoint on MPI                                      (the only `import mpi4py`)
centre_server   holds the centre of elastic averaging, or a part, and answers for it
centre_process  the process that does this beside the ranks that train
threads     both contracts, for p ranks as threads of one process: law tests
process     the process's own Comm, as init() made it
liveness    ends this rank if another does not respond; its watcher process is watcher.py, which
            decides by watch_member.py
activity    what this rank does, as its watcher is told
stalls      who waits for whom, from what all ranks do
unwrapped   warns of optimizers that take steps without an exchange
init        init(): all of this, in order
"""

from __future__ import annotations

from typing import Any


def __getattr__(name: str) -> Any:
    """Return `current`, loaded at its first use: the launcher's part needs no TensorFlow."""
    if name == "current":
        from tfcommx.comm.process import current

        return current
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

"""Comm and its collectives, by which tensors travel between ranks.

init            init(): starts Horovod with the launcher's settings
process         the process's own Comm: rank(), size(), ...
comm            Comm, the contract; turns of plans under trial; sums that the watch can name
horovod         Comm on Horovod: NCCL, MPI or Gloo (the only `import horovod`)
threads         Comm and PointToPoint for p ranks as threads of one process, for law tests
point_to_point  PointToPoint, the contract of messages between two ranks
messages        opens and closes the PointToPoints of a Comm
mpi             PointToPoint on MPI (the only `import mpi4py`)
plain_data      data between ranks to bytes and back, without pickle
comparisons     facts that must be equal on all ranks
rendezvous      a Gloo launch of processes that srun, torchrun or others have started
gloo_hosts      every rank's host, before Horovod starts under Gloo
gpu_checks      a GPU for each rank, code that was built for it, correct sums of Horovod
unwrapped       warnings of optimizers that take steps without an exchange

Only this package, `launch`, `watch`, `cli`, `ray`, `strategies.easgd.process` and `kernels.loader`
read the environment.
"""

from typing import Any


def __getattr__(name: str) -> Any:
    """Return `current`, loaded at its first use, because the launcher must not load TensorFlow."""
    if name == "current":
        from tfcommx.collectives.process import current

        return current
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

"""Point-to-point messages between ranks. The only door to mpi4py; needs an MPI launch."""

from __future__ import annotations


def mpi_hosts() -> list[str]:
    """Return every rank's host name, in rank order.

    **Ranks:** all ranks of an MPI launch, before Horovod starts. mpi4py starts MPI with full thread support, which Horovod
    then shares and leaves running.
    """
    from mpi4py import MPI

    return MPI.COMM_WORLD.allgather(MPI.Get_processor_name())

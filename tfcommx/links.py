"""Point-to-point messages between ranks. The only door to mpi4py; needs an MPI launch."""

from __future__ import annotations

from typing import Any

import numpy as np


def mpi_hosts() -> list[str]:
    """Return every rank's host name, in rank order.

    **Ranks:** all ranks of an MPI launch, before Horovod starts. mpi4py starts MPI with full thread support, which Horovod
    then shares and leaves running.
    """
    from mpi4py import MPI

    return MPI.COMM_WORLD.allgather(MPI.Get_processor_name())


class MpiPost:
    """Non-blocking messages on a communicator of our own, so that none is mistaken for one of Horovod's.

    mpi4py starts MPI with full thread support, so Horovod's background thread may be in MPI at the same time.

    **Ranks:** all make it together, in the same order. **Raises:** RuntimeError where MPI has less thread support.
    """

    def __init__(self) -> None:
        from mpi4py import MPI

        if MPI.Query_thread() < MPI.THREAD_MULTIPLE:
            raise RuntimeError("Messages beside Horovod need MPI with MPI_THREAD_MULTIPLE. Received less. "
                               "Call tfcommx.init() before anything that starts MPI.")
        self._mpi = MPI
        self._world = MPI.COMM_WORLD.Dup()
        self.sent: dict[int, int] = {}

    def send(self, array: np.ndarray, target: int, tag: int) -> Any:
        """Start to send a contiguous array, as bytes, to a rank of the world."""
        self.sent[target] = self.sent.get(target, 0) + array.nbytes
        return self._world.Isend([array.view(np.uint8), self._mpi.BYTE], target, tag)

    def receive(self, array: np.ndarray, source: int, tag: int) -> Any:
        """Start to receive into a contiguous array of the length that is sent."""
        return self._world.Irecv([array.view(np.uint8), self._mpi.BYTE], source, tag)

    def wait_any(self, requests: list[Any]) -> int:
        """Wait until one of the requests is done; return its position. Other threads of this process run meanwhile."""
        return self._mpi.Request.Waitany(requests)

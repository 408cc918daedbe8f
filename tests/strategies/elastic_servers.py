"""Ranks as threads with a centre in a thread of rank 0, sharded, or in a separate process."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np

from tfcommx.collectives.comm import Comm
from tfcommx.collectives.threads import ThreadComm, _ThreadPointToPoint
from tfcommx.core import Topology
from tfcommx.strategies.easgd.process import END, CentreProcess
from tfcommx.watch.membership import Membership

SERVERS = ("thread", "sharded", "extra_rank")


def run_ranks(server: str, topology: Topology, work: Callable[[Comm], Any]) -> list[Any]:
    """Call `work(comm)` on every rank; with "extra_rank" one more thread is the process for it."""
    if server != "extra_rank":
        return ThreadComm.run(topology, work)
    ended: list[bool] = []

    def with_process(comm: ThreadComm) -> Any:
        comm.messages.centre_rank = topology.size
        if comm.rank == 0:
            messages = _ThreadPointToPoint(topology.size, comm._meeting)
            process = CentreProcess(messages, topology.size, Membership())
            thread = threading.Thread(target=process.run, daemon=True)
            thread.start()
        try:
            return work(comm)
        finally:
            last = comm.messages._make(lasting=False, with_centre=True)
            last.send(np.zeros(1, np.int32), topology.size, END)
            if comm.rank == 0:
                thread.join(60)
                ended.append(not thread.is_alive())

    results = ThreadComm.run(topology, with_process)
    assert ended == [True]
    return results

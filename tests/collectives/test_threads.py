"""ThreadComm: ranks as threads."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import tensorflow as tf

from tfcommx.collectives.comm import Comm
from tfcommx.collectives.threads import ThreadComm
from tfcommx.core import ConfigurationError, Topology
from tfcommx.runtime.executor import agree_on_settings


def test_the_tensors_of_earlier_collectives_are_freed() -> None:
    """Once, a law over many steps kept every tensor that its ranks had exchanged."""

    def work(comm: Comm) -> int:
        for turn in range(3):
            comm.allreduce(tf.ones([2]), "world", f"sum{turn}")
        return len(comm._meeting.rooms)

    assert max(ThreadComm.run(Topology(1, 2), work)) <= 1


def test_ranks_in_different_exchanges_of_objects_are_named() -> None:
    """A rank took the objects of another function for its own, and failed to unpack them."""

    def work(comm: Comm) -> None:
        if comm.rank == 0:
            agree_on_settings(comm)
        else:
            comm.gather_objects(comm.rank)

    with pytest.raises(ConfigurationError, match=r"agree_on_settings\) on rank 0 .* on rank 1"):
        ThreadComm.run(Topology(3, 1), work)


def test_two_threads_of_a_rank_do_not_exchange_at_once() -> None:
    """Of two `fit`s in threads, Horovod named a tensor, or ranks took objects of the other one."""
    refused = threading.Event()

    def work(comm: Comm) -> list[int]:
        if comm.rank:
            assert refused.wait(60)
            return comm.gather_objects(1)
        with ThreadPoolExecutor(1) as pool:
            first = pool.submit(comm.gather_objects, 0)
            while not comm._gathers.locked():
                time.sleep(0.001)
            try:
                with pytest.raises(ConfigurationError, match=r"test_threads.*rank 0\b.*model"):
                    comm.gather_objects(2)
            finally:
                refused.set()
            return first.result()

    assert ThreadComm.run(Topology(2, 1), work) == [[0, 1]] * 2


def test_users_functions_may_meet_in_one_exchange_of_objects() -> None:
    def work(comm: Comm) -> list[str]:
        return comm.gather_objects("first") if comm.rank == 0 else comm.gather_objects("other")

    assert ThreadComm.run(Topology(2, 1), work) == [["first", "other"]] * 2

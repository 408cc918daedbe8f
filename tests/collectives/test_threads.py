"""ThreadComm: ranks as threads."""

from __future__ import annotations

import tensorflow as tf

from tfcommx.collectives.comm import Comm
from tfcommx.collectives.threads import ThreadComm
from tfcommx.core import Topology


def test_the_tensors_of_earlier_collectives_are_freed() -> None:
    """Once, a law over many steps kept every tensor that its ranks had exchanged."""

    def work(comm: Comm) -> int:
        for turn in range(3):
            comm.allreduce(tf.ones([2]), "world", f"sum{turn}")
        return len(comm._meeting.rooms)

    assert max(ThreadComm.run(Topology(1, 2), work)) <= 1

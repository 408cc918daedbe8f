"""Large reduce-scatters on real ranks, compared with numpy; started by test_bugs.py."""

from __future__ import annotations

import numpy as np
import tensorflow as tf

import tfcommx as cx

ENTRIES = 25_000_000
comm = cx.init(node_size=2)
members = comm.members("node")
position = members.index(comm.rank)
for call in range(4):
    parts = [
        np.random.default_rng([rank, call]).integers(-99, 99, ENTRIES, np.int8).astype(np.float32)
        for rank in members
    ]
    found = comm.reduce_scatter(tf.constant(parts[position]), "node", "large").numpy()
    wrong = np.count_nonzero(found != np.split(sum(parts), len(parts))[position])
    assert wrong == 0, f"rank {comm.rank}, call {call}: {wrong} of {found.size} entries are wrong"
# A rank that leaves earlier takes the other node's process sets with it
comm.gather_objects("done")
print("all right", flush=True)

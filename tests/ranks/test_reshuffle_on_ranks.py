"""Samples that change nodes: every one once per epoch, with its own pixels, from memory and not
from the source.
"""

import os
from pathlib import Path

import numpy as np
import pytest

from tfcommx.data.cache import DataCache
from tfcommx.data.options import BatchSpec
from tfcommx.data.sources.arrays import Arrays

COUNT = 203


@pytest.mark.parametrize(
    "over_messages", [pytest.param(True, marks=pytest.mark.every_launch), False]
)
def test_every_sample_once_while_parts_mix(comm, over_messages):
    name = f"tfcommx-reshuffle-{os.getpid()}-{over_messages}"
    folder = Path("/dev/shm", comm.gather_objects(name)[0])
    folder.mkdir(exist_ok=True)
    images = np.stack([np.full((6, 5, 3), n, np.uint8) for n in range(COUNT)])
    cache = DataCache(
        Arrays(images, np.arange(COUNT)),
        seed=3,
        memory=folder,
        reshuffle_fraction=0.5,
    )
    spec = BatchSpec(8, dtype="uint8", drop_remainder=False)
    homes = []
    for epoch in range(3):
        arrived = cache.reshuffle(epoch) if epoch and over_messages else 0
        room = cache.slab.used_bytes
        got = []
        for pictures, labels in cache.dataset(spec, epoch):
            np.testing.assert_array_equal(pictures, images[labels.numpy()])
            got += labels.numpy().tolist()
        everywhere = comm.gather_objects(
            (cache.node, got, arrived, cache.report(epoch), cache.slab.used_bytes - room)
        )
        assert sorted(sample for row in everywhere for sample in row[1]) == list(range(COUNT))
        homes.append({sample: row[0] for row in everywhere for sample in row[1]})
        if epoch and comm.topology.nodes > 1:
            moved = sum(homes[-1][sample] != homes[-2][sample] for sample in range(COUNT))
            assert 25 < moved < 80  # a half is offered, a half of that comes back to where it was
            if over_messages:
                assert sum(row[2] for row in everywhere) == moved
                # no reading, no new room
                assert all(row[3]["hit_memory"] == 1 and row[4] == 0 for row in everywhere)
            elif epoch == 1:  # later some come home, and are still there
                assert (
                    sum(row[3]["hit_source"] * row[3]["samples"] for row in everywhere)
                    >= moved - 1e-6
                )
    cache.close()
    comm.gather_objects(None)
    if comm.rank == 0:
        folder.rmdir()

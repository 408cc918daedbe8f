"""Several processes of a node on one slab: every sample once, one copy, and kills."""

import os
import signal

import pytest
from data_helpers import WHOLE, OpenCache, number, picture, served
from drawing import case

from tfcommx.data.slab_files import prefix, read_metadata


@pytest.mark.parametrize(
    "nodes,slots",
    [case(1, 1, kept=False), case(1, 2, kept=False), case(1, 4, kept=False), (2, 2)],
)
def test_every_sample_once_per_epoch_from_one_copy(folder, shm, nodes, slots, processes):
    workers = [
        processes.start(folder, shm, rank, nodes, slots, epochs=2, hold=True)
        for rank in range(nodes * slots)
    ]
    for worker in workers:
        worker.line("held")
    assert len(list(shm.iterdir())) == nodes
    for worker in workers:
        worker.go()
    results = [worker.line("served") for worker in workers]
    for worker in workers:
        worker.go()
    assert [worker.wait() for worker in workers] == [0] * len(workers)
    for epoch in range(2):
        got = [
            (number(pixel), label) for result in results for pixel, label in result["served"][epoch]
        ]
        assert sorted(got) == [(n, n % 3) for n in range(50)]
    assert all(result["served"][0] != result["served"][1] for result in results)
    for node in range(nodes):
        assert len({result["filled"] for result in results[node * slots : (node + 1) * slots]}) == 1
    assert sum(result["filled"] for result in results) == 50 * slots
    # Each sample is read once; twice only if two processes want it at the same moment
    read = sum(
        report["hit_source"] * report["samples"]
        for result in results
        for report in result["report"]
    )
    assert 50 <= round(read) <= 60


def test_processes_share_one_copy_in_memory(tmp_path, shm, processes):
    folder = tmp_path / "large"
    (folder / "a").mkdir(parents=True)
    for n in range(16):
        (folder / "a" / f"{n:02}.png").write_bytes(picture(n, (1000, 700), "PNG"))
    workers = [
        processes.start(folder, shm, rank, 1, 2, batch=4, hold=True, touch=True)
        for rank in range(2)
    ]
    for key in ("held", "touched"):
        for worker in workers:
            worker.line(key)
        for worker in workers:
            worker.go()
    results = [worker.line("served") for worker in workers]
    for worker in workers:
        worker.go()
    assert [worker.wait() for worker in workers] == [0, 0]
    one_copy = 16 * 2_100_064
    assert [result["filled"] for result in results] == [16, 16]
    # A sample that two processes fill at once takes its room twice
    assert one_copy <= results[0]["used"] <= one_copy * 1.3
    # From below: every page is counted; from above: once
    assert one_copy <= sum(result["pss"] for result in results) <= results[0]["used"] * 1.02


def test_kill_9_of_one_process_in_the_fill(folder, shm, processes):
    victim = processes.start(folder, shm, 0, 1, 2, pause=0.2, batch=1)
    victim.line("step")
    other = processes.start(folder, shm, 1, 1, 2, epochs=2, hold=True)
    other.line("ready")
    os.kill(victim.pid, signal.SIGKILL)
    victim.wait()
    other.line("held")
    other.go()
    result = other.line("served")
    other.go()
    assert len(result["served"][0]) == len(result["served"][1]) == 25
    assert all(number(pixel) % 3 == label for epoch in result["served"] for pixel, label in epoch)
    assert other.wait() == 0
    assert list(shm.iterdir()) == []  # the survivor was the last


def test_kill_9_of_all_in_training_then_start_again(folder, shm, processes):
    workers = [processes.start(folder, shm, rank, 1, 2, pause=0.1, epochs=20) for rank in range(2)]
    for worker in workers:
        worker.line("step")
    for worker in workers:
        os.kill(worker.pid, signal.SIGKILL)
        worker.wait()
    stale = next(shm.glob("*.slab"))
    assert read_metadata(stale)["pid"] in [worker.pid for worker in workers]
    half = shm / f"{prefix()}half.1-x.part"
    half.touch(0o600)
    half.write_bytes(b"half made")
    inode = stale.stat().st_ino
    with OpenCache(folder, shm) as cache:
        assert (
            len(cache.reclaimed) == 2
            and cache.slab.created
            and cache.slab.path.stat().st_ino != inode
        )
        assert cache.slab.filled == 0
        assert sorted(served(cache.dataset(WHOLE))) == [(n, n % 3) for n in range(50)]

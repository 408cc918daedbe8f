"""Memory of the batches: used pages are reused, and freed in the end."""

import ctypes
import gc
import os
import resource
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import warm_ranks
from launching import QUICK, ROOT

from tfcommx.data.cache import DataCache
from tfcommx.data.options import BatchSpec
from tfcommx.data.sources.arrays import Arrays

ALONE = "TFCOMMX_TEST_ALONE"  # in the environment of a test that runs in a separate process
PAGE = resource.getpagesize()
SIDE, BATCH = 256, 8
BATCH_BYTES = BATCH * SIDE * SIDE * 3 * 4


def smaps(word):
    """Sum of the bytes that all mappings of this process have as `word`."""
    lines = Path("/proc/self/smaps").read_text().splitlines()
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{word}:"))


def passes_alone(test):
    """Run a test in a separate process; return False in that process, which must run the test."""
    if ALONE in os.environ:
        return False
    again = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", test]
    env = {**os.environ, "PYTHONPATH": QUICK, **warm_ranks.environment(alone=True), ALONE: "1"}
    done = subprocess.run(again, env=env, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0 and "1 passed" in done.stdout, done.stdout + done.stderr
    return True


def wait_until(reached, otherwise):
    end = time.monotonic() + 60
    while not reached():
        assert time.monotonic() < end, otherwise
        time.sleep(0.05)


@pytest.fixture
def opened(tmp_path):
    images = np.random.default_rng(0).integers(0, 256, (80, 16, 16, 3), np.uint8)
    cache = DataCache(Arrays(images, np.arange(80)), memory=tmp_path)
    cache.warm()
    yield cache
    cache.close()


@pytest.mark.extended
def test_batches_are_written_to_memory_that_was_used_before(opened, monkeypatch):
    """Fresh pages cost more than the pixels.

    Epochs of 38 MB batches took up to 2.2 times as long while the queue grew.
    """
    monkeypatch.setattr("tfcommx.data.pipeline.PREFETCH_BYTES", 4 * BATCH_BYTES)
    spec = BatchSpec(BATCH, SIDE)
    batches = iter(opened.dataset(spec, epochs=100))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for step in range(100 * opened.steps(spec)):
        next(batches)
        if step % 100 < 10:
            time.sleep(0.02)  # the queue fills, then runs empty: so it grows
    touched = (resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before) * PAGE / BATCH_BYTES
    assert touched < 30, f"1000 batches were served from the fresh pages of {touched:.0f}"


def test_what_batches_used_is_offered_back_when_the_pipeline_is_gone(opened, request):
    """Runs in a separate process.

    An op that was called eagerly, as in other tests, stays in TensorFlow's cache.
    """
    if passes_alone(request.node.nodeid):
        return
    batches = iter(opened.dataset(BatchSpec(BATCH, SIDE), epochs=2))
    for _ in range(12):
        next(batches)
    before = smaps("LazyFree")  # memory of an earlier pipeline that this one did not need
    del batches
    gc.collect()
    wait_until(
        lambda: smaps("LazyFree") >= before + 2 * BATCH_BYTES, "the memory of the batches was kept"
    )


@pytest.mark.extended
def test_batches_are_locked_for_a_gpu_until_the_pipeline_is_gone(
    opened, request, tmp_path, monkeypatch
):
    """A GPU reads locked pages directly, and would read stale ones if they were freed while locked.

    The CUDA driver is a fake.
    """
    if passes_alone(request.node.nodeid):
        return
    library = tmp_path / "libcuda.so.1"
    source = Path(__file__).with_name("fake_cuda.cc")
    build = ["g++", "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", source, "-o", library]
    subprocess.run(build, check=True)
    driver = ctypes.CDLL(str(library))
    driver.fake_cuda_locked.restype = ctypes.c_size_t

    def serve():
        batches = iter(opened.dataset(BatchSpec(BATCH, SIDE), epochs=2))
        for _ in range(12):
            next(batches)
        return batches

    monkeypatch.setenv("FAKE_CUDA_IDLE", "1")
    serve()
    gc.collect()
    assert driver.fake_cuda_locked() == 0  # A context made here would take memory of a GPU
    monkeypatch.delenv("FAKE_CUDA_IDLE")
    batches = serve()
    assert driver.fake_cuda_locked() >= 2 * BATCH_BYTES
    monkeypatch.setenv("FAKE_CUDA_REFUSES", "1")
    before = smaps("LazyFree")
    del batches
    gc.collect()
    time.sleep(0.5)
    assert smaps("LazyFree") <= before
    monkeypatch.delenv("FAKE_CUDA_REFUSES")
    batches = serve()  # Reuses the blocks that are still locked
    del batches
    gc.collect()
    wait_until(lambda: driver.fake_cuda_locked() == 0, "memory stays locked")
    assert driver.fake_cuda_wrong() == 0


def test_a_consumer_that_lets_many_batches_go_leaves_a_bounded_rest(opened):
    batches = iter(opened.dataset(BatchSpec(BATCH, SIDE), epochs=10))
    before = smaps("Rss")
    kept = [next(batches) for _ in range(80)]
    assert smaps("Rss") > before + 70 * BATCH_BYTES
    kept.clear()
    gc.collect()
    most = (256 << 20) + 10 * BATCH_BYTES  # spare memory, and batches in the queue
    assert smaps("Rss") < before + most

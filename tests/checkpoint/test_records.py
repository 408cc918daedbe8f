"""The file of one rank: a gradient state is read as it was written, without long runs of zeros."""

from __future__ import annotations

import json
import tracemalloc

import keras
import numpy as np

import tfcommx as cx
from tfcommx.checkpoint.records import BLOCK, OptimizerRecord, _as_json, _record_in
from tfcommx.checkpoint.state import copy_model
from tfcommx.runtime.gradient_state import GradientState


def test_a_rank_writes_its_shard_of_a_variable_and_not_the_zeros_around_it() -> None:
    shards, scalar = np.zeros(40 * BLOCK + 3, np.float32), np.float32([0.5])
    shards[7 * BLOCK : 9 * BLOCK] = np.arange(2 * BLOCK) - 5
    shards[-1] = np.nan
    state = GradientState(
        {"shards": shards, "zeros": np.zeros(5, np.float32)},
        {"scalar": scalar},
        {"warm": np.float32([0, 0, 1e-39])},
        {"shards": 7},
        {"shards": -3},
    )
    arrays: dict[str, np.ndarray] = {"index": np.zeros(1)}
    record = OptimizerRecord(
        ["shards"],
        state,
        "gradients",
        {"scalar": np.float32([-0.0, 0])},
        {"product": np.float32(0.5), "counts": np.ones((2, 3), np.int64)},
        [[1, 2]],
        ["shards"],
        {"shards": {"kind": np.frombuffer(b"SGD", np.uint8), "0": np.zeros(0, np.float32)}},
    )
    index = json.loads(json.dumps(_as_json(record, arrays)))
    assert sum(array.size for array in arrays.values()) < 3 * BLOCK
    read = _record_in(index, arrays)
    np.testing.assert_equal(read.unlisted, record.unlisted)
    np.testing.assert_equal(read.common, record.common)
    assert np.signbit(read.accumulated["scalar"]).tolist() == [True, False]
    assert read[:1] + read[5:7] == record[:1] + record[5:7]
    again = read.gradients
    for kind, kept in vars(state).items():
        other = getattr(again, kind)
        assert kept.keys() == other.keys()
        for path, part in kept.items():
            np.testing.assert_array_equal(part, other[path])
            assert np.asarray(part).dtype == np.asarray(other[path]).dtype


def test_a_model_is_copied_once() -> None:
    """Each variable was copied three times, while the step waited."""
    cx.init()
    model = keras.Sequential([keras.Input((500,)), keras.layers.Dense(500, use_bias=False)])
    model.compile(cx.DistributedOptimizer(keras.optimizers.SGD(0.1)), "mse", jit_compile=False)
    tracemalloc.start()
    try:
        arrays = copy_model(model)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    (kernel,) = (array for array in arrays.values() if array.size == 500 * 500)
    assert kernel.nbytes <= peak < 1.9 * kernel.nbytes
    # A thread writes the copies while the next steps change the variables
    before = {name: array.copy() for name, array in arrays.items()}
    for _ in range(2):
        model.fit(np.ones((2, 500)), np.zeros((2, 500)), verbose=0)
    for name, array in arrays.items():
        np.testing.assert_array_equal(array, before[name])
    assert not np.array_equal(copy_model(model)["weight0"], kernel)

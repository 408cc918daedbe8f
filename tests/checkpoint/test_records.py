"""The file of one rank: a gradient state is read as it was written, without long runs of zeros."""

from __future__ import annotations

import json

import numpy as np

from tfcommx.checkpoint.records import BLOCK, OptimizerRecord, _index_of, _record_in
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
        ["shards"], state, "gradients", {"scalar": scalar}, {}, [[1, 2]], ["shards"]
    )
    index = json.loads(json.dumps(_index_of(record, arrays)))
    assert sum(array.size for array in arrays.values()) < 3 * BLOCK
    again = _record_in(index, arrays).gradients
    for kind, kept in vars(state).items():
        other = getattr(again, kind)
        assert kept.keys() == other.keys()
        for path, part in kept.items():
            np.testing.assert_array_equal(part, other[path])
            assert np.asarray(part).dtype == np.asarray(other[path]).dtype

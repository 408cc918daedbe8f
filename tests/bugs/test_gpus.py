"""Past bugs in which GPU a rank keeps; the lists of devices are made up."""

from __future__ import annotations

from typing import Any

import pytest
import tensorflow as tf

from tfcommx.comm import gpu_identity
from tfcommx.comm.init import _check_one_rank_per_gpu, _keep_one_gpu
from tfcommx.comm.launcher import Launcher
from tfcommx.terms import PlanError


class Gathered:
    """A communicator of ranks that keep these GPUs of one host."""

    def __init__(self, *gpus: str) -> None:
        self.gpus = gpus

    def gather_objects(self, item: Any) -> list[Any]:
        return [(item[0], gpu) for gpu in self.gpus]


@pytest.mark.parametrize(
    ("seen", "kept"), [(1, [0, 0, 0, 0]), (2, [0, 1, 0, 1]), (4, [0, 1, 2, 3])]
)
def test_a_rank_keeps_one_of_the_gpus_that_it_sees(
    seen: int, kept: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With `srun --gpus-per-task=1` each rank sees one GPU; local rank 1 was refused."""
    chosen: list[int] = []
    monkeypatch.setattr(tf.config, "list_physical_devices", lambda kind=None: [*range(seen)])
    monkeypatch.setattr(tf.config, "set_visible_devices", lambda gpu, kind: chosen.append(gpu))
    monkeypatch.setattr(tf.config.experimental, "set_memory_growth", lambda gpu, on: None)
    for rank in range(4):
        _keep_one_gpu(Launcher("gloo", rank, 4, rank))
    assert chosen == kept


def test_two_ranks_on_one_gpu_are_refused_by_all() -> None:
    _check_one_rank_per_gpu(Gathered("a", "b", "", ""), "a")
    with pytest.raises(PlanError, match=r"One GPU per process .* Ranks 0 and 2 .* both keep a"):
        _check_one_rank_per_gpu(Gathered("a", "b", "a"), "b")


def test_gpus_are_compared_by_uuid_or_else_by_what_is_visible(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(gpu_identity, "_uuid", lambda number: "")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert gpu_identity.of(1) == "the GPU 1"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    assert gpu_identity.of(0) == "the GPU 0 of CUDA_VISIBLE_DEVICES=3"
    # A launcher that confines processes calls each one's GPU 0
    monkeypatch.setattr(gpu_identity, "_uuid", lambda number: "5e")
    assert gpu_identity.of(0) == "the GPU 5e"

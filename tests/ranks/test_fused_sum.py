"""The sum by which `init()` tries Horovod's CUDA kernels, here on CPUs, which need none."""

from __future__ import annotations

import pytest
import tensorflow as tf

from tfcommx.collectives import gpu_checks
from tfcommx.collectives.comm import Comm
from tfcommx.collectives.gpu_checks import RankGpu
from tfcommx.core import LaunchError


def test_horovods_fused_sums_are_right_or_refused_on_all_ranks(
    comm: Comm, monkeypatch: pytest.MonkeyPatch
) -> None:
    everyone = [
        RankGpu("node1", str(rank), "V100", 70, [70], True) for rank in range(comm.topology.size)
    ]
    gpu_checks.check_fused_sum(comm, everyone, "/cpu:0")
    if comm.topology.size == 1:
        pytest.skip("takes several ranks")
    right = comm._allreduce_list

    def unfilled(tensors: list[tf.Tensor], name: str, average: bool) -> list[tf.Tensor]:
        sums = right(tensors, name, average)
        return sums if comm.rank == 0 else [tf.zeros_like(total) for total in sums]

    monkeypatch.setattr(comm, "_allreduce_list", unfilled)
    with pytest.raises(LaunchError, match=r"rank 1, 0\.0\b"):
        gpu_checks.check_fused_sum(comm, everyone, "/cpu:0")

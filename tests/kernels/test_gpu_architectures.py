"""Which GPUs the CUDA code is built for, and which it runs on."""

from __future__ import annotations

import re

import pytest

from tfcommx.kernels import build as gpus
from tfcommx.kernels.build import Gpu

# As `nvcc --list-gpu-arch` of these releases has them, without those before 70
CUDA_12_4 = [70, 72, 75, 80, 86, 87, 89, 90]
CUDA_12_9 = [70, 72, 75, 80, 86, 87, 89, 90, 100, 101, 103, 120, 121]
CUDA_13_0 = [75, 80, 86, 87, 88, 89, 90, 100, 103, 110, 120, 121]
V100, T4, A10, B300 = Gpu("V100", 70), Gpu("T4", 75), Gpu("A10", 86), Gpu("B300", 103)


@pytest.mark.parametrize(
    ("listed", "chosen"),
    [
        (CUDA_12_4, [70, 75, 80, 90]),
        (CUDA_12_9, [70, 75, 80, 90, 100, 120]),
        (CUDA_13_0, [75, 80, 90, 100, 120]),
        ([50, 60, *CUDA_12_4], [70, 75, 80, 90]),
        ([*CUDA_13_0, 130, 132], [75, 80, 90, 100, 120, 130]),
        ([50, 61], []),
    ],
    ids=["12.4", "12.9", "13.0", "old ones too", "a later one", "too old"],
)
def test_without_a_gpu_all_generations_are_built(listed: list[int], chosen: list[int]) -> None:
    assert gpus.default_architectures(listed, []) == chosen
    # Every GPU of a cluster that this toolkit knows can run it
    if chosen:
        known = {number for number in listed if number >= gpus.OLDEST} - gpus.EMBEDDED
        assert all(gpus.covers(chosen, number) for number in known)


@pytest.mark.parametrize(
    ("listed", "present", "chosen"),
    [
        (CUDA_12_4, [V100, V100], [70]),
        (CUDA_12_4, [V100, T4, A10], [70, 75, 86]),
        (CUDA_13_0, [V100, T4], [75]),
        (CUDA_13_0, [V100], [75, 80, 90, 100, 120]),
        (CUDA_12_4, [B300], [90]),
        (CUDA_13_0, [Gpu("Orin", 87)], [87]),
        ([90, 100, 101, 120], [B300], [100]),
    ],
    ids=[
        "one kind",
        "three",
        "one that nvcc lacks",
        "only such",
        "a later one",
        "embedded",
        "a later one than embedded",
    ],
)
def test_with_gpus_these_are_built(
    listed: list[int], present: list[Gpu], chosen: list[int]
) -> None:
    assert gpus.default_architectures(listed, present) == chosen


@pytest.mark.parametrize(
    ("built", "gpu", "runs"),
    [
        ([70, 80, 90], 70, True),
        ([75, 80, 90], 70, False),
        ([80, 90], 75, False),
        ([70, 80], 75, True),
        ([70, 86, 90], 80, False),
        ([80, 90], 89, True),
        ([80, 90], 120, True),
        ([75, 80], 90, True),
        ([80, 100], 90, False),
        ([80, 90], 87, False),
        ([80, 87, 90], 87, True),
        ([87, 90], 89, False),
        ([80], 87, True),
        ([], 80, False),
    ],
)
def test_machine_code_runs_on_later_gpus_of_its_version_and_ptx_on_all_later_ones(
    built: list[int], gpu: int, runs: bool
) -> None:
    assert gpus.covers(built, gpu) == runs


@pytest.mark.parametrize(
    ("text", "numbers"), [("70", [70]), ("90, 70,80", [70, 80, 90]), ("80,80,120", [80, 120])]
)
def test_a_list_is_written_as_horovod_reads_it(text: str, numbers: list[int]) -> None:
    assert gpus.parse_list(text) == numbers


@pytest.mark.parametrize("text", ["7.0", "7.0;8.0", "80;90", "sm_80", "8.0+PTX", "80,", "90a", "8"])
def test_other_forms_of_a_list_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=f"HOROVOD_BUILD_CUDA_CC_LIST.*'{re.escape(text)}'"):
        gpus.parse_list(text)


def test_what_nvidia_smi_does_not_know_is_left_out() -> None:
    answer = "7.0, Tesla V100-SXM2-16GB\n[N/A], Tesla K80\nNo devices were found\n12.0, RTX 5090 \n"
    assert gpus.parse_gpus(answer) == [Gpu("Tesla V100-SXM2-16GB", 70), Gpu("RTX 5090", 120)]
    assert str(gpus.parse_gpus(answer)[0]) == "Tesla V100-SXM2-16GB (7.0)"

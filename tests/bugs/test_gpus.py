"""Past bugs in the choice of a rank's GPU, and in its use; the lists of devices are made up."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import tensorflow as tf

from tfcommx.collectives import gpu_checks
from tfcommx.collectives.comm import Comm
from tfcommx.collectives.gpu_checks import RankGpu
from tfcommx.collectives.threads import ThreadComm
from tfcommx.core import ConfigurationError, LaunchError, TfcommxError, Topology
from tfcommx.kernels import build, loader


def v100(number: int, host: str = "node1", **others: Any) -> RankGpu:
    return RankGpu(host, f"the GPU {number}", "Tesla V100", 70, **others)


def checked(*gpus: RankGpu) -> list[list[RankGpu]]:
    """Check, as each of the ranks that keep these."""
    topology = Topology(1, len(gpus))
    return ThreadComm.run(topology, lambda comm: gpu_checks.check_gpus(comm, gpus[comm.rank]))


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
    monkeypatch.setattr(
        tf.config.experimental,
        "get_device_details",
        lambda gpu: {"device_name": "Tesla V100", "compute_capability": (7, 0)},
    )
    monkeypatch.setattr(loader, "gpu_architectures", lambda: [70])
    ranks = [gpu_checks.keep_one_gpu(rank) for rank in range(4)]
    assert chosen == kept
    assert {(gpu.name, gpu.architecture, *(gpu.built or ())) for gpu in ranks} == {
        ("Tesla V100", 70, 70)
    }


@pytest.mark.parametrize("error", [RuntimeError("Physical devices"), ValueError("virtual devices")])
def test_a_tensor_before_init_is_an_error_that_says_so(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was TensorFlow's, without a remedy, and only on GPUs: on a CPU such a script works."""

    def refuse(gpu: int, on: bool) -> None:
        raise error

    monkeypatch.setattr(tf.config, "list_physical_devices", lambda kind=None: [0])
    monkeypatch.setattr(tf.config, "set_visible_devices", lambda gpu, kind: None)
    monkeypatch.setattr(tf.config.experimental, "set_memory_growth", refuse)
    with pytest.raises(ConfigurationError, match=rf"init\(\).*\b0: {error}"):
        gpu_checks.keep_one_gpu(0)


def test_a_rank_without_a_gpu_keeps_none() -> None:
    """Nothing more is looked at: a run on CPUs costs nothing."""
    mine = gpu_checks.keep_one_gpu(0)
    assert mine == RankGpu(mine.host)
    assert checked(mine, mine) == [[mine, mine]] * 2


def test_two_ranks_on_one_gpu_are_refused_by_all() -> None:
    checked(v100(0), v100(1), RankGpu("node1"), RankGpu("node1"), v100(0, "node2"))
    with pytest.raises(LaunchError, match=r"\b0 and 2\b.*node1 .*GPU 0\b"):
        checked(v100(0), v100(1), v100(0))


@pytest.mark.parametrize("built", [[75, 80, 90], [80], []])
def test_a_gpu_that_nothing_was_built_for_is_refused_before_the_first_step(
    built: list[int],
) -> None:
    """On V100 and T4 the first kernel failed in the first step, with CUDA's words."""
    t4 = RankGpu("node2", "the GPU 0", "Tesla T4", 75, [70, 75])
    refused = []

    def work(comm: Comm) -> None:
        try:
            gpu_checks.check_gpus(comm, [t4, v100(1, built=built)][comm.rank])
        except TfcommxError as error:
            refused.append(str(error))

    ThreadComm.run(Topology(2, 1), work)
    assert len(refused) == 2 and len({*refused}) == 1  # On all ranks, in the same words
    library = build.in_words(built)
    assert "on rank 1, Tesla V100 on node1 (compute capability 7.0) and" in refused[0]
    assert f" a library for {library}. Build both" in refused[0]
    assert "export HOROVOD_BUILD_CUDA_CC_LIST=70,75; python3 scripts/setup --gpu" in refused[0]
    assert "TFCOMMX_NATIVE=0" in refused[0]


def test_a_gpu_that_nothing_can_be_built_for_is_not_to_be_built_for() -> None:
    p100 = RankGpu("node1", "the GPU 0", "P100", 60, [80])
    with pytest.raises(LaunchError, match=r"P100 .*7\.0 .*CUDA_VISIBLE_DEVICES"):
        checked(p100, RankGpu("node1", "the GPU 1", "A100", 80, [80]))


def test_gpus_that_code_was_built_for_pass() -> None:
    """So do one of a version that TensorFlow does not say, and one without kernels of ours."""
    checked(
        v100(0, built=[70]),
        RankGpu("node1", "the GPU 1", "A100", 80, [70]),  # By PTX
        RankGpu("node1", "the GPU 2", "MI300", 0, []),
        v100(3, built=None),
    )


@pytest.mark.parametrize(("native", "expected"), [("1", [70, 80]), ("0", None)])
def test_without_the_native_library_its_gpus_do_not_matter(
    native: str, expected: list[int] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    facts = {"devices": loader.GPU_DEVICES, "architectures": [70, 80]}
    monkeypatch.setattr(loader, "facts", lambda: facts)
    monkeypatch.setenv("TFCOMMX_NATIVE", native)
    assert loader.gpu_architectures() == expected
    monkeypatch.setattr(loader, "facts", lambda: {"devices": "CPU only"})
    assert loader.gpu_architectures() is None


def sums(
    monkeypatch: pytest.MonkeyPatch, wrong: Callable[[Comm, list[tf.Tensor]], list[tf.Tensor]]
) -> None:
    """Check the sums of three ranks on CPUs, whose fused sums are passed through `wrong`."""
    right = ThreadComm._allreduce_list

    def summed(
        comm: ThreadComm, tensors: list[tf.Tensor], name: str, average: bool
    ) -> list[tf.Tensor]:
        return wrong(comm, right(comm, tensors, name, average))

    monkeypatch.setattr(ThreadComm, "_allreduce_list", summed)
    everyone = [v100(0, sums=True), v100(1, sums=True, built=[80]), v100(0, "node2", sums=True)]
    ThreadComm.run(
        Topology(1, 3), lambda comm: gpu_checks.check_fused_sum(comm, everyone, "/cpu:0")
    )


def test_right_sums_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    sums(monkeypatch, lambda comm, totals: totals)


@pytest.mark.parametrize(
    ("wrong", "received"),
    [
        (lambda comm, totals: [tf.zeros_like(total) for total in totals], r"0\.0 .*\b3\.0"),
        (
            lambda comm, totals: [*totals[:-1], totals[-1] * (float("nan") if comm.rank else 1.0)],
            r"rank 1, nan .*12\.0 .*tensor 3\b.*257",
        ),
        (
            # One tensor's place in the buffer is another's
            lambda comm, totals: [totals[0], tf.roll(totals[1], 1, 0), *totals[2:]],
            r"3003\.0 .*6\.0 .*tensor 1\b",
        ),
    ],
    ids=["nothing was copied", "on some ranks, in one tensor", "in another place"],
)
def test_buffers_that_horovod_leaves_unfilled_are_noticed(
    wrong: Any, received: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Horovod does not check that its kernels were launched, and training used such sums."""
    with pytest.raises(LaunchError, match=received) as caught:
        sums(monkeypatch, wrong)
    text = str(caught.value)
    assert "Tesla V100 on node1 (compute capability 7.0), Tesla V100 on node2" in text
    assert "export HOROVOD_BUILD_CUDA_CC_LIST=70; python3 scripts/setup --gpu" in text


def test_an_error_of_horovod_is_told_with_what_may_have_caused_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(comm: Comm, totals: list[tf.Tensor]) -> list[tf.Tensor]:
        raise tf.errors.UnknownError(None, None, "ncclAllReduce failed")

    with pytest.raises(LaunchError, match=r"rank 0, .*ncclAllReduce failed"):
        sums(monkeypatch, fail)


@pytest.mark.parametrize("without", [v100(1), RankGpu("node1")])
def test_nothing_is_added_where_horovod_adds_on_cpus(
    without: RankGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_checks, "wrong_sum", lambda *_: pytest.fail("added"))
    everyone = [v100(0, sums=True), without]
    ThreadComm.run(Topology(1, 2), lambda comm: gpu_checks.check_fused_sum(comm, everyone))


def test_gpus_are_compared_by_uuid_or_else_by_what_is_visible(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(gpu_checks, "_uuid", lambda number: "")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert gpu_checks.of(1) == "the GPU 1"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    assert gpu_checks.of(0) == "the GPU 0 of CUDA_VISIBLE_DEVICES=3"
    # A launcher that confines processes calls each one's GPU 0
    monkeypatch.setattr(gpu_checks, "_uuid", lambda number: "5e")
    assert gpu_checks.of(0) == "the GPU 5e"

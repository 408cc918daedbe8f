"""Published throughputs: values from sources, derived values, and models that have none."""

from __future__ import annotations

import pytest

from tfcommx.core import ConfigurationError
from tfcommx.simulator import models
from tfcommx.simulator.throughputs import GPUS, PUBLISHED, model_profile

# FLOP/s of dense matrices in 16 bits, of 8 bits on the H100, whose BERT ran in FP8: NVIDIA's
# data sheets
PEAK = {"v100": 125e12, "a100": 312e12, "h100": 1979e12}


@pytest.mark.parametrize(("gpu", "model"), PUBLISHED)
def test_no_gpu_computes_faster_than_its_peak(gpu: str, model: str) -> None:
    """A rate of another unit, such as word pieces, or of eight GPUs, would exceed it."""
    row = PUBLISHED[gpu, model]
    table = models.get(model, row.size)
    assert 0.1 < 6 * table.operations * row.samples_per_second(table) / PEAK[gpu] < 0.75 or (
        gpu == "h100" and row.rate is not None
    )
    assert (row.rate is None) != (row.model_flops is None) and row.source and row.batch >= 1


def test_newer_gpus_are_faster() -> None:
    for model in ("resnet50", "bert_large", "gpt2_xl"):
        rates = [1 / model_profile(model, gpu, batch=1).compute_s for gpu in GPUS]
        assert rates == sorted(rates, reverse=True)


def test_throughput_batch_and_size_replace_the_published_ones() -> None:
    assert model_profile("bert_large").batch == 48
    assert model_profile("alexnet", throughput=100).compute_s == pytest.approx(0.64)
    assert model_profile("resnet50", "v100", batch=12).compute_s == pytest.approx(0.01)
    with pytest.raises(ConfigurationError, match=r"batch.*0"):
        model_profile("resnet50", batch=0)
    with pytest.raises(ConfigurationError, match=r"'bert_large'.*512"):
        model_profile("bert_large", size=128)
    with pytest.raises(ConfigurationError, match=r"'p100'.*'v100'"):
        model_profile("resnet50", "p100")

"""Published training throughputs of one GPU in mixed precision, by GPU and model.

They are the default compute time of simulated models. A model without a published number on a GPU
gets one only from a published utilization of that GPU by a model of the same kind: samples per
second = model FLOP/s / (6 x multiply-adds of a sample), because each multiply-add is two
operations, and a backward pass costs two forward passes.

To add one: read the number in its source, and add a row to PUBLISHED with the source. All were
read on 2026-11-26. Rates of eight GPUs, each an eighth here, include the exchange in the node.
"""

from typing import NamedTuple

from tfcommx.core import ConfigurationError, LayerTable, Profile, check_name, check_number
from tfcommx.simulator import models


class Published(NamedTuple):
    """A throughput of one GPU; `rate` or `model_flops` is given."""

    # Samples of one GPU in a step.
    batch: int
    # Pixels a side, or words, of a sample.
    size: int
    # Address or paper, and where the number stands there.
    source: str
    # Samples per second, > 0.
    rate: float | None = None
    # FLOP/s of another model of the same kind, without recomputed activations, > 0.
    model_flops: float | None = None
    # How the number follows from the source, if it does not stand there.
    note: str = ""

    def samples_per_second(self, table: LayerTable) -> float:
        """Return the rate, derived from `model_flops` if it was not published."""
        return self.rate or (self.model_flops or 0.0) / (6 * table.operations)


_EXAMPLES = "https://github.com/NVIDIA/DeepLearningExamples/tree/729963d"
_MLPERF = "https://github.com/mlcommons/training_results_v3.0/tree/9f08e30"
_MPT = "https://github.com/mosaicml/llm-foundry/blob/061f2c7/scripts/train/benchmarking/README.md"
_RESNET = f"{_EXAMPLES}/PyTorch/Classification/ConvNets/resnet50v1.5"
_BERT = f"{_EXAMPLES}/PyTorch/LanguageModeling/BERT"
_TRANSFORMER = f"{_EXAMPLES}/PyTorch/Translation/Transformer"
# Word pieces of a sentence in the Transformer's table
_WORDS = 32

PUBLISHED: dict[tuple[str, str], Published] = {
    ("h100", "resnet50"): Published(
        *(400, 224, f"{_MLPERF}/NVIDIA/results/dgxh100_ngc23.04_mxnet/resnet: result_0"),
        rate=56056 / 8,
        note="56,056 on 8 GPUs by Horovod, the median of 35 epochs",
    ),
    ("h100", "bert_large"): Published(
        *(48, 512, f"{_MLPERF}/GIGABYTE/results/G593-SD0_pytorch/bert: result_0"),
        rate=7609 / 8 / 2,
        note="7,609 samples/s on 8 GPUs in FP8; two samples fill a sentence of 512",
    ),
    ("h100", "gpt2_xl"): Published(
        *(18, 1024, f"{_MPT}: H100 80GB BF16, 1b, 1024"),
        model_flops=415.1e12,
        note="MPT of 1.3 billion parameters reached 41.95 % of the peak, 415.1e12 FLOP/s",
    ),
    ("a100", "resnet50"): Published(256, 224, f"{_RESNET}: DGX A100 80GB, 1 GPU", rate=2470),
    ("a100", "bert_large"): Published(32, 512, f"{_BERT}: pre-training, DGX A100", rate=210),
    ("a100", "transformer_big"): Published(
        *(10240 // _WORDS, _WORDS, f"{_TRANSFORMER}: DGX A100 40GB, 1 GPU"),
        rate=82059 / _WORDS,
        note="82,059 target word pieces/s, in batches of 10,240",
    ),
    ("a100", "gpt2_xl"): Published(
        *(18, 1024, f"{_MPT}: A100 80GB, 1b, 1024"),
        model_flops=187.7e12,
        note="the same MPT reached 60.15 % of the peak, 187.7e12 FLOP/s",
    ),
    ("v100", "resnet50"): Published(256, 224, f"{_RESNET}: DGX-1 16GB, 1 GPU", rate=1200),
    ("v100", "vgg19"): Published(256, 224, "Shi et al. (CommLib, 2021), section 5.5.2", rate=560),
    ("v100", "bert_large"): Published(8, 512, f"{_BERT}: pre-training, DGX-1 32G", rate=75),
    ("v100", "transformer_big"): Published(
        *(10240 // _WORDS, _WORDS, f"{_TRANSFORMER}: DGX-2 32GB, 1 GPU"),
        rate=39911 / _WORDS,
        note="39,911 target word pieces/s, in batches of 10,240",
    ),
    # 40 blocks of 1,536 units (arXiv 1909.08053, table 1) on texts of 1,024 word pieces:
    # (6 x 1.2e9 + 12 x 40 x 1,536 x 1,024) x 8 x 1,024 / 1.288 s
    ("v100", "gpt2_xl"): Published(
        *(8, 1024, "https://nv-adlr.github.io/MegatronLMV1: table 1"),
        model_flops=50.6e12,
        note="8 texts in 1.288 s by a GPT-2 of 1.2 billion parameters, 50.6e12 FLOP/s",
    ),
}
GPUS = tuple(dict.fromkeys(gpu for gpu, _ in PUBLISHED))
GPU_NAMES = ", ".join(GPUS)
# The newest GPU of the table
DEFAULT_GPU = GPUS[0]
# Samples of a step whose throughput the user gives without a batch
DEFAULT_BATCH = 64


def model_profile(
    model: str,
    gpu: str = DEFAULT_GPU,
    throughput: float | None = None,
    batch: int | None = None,
    size: int | None = None,
) -> Profile:
    """Return the profile of a model of the tables on one GPU.

    >>> profile = model_profile("resnet50", "a100")
    >>> profile.batch, round(profile.batch / profile.compute_s)
    (256, 2470)

    Args:
        model: a name of `models.MODELS`.
        gpu: its published throughput, batch and size are the defaults of the next three.
        throughput: samples per second of one GPU alone, > 0; `gpu` is then ignored.
        batch: samples of one GPU in a step, >= 1.
        size: pixels a side, or words, of a sample, >= 1.

    **Raises:** ConfigurationError for an unknown model or GPU, a throughput that is not positive,
    and if none is given or published.
    """
    if throughput is not None:
        check_number("throughput", throughput, "> 0")
        table = models.get(model, size)
        samples = DEFAULT_BATCH if batch is None else batch
        return Profile.from_throughput(table, throughput, batch=samples)
    models.get(model)
    published = PUBLISHED.get((check_name("GPU", gpu, GPUS), model))
    if published is None or size not in (None, published.size):
        have = {other: row.size for (other, name), row in PUBLISHED.items() if name == model}
        raise ConfigurationError(
            f"A throughput is required: none is published for {model!r} on {gpu!r}"
            f"{'' if size is None else f' at size {size}'}. GPUs and sizes that have one: "
            f"{have or 'none'}. Give `throughput`, measured on one GPU."
        )
    table = models.get(model, published.size)
    samples = published.batch if batch is None else batch
    return Profile.from_throughput(table, published.samples_per_second(table), batch=samples)

"""Tables of layers against published numbers of parameters, tensors and multiply-adds."""

from __future__ import annotations

import pytest

from tfcommx.core import ConfigurationError
from tfcommx.simulator import models

# Parameters and tensors, exactly, with their source.
COUNTS = {
    # torchvision's resnet50; 161 tensors: Shi et al. (2020), table V
    "resnet50": (25_557_032, 161),
    # Theano-MPI (2016), and torchvision's vgg16: 13 convolutions and 3 dense layers with biases
    "vgg16": (138_357_544, 32),
    # torchvision's vgg19
    "vgg19": (143_667_240, 38),
    # 54 tensors: Shi et al. (2020), table V; 14.7 million: Shi et al., "A Distributed Synchronous
    # SGD Algorithm with Global Top-k Sparsification" (2019), table IV; exactly: the sum by hand,
    # 13 convolutions (14,714,688), their normalizations (8,448), 512 x 10 + 10
    "vgg16_cifar": (14_728_266, 54),
    # Theano-MPI (2016), section 4: 60,965,224; 8 layers with biases
    "alexnet": (60_965_224, 16),
    # Theano-MPI (2016), section 4: 13,378,280; 57 convolutions, 1 dense layer, 2 x 3 auxiliary ones
    "googlenet": (13_378_280, 128),
    # torchvision's inception_v3 with its auxiliary classifier; 96 convolutions of 3, 2 dense of 2
    "inception_v3": (27_161_264, 292),
    # timm's inception_v4: 42,679,816; 449 tensors: Shi et al. (2020), table V
    "inception_v4": (42_679_816, 449),
    # transformers' BertForPreTraining; 206 tensors, 110.1 million: Zhang et al., "DeAR" (2023),
    # table I, which also has 398 and 336.2 million
    "bert_base": (110_106_428, 206),
    "bert_large": (336_226_108, 398),
    # transformers' GPT2Model of gpt2-xl: "1558M" of OpenAI's repository; 48 blocks of 12, 2 + 2
    "gpt2_xl": (1_557_611_200, 580),
    # 11 tensors: Shi et al. (2020), table V; 66.0 million: Zaremba et al. (2014), section 4.1
    "lstm_ptb": (66_034_000, 11),
}
# Vaswani et al. (2017), table 3, in millions of parameters; their vocabulary is "about 37,000"
ROUNDED = {"transformer_base": 65, "transformer_big": 213}
# Multiply-adds of a forward pass of one sample, in 10^9, as torchvision (resnet50, vgg: "GFLOPS"
# of its table of weights) and timm (inception_v4) print them; AlexNet with groups:
# Sze et al., "Efficient Processing of Deep Neural Networks" (2017), table II. GoogLeNet: the sum of
# its paper's table 1, 1.502, with 7 x 7 x 3 x 64 x 112^2 = 0.118 in place of its first row's 0.034
OPERATIONS = {
    "resnet50": 4.09,
    "vgg16": 15.47,
    "vgg19": 19.63,
    "alexnet": 0.724,
    "googlenet": 1.586,
    "inception_v3": 5.713,
    "inception_v4": 12.28,
}


@pytest.mark.parametrize("name", COUNTS)
def test_parameters_and_tensors_as_published(name: str) -> None:
    table = models.get(name)
    assert (table.parameters, table.tensors) == COUNTS[name]


@pytest.mark.parametrize("name", ROUNDED)
def test_parameters_as_published_in_round_numbers(name: str) -> None:
    assert models.get(name).parameters / 1e6 == pytest.approx(ROUNDED[name], rel=0.035)
    # An embedding; 6 x (4 + 4 + 4), and 6 x (2 x 4 + 4 + 6)
    assert models.get(name).tensors == 1 + 6 * 12 + 6 * 18


@pytest.mark.parametrize("name", OPERATIONS)
def test_operations_as_published(name: str) -> None:
    """Within the few per cent by which counts differ that include additions and poolings."""
    table = models.get(name)
    assert table.operations / 1e9 == pytest.approx(OPERATIONS[name], rel=0.03)


def test_every_model_has_a_published_count() -> None:
    assert set(models.MODELS) == {*COUNTS, *ROUNDED}


def test_operations_follow_the_size_of_a_sample() -> None:
    """A quarter of the pixels takes a quarter of the convolutions; variables stay."""
    large, small = models.get("resnet50", 448), models.get("resnet50", 224)
    assert large.parameters == small.parameters
    assert large.operations / small.operations == pytest.approx(4, rel=0.002)


def test_unknown_models_and_sizes_are_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"'resnet5'.*'resnet50'"):
        models.get("resnet5")
    with pytest.raises(ConfigurationError, match=r"`size`.*\b0\b"):
        models.get("resnet50", 0)
    with pytest.raises(ConfigurationError, match=r"\b11 x 11\b"):
        models.get("alexnet", 3)

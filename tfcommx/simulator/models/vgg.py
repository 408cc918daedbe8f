"""VGG-16 and VGG-19 on ImageNet; VGG-16 on CIFAR-10, with normalization and one dense layer.

Source: Simonyan and Zisserman, "Very Deep Convolutional Networks" (2015), table 1, columns D and E.
Nobody trains the three dense layers of 4,096 on CIFAR-10: its usual form has one, and
normalization after each convolution. Shi et al. (2020), table V, count its 54 tensors.
"""

from __future__ import annotations

from tfcommx.simulator.models.builder import Builder
from tfcommx.terms import LayerTable

FILTERS = (64, 128, 256, 512, 512)


def vgg16(pixels: int = 224) -> LayerTable:
    """Return the layers of VGG-16 for images of pixels x pixels."""
    return _imagenet("vgg16", (2, 2, 3, 3, 3), pixels)


def vgg19(pixels: int = 224) -> LayerTable:
    """Return the layers of VGG-19 for images of pixels x pixels."""
    return _imagenet("vgg19", (2, 2, 4, 4, 4), pixels)


def vgg16_cifar(pixels: int = 32) -> LayerTable:
    """Return the layers of VGG-16 with normalization for ten classes."""
    model = _convolutions((2, 2, 3, 3, 3), pixels, norm=True)
    model.dense("classes", 10)
    return model.table("vgg16_cifar", f"an image of {pixels} x {pixels}")


def _imagenet(name: str, convolutions: tuple[int, ...], pixels: int) -> LayerTable:
    model = _convolutions(convolutions, pixels, norm=False)
    model.dense("dense1", 4096)
    model.dense("dense2", 4096)
    model.dense("classes", 1000)
    return model.table(name, f"an image of {pixels} x {pixels}")


def _convolutions(counts: tuple[int, ...], pixels: int, norm: bool) -> Builder:
    model = Builder(pixels, 3)
    for block, (count, filters) in enumerate(zip(counts, FILTERS, strict=True), start=1):
        for number in range(1, count + 1):
            model.convolve(f"conv{block}_{number}", filters, 3, bias=True, norm=norm)
        model.pool(2, 2)
    return model

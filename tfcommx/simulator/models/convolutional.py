"""Convolutional networks: AlexNet, VGG, GoogLeNet and ResNet-50."""

from __future__ import annotations

from tfcommx.core import LayerTable
from tfcommx.simulator.models.builder import Builder


def alexnet(pixels: int = 227) -> LayerTable:
    """Return the layers of AlexNet, with the two groups of convolutions 2, 4 and 5.

    Source: Krizhevsky et al., "ImageNet Classification with Deep Convolutional Neural Networks"
    (2012), section 3.5, in one column: 96, 256, 384, 384 and 256 filters.
    """
    model = Builder(pixels, 3)
    model.convolve("conv1", 96, 11, stride=4, valid=True, bias=True)
    model.pool(3, 2, valid=True)
    model.convolve("conv2", 256, 5, groups=2, bias=True)
    model.pool(3, 2, valid=True)
    model.convolve("conv3", 384, 3, bias=True)
    model.convolve("conv4", 384, 3, groups=2, bias=True)
    model.convolve("conv5", 256, 3, groups=2, bias=True)
    model.pool(3, 2, valid=True)
    model.dense("dense6", 4096)
    model.dense("dense7", 4096)
    model.dense("classes", 1000)
    return model.table("alexnet", f"an image of {pixels} x {pixels}")


FILTERS = (64, 128, 256, 512, 512)


def vgg16(pixels: int = 224) -> LayerTable:
    """Return the layers of VGG-16 for images of pixels x pixels.

    Source: Simonyan and Zisserman, "Very Deep Convolutional Networks" (2015), table 1, columns D
    and E.
    """
    return _imagenet("vgg16", (2, 2, 3, 3, 3), pixels)


def vgg19(pixels: int = 224) -> LayerTable:
    """Return the layers of VGG-19 for images of pixels x pixels."""
    return _imagenet("vgg19", (2, 2, 4, 4, 4), pixels)


def vgg16_cifar(pixels: int = 32) -> LayerTable:
    """Return the layers of VGG-16 on CIFAR-10, with normalization and one dense layer.

    The usual form on CIFAR-10 has one dense layer instead of the three of 4,096 units, and a
    normalization after each convolution. Shi et al. (2020), table V, count its 54 tensors.
    """
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


# Filters of a module: 1x1; 3x3 after a reduction; 5x5 after a reduction; 1x1 after pooling
MODULES = {
    "3a": (64, 96, 128, 16, 32, 32),
    "3b": (128, 128, 192, 32, 96, 64),
    "4a": (192, 96, 208, 16, 48, 64),
    "4b": (160, 112, 224, 24, 64, 64),
    "4c": (128, 128, 256, 24, 64, 64),
    "4d": (112, 144, 288, 32, 64, 64),
    "4e": (256, 160, 320, 32, 128, 128),
    "5a": (256, 160, 320, 32, 128, 128),
    "5b": (384, 192, 384, 48, 128, 128),
}
# Modules after which pooling halves the image, and modules with an auxiliary classifier
HALVED, CLASSIFIED = ("3b", "4e"), ("4a", "4d")


def googlenet(pixels: int = 224) -> LayerTable:
    """Return the layers of GoogLeNet, with its two auxiliary classifiers.

    Source: Szegedy et al., "Going Deeper with Convolutions" (2015), table 1 and section 5.
    """
    model = Builder(pixels, 3)
    model.convolve("conv1", 64, 7, stride=2, bias=True)
    model.pool(3, 2)
    model.convolve("conv2/reduce", 64, 1, bias=True)
    model.convolve("conv2", 192, 3, bias=True)
    model.pool(3, 2)
    for name, filters in MODULES.items():
        _module(model, name, filters)
        if name in CLASSIFIED:
            _auxiliary(model.branch(), f"{name}/auxiliary")
        if name in HALVED:
            model.pool(3, 2)
    model.pool_all()
    model.dense("classes", 1000)
    return model.table("googlenet", f"an image of {pixels} x {pixels}")


def _module(model: Builder, name: str, filters: tuple[int, ...]) -> None:
    one_by_one, three_reduced, three, five_reduced, five, pooled = filters
    a, b, c, d = (model.branch() for _ in range(4))
    a.convolve(f"{name}/1x1", one_by_one, 1, bias=True)
    b.convolve(f"{name}/3x3_reduce", three_reduced, 1, bias=True)
    b.convolve(f"{name}/3x3", three, 3, bias=True)
    c.convolve(f"{name}/5x5_reduce", five_reduced, 1, bias=True)
    c.convolve(f"{name}/5x5", five, 5, bias=True)
    d.convolve(f"{name}/pooled", pooled, 1, bias=True)
    model.join([a, b, c, d])


def _auxiliary(model: Builder, name: str) -> None:
    model.pool(5, 3, valid=True)
    model.convolve(f"{name}/conv", 128, 1, bias=True)
    model.dense(f"{name}/dense", 1024)
    model.dense(f"{name}/classes", 1000)


def resnet50(pixels: int = 224) -> LayerTable:
    """Return the layers of ResNet-50, with the stride in the 3 x 3 convolution (version 1.5).

    Source: He et al., "Deep Residual Learning for Image Recognition" (2016), table 1.
    """
    model = Builder(pixels, 3)
    model.convolve("conv1", 64, 7, stride=2, norm=True)
    model.pool(3, 2)
    for stage, (blocks, filters) in enumerate([(3, 64), (4, 128), (6, 256), (3, 512)], start=2):
        for block in range(blocks):
            _block(model, f"conv{stage}_{block + 1}", filters, block == 0, stage > 2)
    model.pool_all()
    model.dense("classes", 1000)
    return model.table("resnet50", f"an image of {pixels} x {pixels}")


def _block(model: Builder, name: str, filters: int, first: bool, halves: bool) -> None:
    stride = 2 if first and halves else 1
    main, shortcut = model.branch(), model.branch()
    main.convolve(f"{name}/reduce", filters, 1, norm=True)
    main.convolve(f"{name}/middle", filters, 3, stride=stride, norm=True)
    main.convolve(f"{name}/expand", 4 * filters, 1, norm=True)
    if first:
        shortcut.convolve(f"{name}/shortcut", 4 * filters, 1, stride=stride, norm=True)
    model.join([main])

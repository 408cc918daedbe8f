"""Convolutional networks: AlexNet, VGG, GoogLeNet, Inception and ResNet-50."""

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
        text = "{}@1 | {}@1 {}@3 | {}@1 {}@5 | {}@1".format(*filters)
        model.module(name, text, bias=True)
        if name in CLASSIFIED:
            _auxiliary(model.branch(), f"{name}/auxiliary")
        if name in HALVED:
            model.pool(3, 2)
    model.pool_all()
    model.dense("classes", 1000)
    return model.table("googlenet", f"an image of {pixels} x {pixels}")


def _auxiliary(model: Builder, name: str) -> None:
    model.pool(5, 3, valid=True)
    model.convolve(f"{name}/conv", 128, 1, bias=True)
    model.dense(f"{name}/dense", 1024)
    model.dense(f"{name}/classes", 1000)


def inception_v3(pixels: int = 299) -> LayerTable:
    """Return the layers of Inception-v3, with its auxiliary classifier.

    Source: Szegedy et al., "Rethinking the Inception Architecture for Computer Vision" (2016),
    table 1 and figures 5 to 8; widths of the branches and of the auxiliary classifier as in
    torchvision.
    """
    model = Builder(pixels, 3)
    model.convolve("stem1", 32, 3, stride=2, valid=True, norm=True)
    model.convolve("stem2", 32, 3, valid=True, norm=True)
    model.convolve("stem3", 64, 3, norm=True)
    model.pool(3, 2, valid=True)
    model.convolve("stem4", 80, 1, norm=True)
    model.convolve("stem5", 192, 3, valid=True, norm=True)
    model.pool(3, 2, valid=True)
    for number, pooled in enumerate((32, 64, 64), start=1):
        text = f"64@1 | 48@1 64@5 | 64@1 96@3 96@3 | pool {pooled}@1"
        model.module(f"a{number}", text, norm=True)
    model.module("reduction_a", "384@3/2 | 64@1 96@3 96@3/2 | pool/2", norm=True)
    for number, inner in enumerate((128, 160, 160, 192), start=1):
        short = f"{inner}@1 {inner}@1x7 192@7x1"
        long = f"{inner}@1 {inner}@7x1 {inner}@1x7 {inner}@7x1 192@1x7"
        model.module(f"b{number}", f"192@1 | {short} | {long} | pool 192@1", norm=True)
    auxiliary = model.branch()
    auxiliary.pool(5, 3, valid=True)
    auxiliary.convolve("auxiliary/conv1", 128, 1, norm=True)
    auxiliary.convolve("auxiliary/conv2", 768, 5, valid=True, norm=True)
    auxiliary.dense("auxiliary/classes", 1000)
    text = "192@1 320@3/2 | 192@1 192@1x7 192@7x1 192@3/2 | pool/2"
    model.module("reduction_b", text, norm=True)
    for number in (1, 2):
        text = "320@1 | 384@1 *384 | 448@1 384@3 *384 | pool 192@1"
        model.module(f"c{number}", text, norm=True)
    model.pool_all()
    model.dense("classes", 1000)
    return model.table("inception_v3", f"an image of {pixels} x {pixels}")


V4_LONG = "192@1 192@1x7 224@7x1 224@1x7 256@7x1"
# Inception-v4 behind its first three convolutions: name, number of such modules, and branches
V4_MODULES = (
    ("stem2", 1, "pool/2 | 96@3/2"),
    ("stem3", 1, "64@1 96@3V | 64@1 64@7x1 64@1x7 96@3V"),
    ("stem4", 1, "192@3/2 | pool/2"),
    ("a", 4, "pool 96@1 | 96@1 | 64@1 96@3 | 64@1 96@3 96@3"),
    ("reduction_a", 1, "pool/2 | 384@3/2 | 192@1 224@3 256@3/2"),
    ("b", 7, f"pool 128@1 | 384@1 | 192@1 224@1x7 256@7x1 | {V4_LONG}"),
    ("reduction_b", 1, "pool/2 | 192@1 192@3/2 | 256@1 256@1x7 320@7x1 320@3/2"),
    ("c", 3, "pool 256@1 | 256@1 | 384@1 *256 | 384@1 448@1x3 512@3x1 *256"),
)


def inception_v4(pixels: int = 299) -> LayerTable:
    """Return the layers of Inception-v4: 149 convolutions, each with a normalization.

    Source: Szegedy et al., "Inception-v4, Inception-ResNet and the Impact of Residual Connections
    on Learning" (2017), figures 3 to 9 and table 1.
    """
    model = Builder(pixels, 3)
    model.convolve("stem1a", 32, 3, stride=2, valid=True, norm=True)
    model.convolve("stem1b", 32, 3, valid=True, norm=True)
    model.convolve("stem1c", 64, 3, norm=True)
    for name, count, text in V4_MODULES:
        for number in range(1, count + 1):
            model.module(f"{name}{number}" if count > 1 else name, text, norm=True)
    model.pool_all()
    model.dense("classes", 1000)
    return model.table("inception_v4", f"an image of {pixels} x {pixels}")


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
    shortcut = model.branch()
    model.convolve(f"{name}/reduce", filters, 1, norm=True)
    model.convolve(f"{name}/middle", filters, 3, stride=stride, norm=True)
    model.convolve(f"{name}/expand", 4 * filters, 1, norm=True)
    if first:
        shortcut.convolve(f"{name}/shortcut", 4 * filters, 1, stride=stride, norm=True)
